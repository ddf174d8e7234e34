"""Models of transformers with random weights: over ranks as on one, forward and backward."""

from __future__ import annotations

import copy
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.api import calls
from cp_fast.integrations import transformers as ours
from cp_fast.integrations.hugging_face.module_states import state_of
from cp_fast.integrations.hugging_face.written_attention import SequencesAsMask, WrittenAttention
from cp_fast.integrations.shared import cp_batch
from cp_ref import SimGroup
from tests.dist.workers import run_program

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

ROOT = Path(__file__).parents[3]
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Qwen3": ("Qwen3Config", {**KINDS, "use_sliding_window": True}),
    "Gemma 2": ("Gemma2Config", {**KINDS, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
    "gpt-oss": ("GptOssConfig", {**KINDS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "BLOOM": ("BloomConfig", {}),
    "MPT": ("MptConfig", {"max_seq_len": 64}),
}


def model_of(name: str, **sizes: Any) -> Any:
    """A model in float64, with eager attention."""
    kind, more = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**(SIZES | more | sizes))
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}  # the latter, for float64
    model = transformers.AutoModelForCausalLM.from_config(config, **implementations).double()
    for weight in model.parameters():  # sinks and norms too
        torch.nn.init.normal_(weight, std=0.2)
    return model.train()


def batches() -> dict[str, dict[str, torch.Tensor]]:
    """Packed documents, and padded and full sequences; every token but padding is learnt."""
    generator = torch.Generator().manual_seed(1)
    lengths = [11, 3, 18]
    ids = torch.randint(1, 50, (1, 32), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    rows = torch.randint(1, 50, (2, 15), generator=generator)
    mask = (torch.arange(15) < torch.tensor([[15], [6]])).long()
    return {
        "packed": {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions},
        "padded": {"input_ids": rows, "labels": rows.masked_fill(mask == 0, -100), "attention_mask": mask},
        "full": {"input_ids": ids.view(2, 16), "labels": ids.view(2, 16)},
    }


def on_one_rank(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sequences one by one, without padding: eager attention in float64 makes NaN of rows that see nothing, and that of
    gpt-oss (transformers 5.23) lets packed documents see each other, as its masks are not told of positions.
    """
    mask = batch.get("attention_mask")
    rows = [batch]
    if "position_ids" in batch:
        starts = [*(batch["position_ids"][0] == 0).nonzero()[:, 0].tolist(), batch["input_ids"].shape[1]]
        rows = [{n: x[:, a:b] for n, x in batch.items()} for a, b in pairwise(starts)]
    if mask is not None:
        real = {n: x for n, x in batch.items() if n != "attention_mask"}
        rows = [{n: x[i : i + 1, :length] for n, x in real.items()} for i, length in enumerate(mask.sum(dim=1))]
    counts = [int((row["labels"][:, 1:] != -100).sum()) for row in rows]
    losses = [model(**row, use_cache=False, num_items_in_batch=torch.tensor(sum(counts))).loss for row in rows]
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.detach(), {n: w.grad for n, w in model.named_parameters() if w.grad is not None}


def compare(name: str, kind: str, comm: Any, layout: Any, size: int = 2) -> None:
    """The ranks' losses add up to the one rank's, and so do their gradients."""
    batch = batches()[kind]
    expected, grads = on_one_rank(model_of(name), batch)

    def one(member: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        group = member.split(2) if comm == "a2a+p2p" else member
        cp = cp_fast.ContextParallel(group, comm, layout=layout)
        model = ours.prepare(copy.deepcopy(whole), cp)
        out = model(**ours.shard_batch(batch, cp=cp))
        out.loss.backward()
        return out.loss.detach(), {n: w.grad for n, w in model.named_parameters() if w.grad is not None}

    whole = model_of(name)
    parts = SimGroup(size).run(one)
    torch.testing.assert_close(sum(loss for loss, _ in parts), expected, rtol=1e-6, atol=1e-6)
    assert parts[0][1].keys() == grads.keys()
    if name == "gpt-oss":
        assert any("sinks" in n for n in grads)
    for n, grad in grads.items():
        torch.testing.assert_close(sum(found[n] for _, found in parts), grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["packed", "padded", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_over_ranks(name: str, kind: str) -> None:
    compare(name, kind, "p2p", "dual_chunk")


@pytest.mark.parametrize(
    ("comm", "layout", "size"),
    [
        ("p2p", "balanced", 2),
        ("a2a", "balanced", 4),
        ("all_gather", "contiguous", 2),
        ("a2a", "dual_chunk", 4),
        ("a2a+p2p", "dual_chunk", 4),
    ],
)
def test_every_schedule(comm: str, layout: str, size: int) -> None:
    compare("gpt-oss", "packed", comm, layout, size)
    compare("Gemma 2", "padded", comm, layout, size)
    compare("MPT", "padded", comm, layout, size)
    compare("BLOOM", "packed", comm, layout, size)


def said(change: Any = None, **odd: Any) -> str:
    """What a prepared model says of a call, after its configuration was changed."""

    def one(member: Any) -> str:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(model_of("Llama"), cp)
        if change is not None:
            change(model.config)
        given = ours.shard_batch(batches()["full"], cp=cp)
        with pytest.raises((NotImplementedError, TypeError)) as caught:
            model(**given, **{"use_cache": False, **odd})
        return str(caught.value)

    return SimGroup(1).run(one)[0]


def test_what_cannot_be_honoured_is_named() -> None:
    other = "which is not that of this rank's tokens"
    assert f"attention_mask [2, 16], {other}" in said(attention_mask=torch.ones(2, 16).triu())
    assert f"attention_mask [2, 1, 16, 16], {other}" in said(attention_mask=torch.ones(2, 1, 16, 16))
    assert "cu_seq_lens_q is a tensor [2]" in said(cu_seq_lens_q=torch.tensor([0, 16]))

    def chunked(config: Any) -> None:
        config.layer_types = ["chunked_attention", "full_attention"]

    assert "layer_types[0] is 'chunked_attention'" in said(change=chunked)

    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        model = model_of("Llama")
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        given = ours.shard_batch(batches()["full"], cp=cp)
        with pytest.raises(NotImplementedError, match=r"dropout is 0\.1 in .* configuration, or its mode, has none"):
            ours.prepare(model, cp)(**given)

    SimGroup(1).run(one)


def test_batches_that_say_nothing_clear_are_refused() -> None:
    ids = torch.ones(2, 8, dtype=torch.long)
    left = torch.tensor([[1] * 8, [0] * 2 + [1] * 6])

    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        with pytest.raises(ValueError, match="padding before or between"):
            ours.shard_batch({"input_ids": ids, "attention_mask": left}, cp=cp)
        with pytest.raises(ValueError, match="one packed row"):
            ours.shard_batch({"input_ids": ids, "position_ids": ids}, cp=cp)
        with pytest.raises(ValueError, match="does not begin with 0"):
            ours.shard_batch({"input_ids": ids[:1], "position_ids": ids[:1]}, cp=cp)
        with pytest.raises(ValueError, match="token_type_ids"):
            ours.shard_batch({"input_ids": ids, "token_type_ids": ids}, cp=cp)

    SimGroup(2).run(one)


@pytest.mark.thorough
def test_the_lines_of_the_readme_run(tmp_path: Path) -> None:
    folder, program = tmp_path / "model", tmp_path / "program.py"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    [lines] = [block for block in blocks if "cp_transformers" in block]
    assert len(list(filter(None, lines.splitlines()))) == 7
    before = """
import torch, torch.distributed as dist, cp_fast as cp
dist.init_process_group("gloo")
context = cp.ContextParallel(dist.group.WORLD)
ids = torch.arange(60).view(2, 30) % 49
"""
    after = """
dist.all_reduce(loss := loss.detach())
alone = AutoModelForCausalLM.from_pretrained(name)
torch.testing.assert_close(loss, alone(input_ids=ids, labels=ids).loss, rtol=1e-4, atol=1e-5)
dist.destroy_process_group()
"""
    program.write_text(f"name = {str(folder)!r}\n{before}{lines}{after}")
    run_program(program, 2)


NAMES = ("BLOOM", "MPT")


@pytest.mark.parametrize("heads", [1, 3, 4, 6])
@pytest.mark.parametrize("name", NAMES)
def test_slopes_are_those_of_the_paper(name: str, heads: int) -> None:
    """Powers of 2 ** (-8 / n) for n heads; where n is no power of two, each model has its own order of the rest."""

    def one(member: Any) -> torch.Tensor:
        model = model_of(name, num_attention_heads=heads, hidden_size=8 * heads)
        ours.prepare(model, cp_fast.ContextParallel(member))
        layers = [state_of(module, WrittenAttention) for module in model.modules()]
        found: list[Any] = [layer.slopes for layer in layers if layer is not None]
        assert len(found) == 2
        return found[0]

    slopes = SimGroup(1).run(one)[0]
    whole = 2 ** (math.floor if name == "BLOOM" else math.ceil)(math.log2(heads))
    powers = [2.0 ** (-8 * n / whole) for n in range(1, whole + 1)]
    if name == "BLOOM":
        powers += [2.0 ** (-4 * n / whole) for n in range(1, 2 * (heads - whole) + 1, 2)]
    elif whole != heads:
        powers = (powers[1::2] + powers[::2])[:heads]
    torch.testing.assert_close(slopes, torch.tensor(powers), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_are_computed_again_have_the_sequences_of_their_own_call(name: str) -> None:
    """Two calls before their backward passes, with other sequences."""
    first, second = batches()["packed"], batches()["full"]
    expected = [on_one_rank(model_of(name), batch)[1] for batch in (first, second)]
    whole = model_of(name)

    def one(member: Any) -> dict[str, torch.Tensor]:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(copy.deepcopy(whole), cp)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        losses = [model(**ours.shard_batch(batch, cp=cp)).loss for batch in (first, second)]
        for loss in losses:
            loss.backward()
        return {n: w.grad for n, w in model.named_parameters() if w.grad is not None}

    parts = SimGroup(2).run(one)
    assert parts[0].keys() == expected[0].keys()
    for n in expected[0]:
        torch.testing.assert_close(
            sum(part[n] for part in parts), expected[0][n] + expected[1][n], rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_prepared_model_still_runs_alone(name: str) -> None:
    ids = batches()["full"]["input_ids"]
    with torch.no_grad():
        expected = model_of(name)(ids).logits

    def one(member: Any) -> torch.Tensor:
        model = ours.prepare(model_of(name), cp_fast.ContextParallel(member))
        with pytest.raises(TypeError, match="call it with what shard_batch returns"):
            model(input_ids=ids)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            return model(ids).logits

    torch.testing.assert_close(SimGroup(1).run(one)[0], expected)


@pytest.mark.parametrize("cache", ["by place", "by name"])
def test_a_cache_of_mpt_is_refused(cache: str) -> None:
    def one(member: Any) -> None:
        layer: Any = ours.prepare(model_of("MPT"), cp_fast.ContextParallel(member)).transformer.blocks[0].attn
        theirs = transformers.DynamicCache()
        given, named = ((), {"cache": theirs}) if cache == "by name" else ((theirs,), {})
        with pytest.raises(NotImplementedError, match=r"cache is given to MptAttention; .* use_cache=False"):
            layer.forward(torch.zeros(1, 2, 32), None, *given, attention_mask=SequencesAsMask(None), **named)

    SimGroup(1).run(one)


def test_another_formula_is_refused() -> None:
    def one(member: Any) -> None:
        model = model_of("MPT")
        original = model.transformer.build_mpt_alibi_tensor
        model.transformer.build_mpt_alibi_tensor = lambda *given, **named: original(*given, **named) ** 3
        with pytest.raises(NotImplementedError, match="position biases of MptModel are no slopes times positions"):
            ours.prepare(model, cp_fast.ContextParallel(member))

    SimGroup(1).run(one)


@pytest.mark.parametrize(("name", "where"), [("BLOOM", "attention_dropout"), ("MPT", "attn_dropout_p")])
def test_dropout_that_the_configuration_does_not_say_is_refused(name: str, where: str) -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(model_of(name), cp)
        for module in model.modules():
            if hasattr(module, where):
                setattr(module, where, torch.nn.Dropout(0.1) if name == "BLOOM" else 0.1)
        with pytest.raises(NotImplementedError, match=r"dropout is 0\.1 in .* set it in the configuration"):
            model(**ours.shard_batch(batches()["full"], cp=cp))

    SimGroup(1).run(one)


def test_layers_of_a_kind_share_a_plan_and_later_calls_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers of two kinds; another batch of equal lengths needs no new plan either."""
    made: list[Any] = []
    found: list[Any] = []
    plan_for, plan_of_rank = cp_batch.plan_for, calls.plan_of_rank
    monkeypatch.setattr(cp_batch, "plan_for", lambda *given, **named: found.append(0) or plan_for(*given, **named))
    monkeypatch.setattr(calls, "plan_of_rank", lambda *given, **named: made.append(0) or plan_of_rank(*given, **named))

    def one(member: Any) -> list[tuple[int, int]]:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(model_of("Qwen3", num_hidden_layers=4, layer_types=KINDS["layer_types"] * 2), cp)
        counts = []
        for _ in range(2):
            part = ours.shard_batch(batches()["packed"], cp=cp)
            for _ in range(2):
                model(**part)
                counts.append((len(found), len(made)))
        return counts

    assert SimGroup(1).run(one)[0] == [(2, 2), (2, 2), (4, 2), (4, 2)]
