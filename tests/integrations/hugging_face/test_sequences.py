"""Numbers of whole sequences over ranks: log-probabilities, sums, classifiers, and models with adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import cp_fast
from cp_fast.integrations import sequences
from cp_fast.integrations import transformers as ours
from cp_fast.integrations.hugging_face.built_masks import without_blocks
from cp_fast.integrations.sequences import sequence_sum, token_log_probs, token_log_probs_and_entropy
from cp_ref import SimGroup
from tests.integrations.hugging_face.test_transformers import SIZES, batches, model_of
from tests.meta.step.step_processes import StepProcesses

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

HEADS: dict[str, tuple[str, dict[str, Any]]] = {  # models that change their logits
    "Llama": ("LlamaConfig", {}),
    "Gemma 2": ("Gemma2Config", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16, "sliding_window": 5}),
    "Granite": ("GraniteConfig", {"logits_scaling": 3.0}),
    "HyperCLOVA-X": ("HyperCLOVAXConfig", {"logits_scaling": 0.3}),
    "Cohere": ("CohereConfig", {"logit_scale": 0.3, "eos_token_id": 1, "bos_token_id": 1}),
}


def causal(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SIZES | more)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model


def packed() -> tuple[dict[str, torch.Tensor], list[tuple[int, int]]]:
    batch = batches()["packed"]
    return batch | {"labels": batch["input_ids"].clone()}, [(0, 11), (11, 14), (14, 32)]


@pytest.mark.parametrize("name", HEADS)
def test_log_probabilities_of_documents_are_those_of_one_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of three tokens; the gradients of all ranks add up to those of a loss of the sums."""
    monkeypatch.setattr(sequences, "_CHUNK_BYTES", 3 * 4 * 5 * SIZES["vocab_size"])
    kind, more = HEADS[name]
    batch, spans = packed()
    whole, weights = causal(kind, **more), torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
    alone = copy.deepcopy(whole)
    logits = [alone(input_ids=batch["input_ids"][:, a:b], use_cache=False).logits[0, :-1] for a, b in spans]
    labels = [batch["labels"][0, a + 1 : b] for a, b in spans]
    expected = torch.stack([-F.cross_entropy(x, y, reduction="sum") for x, y in zip(logits, labels, strict=True)])
    torch.sigmoid(weights * expected / 20).sum().backward()

    def one(member: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        context = cp_fast.ContextParallel(member, layout="balanced")
        model = ours.prepare(copy.deepcopy(whole), context)
        part = ours.shard_batch(batch, cp=context)
        sums = sequence_sum(token_log_probs(model, part), part)
        (torch.sigmoid(weights * sums / 20).sum() / context.size).backward()
        assert (getattr(model.config, "final_logit_softcapping", None) or 3.0) == 3.0  # as it was
        return sums.detach(), {n: w.grad for n, w in model.named_parameters()}

    for sums, _ in (found := SimGroup(2).run(one)):
        torch.testing.assert_close(sums, expected, rtol=1e-6, atol=1e-6)
    for n, weight in alone.named_parameters():
        torch.testing.assert_close(sum(grads[n] for _, grads in found), weight.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["dual_chunk", "balanced"])
def test_values_at_last_tokens(layout: Any) -> None:
    """Of each packed document; the gradient of one goes to its last token alone."""
    batch, spans = packed()
    values = torch.randn(1, 32, 2, generator=torch.Generator().manual_seed(3))

    def one(member: Any) -> None:
        context = cp_fast.ContextParallel(member, layout=layout)
        own = ours.shard_batch(batch, cp=context)["cp_batch"]
        mine = own.shard(values, 0.0).requires_grad_()
        found = own.at_last_tokens(mine)
        assert torch.equal(found, values[0, [b - 1 for _, b in spans]])
        (found[1].sum() / context.size).backward()
        wanted = torch.zeros_like(values)
        wanted[0, spans[1][1] - 1] = 1.0
        assert torch.equal(mine.grad, own.shard(wanted, 0.0))

    SimGroup(2).run(one)


def peak_bytes(run: Callable[[], object]) -> int:
    """The memory that a function takes at most, beside what it leaves behind."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    results: Any = found.profiler
    held = list(accumulate(e.nbytes() for e in results.kineto_results.events() if e.name() == "[memory]"))
    return max(held) - held[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_take_the_room_of_a_chunk(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 tokens of 80,000 words, whose logits alone take 20 MB in float32; embeddings and head are frozen."""
    monkeypatch.setattr(sequences, "_CHUNK_BYTES", 2**22)
    ids = torch.randint(1, 80000, (1, 64))

    def one(member: Any) -> int:
        context = cp_fast.ContextParallel(member)
        model = ours.prepare(causal("LlamaConfig", vocab_size=80000).to(dtype), context)
        for frozen in (model.get_input_embeddings(), model.get_output_embeddings()):
            frozen.requires_grad_(False)
        part = ours.shard_batch({"input_ids": ids, "labels": ids}, cp=context)
        token_log_probs(model, part).sum().backward()
        return peak_bytes(lambda: token_log_probs(model, part).sum().backward())

    [most] = SimGroup(1).run(one)
    assert 2**19 < most < 2**22 + 2**20


def test_what_log_probabilities_refuse() -> None:
    class Biased(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, position_ids: Any = None, **named: Any) -> Any:
            out = super().forward(input_ids, position_ids=position_ids, **named)
            return type(out)(logits=out.logits + 1)

    batch, _ = packed()

    def one(member: Any) -> None:
        context = cp_fast.ContextParallel(member)
        model = ours.prepare(causal("LlamaConfig"), context)
        part = ours.shard_batch(batch, cp=context)
        unlabelled = {n: x for n, x in part.items() if "labels" not in n}
        with pytest.raises(ValueError, match="part has no shift_labels; give shard_batch a batch with labels"):
            token_log_probs(model, unlabelled)
        with pytest.raises(TypeError, match=r"part is of type torch.Tensor; it must be what shard_batch returned"):
            sequence_sum(torch.ones(1, 16), torch.ones(1))
        with pytest.raises(ValueError, match=r"values has shape \[16\]; it must be \[b, s/cp\] = \[1, 34\]"):
            sequence_sum(torch.ones(16), part)
        with pytest.raises(TypeError, match=r"values is of dtype torch.int64; it must be .* floating"):
            sequence_sum(part["input_ids"], part)
        for wrong in (0, -1.0, float("nan"), True):
            with pytest.raises((ValueError, TypeError), match="temperature is"):
                token_log_probs(model, part, temperature=wrong)
        other = ours.prepare(Biased(transformers.LlamaConfig(**SIZES)), context)
        with pytest.raises(NotImplementedError, match=r"Biased changes logits behind .*model\(\*\*part\).logits"):
            token_log_probs(other, part)
        inner = ours.prepare(transformers.LlamaModel(transformers.LlamaConfig(**SIZES)), context)
        with pytest.raises(TypeError, match="LlamaModel has no output embeddings"):
            token_log_probs(inner, part)

    SimGroup(1).run(one)


class Changed(transformers.LlamaForCausalLM):
    """Its own code changes its logits: no entry of its configuration says how."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **named: Any) -> Any:
        out = super().forward(input_ids, position_ids=position_ids, **named)
        return type(out)(logits=self.change(out.logits))

    change: Any = staticmethod(lambda logits: logits * 1.5)


@pytest.mark.parametrize("change", [lambda x: 0.2 * torch.tanh(x / 0.3), lambda x: x * 1.5])
def test_scales_and_caps_are_seen_from_what_the_head_does(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Beside the log-probability the entropy, both of logits that a temperature divides, with their gradients."""
    batch, spans = packed()
    torch.manual_seed(0)
    whole = Changed(transformers.LlamaConfig(**SIZES)).double()
    whole.change = change
    alone = copy.deepcopy(whole)
    expected = []
    for a, b in spans:
        logs = alone(input_ids=batch["input_ids"][:, a:b], use_cache=False).logits[0, :-1].div(0.7).log_softmax(-1)
        chosen = logs.gather(-1, batch["labels"][0, a + 1 : b, None])
        expected.append(torch.stack([chosen.sum(), -(logs.exp() * logs).sum()]))
    (torch.stack(expected).sum(0) * torch.tensor([0.3, 1.7])).sum().backward()

    def one(member: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        context = cp_fast.ContextParallel(member, layout="balanced")
        model = ours.prepare(copy.deepcopy(whole), context)
        part = ours.shard_batch(batch, cp=context)
        pair = token_log_probs_and_entropy(model, part, temperature=0.7)
        torch.testing.assert_close(token_log_probs(model, part, temperature=0.7), pair[0])
        sums = torch.stack([sequence_sum(x, part) for x in pair], dim=-1)
        (0.3 * pair[0].sum() + 1.7 * pair[1].sum()).backward()
        return sums.detach(), {n: w.grad for n, w in model.named_parameters()}

    for sums, _ in (found := SimGroup(2).run(one)):
        torch.testing.assert_close(sums, torch.stack(expected).detach(), rtol=1e-6, atol=1e-6)
    for n, weight in alone.named_parameters():
        torch.testing.assert_close(sum(grads[n] for _, grads in found), weight.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["Gemma2Config", "GraniteConfig"])
def test_a_head_of_images_does_not_do_what_its_text_model_alone_does(kind: str) -> None:
    """LLaVA applies no cap and no scale, whatever the configuration of its text says."""
    changes = {"final_logit_softcapping": 0.5, "sliding_window": 5} if "Gemma" in kind else {"logits_scaling": 3.0}
    text = getattr(transformers, kind)(**SIZES, **changes)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=4, projection_dim=16)
    torch.manual_seed(0)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=1)
    whole = transformers.LlavaForConditionalGeneration(config).double().eval()
    whole.lm_head.weight.data.mul_(20)
    ids = torch.randint(5, 50, (1, 22))
    logs = copy.deepcopy(whole)(input_ids=ids).logits[0, :-1].log_softmax(-1)

    def one(member: Any) -> torch.Tensor:
        context = cp_fast.ContextParallel(member)
        model = ours.prepare(copy.deepcopy(whole), context)
        part = ours.shard_batch({"input_ids": ids, "labels": ids}, cp=context, model=model)
        return token_log_probs(model, part).sum().detach()

    expected = logs.gather(-1, ids[0, 1:, None]).sum().detach()
    torch.testing.assert_close(sum(SimGroup(2).run(one)), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
def test_changed_logits_are_refused_whatever_the_labels_are(when: str) -> None:
    """A rank without labels raises too, or the others would wait for the sum."""
    ids = torch.randint(1, 50, (1, 32))
    batch = {"input_ids": ids, "labels": ids.masked_fill(torch.arange(32) > 10, -100)}
    said = {"before": "in a way that cp_fast does not know", "after": "otherwise than when it was prepared"}

    def one(member: Any) -> None:
        context = cp_fast.ContextParallel(member, layout="contiguous")
        model = Changed(transformers.LlamaConfig(**SIZES))
        change = (lambda x: x**3) if when == "before" else (lambda x: 30 * torch.tanh(x / 30))
        if when == "before":
            model.change = change
        model = ours.prepare(model, context)
        model.change = change
        with pytest.raises(NotImplementedError, match=rf"Changed changes logits behind .* {said[when]}"):
            token_log_probs(model, ours.shard_batch(batch, cp=context))

    SimGroup(2).run(one)


@pytest.mark.parametrize("both_sides", [True, False])
def test_full_attention_and_windows_made_of_causal_masks(both_sides: bool) -> None:
    """EmbeddingGemma's backbone sees both sides, and halves its windows; Gemma 3's is causal."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    more = {"use_bidirectional_attention": both_sides, "sliding_window": 6, "layer_types": kinds}
    sizes = SIZES | {"num_hidden_layers": 3, "query_pre_attn_scalar": 16}
    torch.manual_seed(0)
    whole = transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**sizes, **more)).double().eval()
    assert whole.config.sliding_window == (4 if both_sides else 6)
    ids, lengths = torch.randint(1, 50, (2, 24)), (24, 15)
    mask = (torch.arange(24) < torch.tensor(lengths)[:, None]).long()
    alone = copy.deepcopy(whole)
    alone.set_attn_implementation("eager")
    rows = [alone(input_ids=ids[n : n + 1, :length]).last_hidden_state[0] for n, length in enumerate(lengths)]
    (torch.cat(rows).square().sum() / 1000).backward()

    def one(member: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        context = cp_fast.ContextParallel(member)
        model = ours.prepare(copy.deepcopy(whole), context)
        part = ours.shard_batch({"input_ids": ids, "attention_mask": mask}, cp=context, model=model)
        found = part["cp_batch"].unshard(model(**part).last_hidden_state)
        ((found * mask[..., None]).square().sum() / 1000 / context.size).backward()
        return found.detach(), {n: w.grad for n, w in model.named_parameters() if w.grad is not None}

    everyone = SimGroup(2).run(one)
    for found, _ in everyone:
        torch.testing.assert_close(found[mask.bool()], torch.cat(rows).detach(), rtol=1e-5, atol=1e-5)
    for n, weight in alone.named_parameters():
        torch.testing.assert_close(sum(grads[n] for _, grads in everyone), weight.grad, rtol=1e-5, atol=1e-4)


def test_blocks_without_a_token_join_nothing() -> None:
    """As Gemma 4 makes them of text alone."""
    from transformers.masking_utils import blockwise_overlay, causal_mask_function, or_masks

    empty, one = (blockwise_overlay(torch.tensor([[-1, -1, x, x]])) for x in (-1, 0))
    assert without_blocks(or_masks(causal_mask_function, empty)) is causal_mask_function
    joined = or_masks(causal_mask_function, one, empty)
    assert without_blocks(joined) is joined


def test_other_masks_made_of_causal_ones_are_refused() -> None:
    """Blocks of images that see themselves, as Gemma 3 with images has them."""
    from transformers.masking_utils import and_masks, blockwise_overlay, causal_mask_function, or_masks

    blocks = or_masks(causal_mask_function, blockwise_overlay(torch.tensor([[-1, 0, 0, 0, -1, -1]])))
    for function in (blocks, and_masks(blocks, causal_mask_function)):
        with pytest.raises(
            NotImplementedError, match=r"mask_function is .*_mask; cp_fast has causal masks and windows"
        ):
            ours.refuse_masks(mask_function=function, q_length=6, use_vmap=True)


def test_one_model_serves_contexts_of_several_sizes() -> None:
    """A long batch over both ranks, then a short one on each of them: gradients add up to those of all three."""
    long, short = batches()["full"], batches()["padded"]
    alone = model_of("Llama")
    targets = [int((batch["labels"][:, 1:] != -100).sum()) for batch in (long, short, short)]
    for batch in (long, short, short):
        alone(**batch, use_cache=False, num_items_in_batch=sum(targets)).loss.backward()

    def one(member: Any) -> dict[str, torch.Tensor]:
        both = cp_fast.ContextParallel(member)
        mine = cp_fast.ContextParallel(SimGroup(1).run(lambda alone: alone)[0])
        model = ours.prepare(model_of("Llama"), both)
        for batch, cp in ((long, both), (short, mine)):
            part = ours.shard_batch(batch, cp=cp, model=model) | {"num_items_in_batch": torch.tensor(sum(targets))}
            model(**part).loss.backward()
        return {n: w.grad for n, w in model.named_parameters() if w.grad is not None}

    found = SimGroup(2).run(one)
    for n, weight in alone.named_parameters():
        torch.testing.assert_close(sum(grads[n] for grads in found), weight.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_with_adapters(when: str, tmp_path: Path) -> None:
    """Gradients of the adapters alone; they are saved, loaded and merged as ever."""
    peft: Any = pytest.importorskip("peft", reason="needs peft: pip install '.[test-integrations]'")
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    batch = batches()["padded"]

    def with_adapters(model: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(model, config).double()

    alone = with_adapters(model_of("Llama"))
    count = (batch["labels"][:, 1:] != -100).sum()
    expected = alone(**batch, use_cache=False, num_items_in_batch=count).loss
    expected.backward()

    def one(member: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        context = cp_fast.ContextParallel(member)
        if when == "after":
            model = with_adapters(ours.prepare(model_of("Llama"), context))
        else:
            model = ours.prepare(with_adapters(model_of("Llama")), context)
        part = ours.shard_batch(batch, cp=context, model=model)
        loss = model(**part).loss
        loss.backward()
        grads = {n: w.grad for n, w in model.named_parameters() if w.grad is not None}
        folder = tmp_path / f"{member.rank}"
        model.save_pretrained(folder)
        again = ours.prepare(peft.PeftModel.from_pretrained(model_of("Llama"), folder).double(), context)
        merged = model.merge_and_unload()
        with torch.no_grad():
            torch.testing.assert_close(again(**part).loss, loss)
            torch.testing.assert_close(merged(**part).loss, loss)
        return loss.detach(), grads

    found = SimGroup(2).run(one)
    torch.testing.assert_close(sum(loss for loss, *_ in found), expected.detach(), rtol=1e-6, atol=1e-6)
    grads = {n: w.grad for n, w in alone.named_parameters() if w.grad is not None}
    assert len(grads) > 4
    assert all("lora" in n for n in grads)
    assert found[0][1].keys() == grads.keys()
    for n, grad in grads.items():
        torch.testing.assert_close(sum(mine[n] for _, mine in found), grad, rtol=1e-6, atol=1e-6)


def test_replicated_layers_need_the_models_configuration() -> None:
    """PEFT gives each its own, also without ranks, which `set_attn_implementation` does not reach."""
    peft: Any = pytest.importorskip("peft", reason="needs peft: pip install '.[test-integrations]'")
    how = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, layer_replication=[[0, 2], [1, 2]])

    def replicated() -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(model_of("Llama"), how).double()

    batch, alone = batches()["full"], replicated()
    expected = alone(**batch, use_cache=False).loss

    def one(member: Any) -> torch.Tensor:
        context, model = cp_fast.ContextParallel(member), replicated()
        said = r"AttentionInterface: model.layers.0.self_attn \(LlamaAttention\) has a configuration of its own.*after"
        with pytest.raises(NotImplementedError, match=said):
            ours.prepare(model, context)
        for layer in model.get_base_model().model.layers:
            layer.self_attn.config = model.get_base_model().config
        ours.prepare(model, context)
        assert model.config.num_hidden_layers == 3
        return model(**ours.shard_batch(batch, cp=context, model=model)).loss.detach()

    torch.testing.assert_close(sum(SimGroup(2).run(one)), expected.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_that_add_tokens_or_mix_them_are_refused(when: str) -> None:
    peft: Any = pytest.importorskip("peft", reason="needs peft: pip install '.[test-integrations]'")
    batch, _ = packed()
    of_tokens, of_linear = {"num_virtual_tokens": 3}, {"target_modules": ["q_proj"]}
    called = batch["input_ids"][0, 4:6].tolist()
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "PROMPT_TUNING, which adds tokens": ("PromptTuningConfig", of_tokens),
        "PREFIX_TUNING, which adds tokens": ("PrefixTuningConfig", of_tokens),
        "ADAPTION_PROMPT, which adds": ("AdaptionPromptConfig", {"adapter_len": 3, "adapter_layers": 1}),
        "alora_invocation_tokens, which it": ("LoraConfig", {**of_linear, "alora_invocation_tokens": called}),
        "LILY, which averages its routers": ("LilyConfig", of_linear),
        "POLY, which draws the skills of each row": ("PolyConfig", of_linear),
    }

    def one(member: Any) -> None:
        context = cp_fast.ContextParallel(member)
        for said, (kind, how) in kinds.items():
            if not hasattr(peft, kind):  # of an older version
                continue
            config = getattr(peft, kind)(task_type="CAUSAL_LM", **how)
            expected = pytest.raises(NotImplementedError, match=rf"adapter 'default' of the .* {said}")
            if when == "before":
                with expected:
                    ours.prepare(peft.get_peft_model(model_of("Llama"), config), context)
                continue
            model = peft.get_peft_model(ours.prepare(model_of("Llama"), context), config)
            with expected:
                ours.shard_batch(batch, cp=context, model=model)
            part = ours.shard_batch(batch, cp=context)
            part |= {"task_ids": torch.zeros(1, dtype=torch.long)} if kind == "PolyConfig" else {}
            with pytest.raises((NotImplementedError, ValueError, TypeError), match=r"adapter|around it by its hooks"):
                model(**part)

    SimGroup(2).run(one)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo", "distillation"])
def test_losses_of_preference_are_those_of_one_process(steps: StepProcesses, loss: str) -> None:
    build, batch = f"examples.preference:{loss}", "examples.preference:batch"
    report = steps.compare(build, batch, 2, layout="balanced", loss="sum")
    assert report.right, str(report)
