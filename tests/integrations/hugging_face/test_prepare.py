"""`prepare`: families of transformers over ranks as on one, and the others refused by the name of what mixes tokens."""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import cp_fast
from cp_fast.integrations import transformers as ours
from cp_fast.integrations.loss import loss_for_backward
from cp_ref import SimGroup
from tests.dist.workers import Processes
from tests.integrations.hugging_face.families import FAMILIES, REFUSED, batch_of, tiny
from tests.integrations.hugging_face.hybrids import HYBRIDS, tiny_hybrid
from tests.integrations.hugging_face.image_families import IMAGES, tiny_images
from tests.integrations.hugging_face.test_sweep import FORTY

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

Part = tuple[torch.Tensor, dict[str, torch.Tensor]]
QUICK = list(FAMILIES)[:4]


def model_of(name: str) -> Any:
    """A small model, of text or of images."""
    return tiny_images(name) if name in IMAGES else tiny(name)


def part_of(name: str, group: Any, batch: dict[str, torch.Tensor] | None = None, **how: Any) -> Part:
    """A rank's part of the loss, and of the gradients."""
    cp = cp_fast.ContextParallel(group, **how)
    return part_of_prepared(ours.prepare(model_of(name), cp), batch or batch_of(name), cp)


def part_of_prepared(model: Any, batch: dict[str, torch.Tensor], cp: Any) -> Part:
    """The same of a model that this rank has prepared."""
    model.zero_grad()
    loss = model(**ours.shard_batch(batch, cp=cp, model=model)).loss
    loss.backward()
    return loss.detach(), grads_of(model)


def grads_of(model: Any) -> dict[str, torch.Tensor]:
    """What a backward pass has left."""
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def parts_of_all(names: list[str]) -> dict[str, Part]:
    """The same of several families, over this process's gloo group."""
    return {name: part_of(name, dist.group.WORLD) for name in names}


def check(name: str, parts: list[Part], batch: dict[str, torch.Tensor] | None = None) -> None:
    """The parts add up to what one process computes with transformers' own attention."""
    alone = model_of(name)
    alone.set_attn_implementation("eager")
    loss = alone(**(batch or batch_of(name))).loss
    loss.backward()
    torch.testing.assert_close(torch.stack([part for part, _ in parts]).sum(), loss.detach(), rtol=1e-5, atol=1e-5)
    for weight, grad in grads_of(alone).items():
        found = sum(part[weight] for _, part in parts)
        torch.testing.assert_close(found, grad, rtol=1e-3, atol=1e-5, msg=lambda said, w=weight: f"{name} {w}: {said}")


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        # `test_sweep` plays the others, under each layout, packed too
        *(pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES if name not in (*QUICK, *dict(FORTY))),
    ],
)
def test_a_family_is_the_same_over_ranks(name: str) -> None:
    check(name, SimGroup(2).run(lambda member: part_of(name, member)))


LONGEST = ("GPT2LMHeadModel", "BertForMaskedLM", "OPTForCausalLM", "RobertaForMaskedLM")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "dual_chunk") for name in LONGEST),
        *(pytest.param(name, "balanced", marks=pytest.mark.thorough) for name in LONGEST),
    ],
)
def test_a_sequence_as_long_as_the_table_of_positions(name: str, layout: Any) -> None:
    """64 positions; 64 tokens do not divide by 3 ranks, and padding has positions of the table."""
    tokens = 64 - 1 if name == "RobertaForMaskedLM" else 64  # whose positions begin behind the padding's
    ids = torch.randint(3, 50, (2, tokens), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "labels": ids}
    check(name, SimGroup(3).run(lambda member: part_of(name, member, batch, layout=layout)), batch)
    packed = {"input_ids": ids[:1], "position_ids": torch.arange(tokens)[None]}
    for part in SimGroup(3).run(
        lambda member: ours.shard_batch(packed, cp=cp_fast.ContextParallel(member, layout=layout))
    ):
        assert int(part["position_ids"].max()) < tokens


@pytest.mark.thorough
def test_families_over_gloo(two: Processes) -> None:
    found = two.run(parts_of_all, QUICK)
    for name in QUICK:
        check(name, [part[name] for part in found])


def wrapped(name: str, kind: str) -> Part:
    """This rank's part in a wrapper: of the loss, and of the gradients, which wrappers have added up."""
    cp = cp_fast.ContextParallel(dist.group.WORLD)
    model: Any = ours.prepare(tiny(name), cp)
    outer: Any = model
    if kind == "DDP":
        outer = DistributedDataParallel(model)
    elif kind == "FSDP":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    elif kind == "checkpointing":
        model.train().gradient_checkpointing_enable()
    elif name == "LlamaForCausalLM" or dist.get_rank() == 0:
        outer = torch.compile(model, backend="aot_eager")
    loss = outer(**ours.shard_batch(batch_of(name), cp=cp, model=outer)).loss
    summed = kind in ("DDP", "FSDP")
    loss_for_backward(loss, averaged_over=outer if summed else None).backward()
    grads = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads_of(model).items()}
    return loss.detach(), {n: g / 2 if summed else g for n, g in grads.items()}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("LlamaForCausalLM", kind) for kind in ("DDP", "FSDP", "checkpointing", "compile")),
        *(("LlamaForTokenClassification", kind) for kind in ("DDP", "FSDP", "compile")),  # cp_fast has its loss
    ],
)
def test_wrappers_of_a_prepared_model(two: Processes, name: str, kind: str) -> None:
    check(name, two.run(wrapped, name, kind))


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_tokens_is_refused_by_name(name: str) -> None:
    model = tiny(name)
    before = model.config._attn_implementation
    with pytest.raises(NotImplementedError, match=REFUSED[name][1]):
        ours.prepare(model, cp_fast.ContextParallel(dist_of_one()))
    assert model.config._attn_implementation == before


def dist_of_one() -> Any:
    """A group of one rank."""
    return SimGroup(1).run(lambda member: member)[0]


def refused(change: Any, name: str = "MixtralForCausalLM") -> str:
    """What `prepare` says of a changed model."""
    model = tiny(name)
    change(model)
    with pytest.raises((NotImplementedError, ValueError, TypeError)) as caught:
        ours.prepare(model, cp_fast.ContextParallel(dist_of_one()))
    return str(caught.value)


class Neighbour(torch.nn.Module):
    """Something that looks like a layer of one token, and adds the token before."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1e-9 * x.roll(1, dims=1)


def test_what_a_model_of_ones_own_hides_is_found() -> None:
    def mixing(model: Any) -> None:
        model.model.layers[1].mlp = Neighbour(model.model.layers[1].mlp)

    assert "model.layers.1.mlp (Neighbour) mixes tokens without attention" in refused(mixing)

    def counting(model: Any) -> None:
        rotary = model.model.rotary_emb.forward
        model.model.rotary_emb.forward = lambda x, position_ids, **o: rotary(x, torch.arange(x.shape[1])[None], **o)

    assert "gives a slice of tokens with their position_ids other outputs" in refused(counting)

    def skipping(model: Any) -> None:
        model.config.layerdrop = 0.1

    assert "layerdrop is 0.1; in training each rank would skip layers of its own" in refused(skipping)

    assert "has no values yet" in refused(lambda model: model.to("meta"))
    with pytest.raises(TypeError, match="model is a Linear"):
        ours.prepare(torch.nn.Linear(2, 2), cp_fast.ContextParallel(dist_of_one()))


class Counting(torch.nn.Module):
    """Embeddings that are scaled by the share of one token in the row, as those of ESM-2."""

    def __init__(self, inner: torch.nn.Module, token: int) -> None:
        super().__init__()
        self.inner, self.token = inner, token

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids) * (1 - 0.2 * (ids == self.token).float().mean())


def test_what_counts_special_tokens_is_found() -> None:
    cp = cp_fast.ContextParallel(dist_of_one())
    with pytest.raises(NotImplementedError, match=r"esm.embeddings \(EsmEmbeddings\) gives a slice .* counts tokens"):
        ours.prepare(tiny("EsmForMaskedLM", token_dropout=True), cp)
    for entry in ("mask_token_id", "pad_token_id", "eos_token_id", "sep_token_id", "image_token_id"):
        model = tiny("LlamaForCausalLM", **{entry: 7})
        model.model.embed_tokens = Counting(model.model.embed_tokens, 7)
        with pytest.raises(
            NotImplementedError, match=r"model.embed_tokens \(Counting\) gives a slice .* counts tokens"
        ):
            ours.prepare(model, cp)


def test_calls_of_a_prepared_model() -> None:
    """Whatever would be taken for something else raises; alone the model is as before."""
    cp = cp_fast.ContextParallel(dist_of_one())
    bare = tiny("LlamaForCausalLM")
    ids = batch_of("LlamaForCausalLM")["input_ids"]
    expected = bare(input_ids=ids).logits
    model = ours.prepare(ours.prepare(copy.deepcopy(bare), cp), cp)  # twice is once
    batch = {"input_ids": ids, "labels": ids}
    part = ours.shard_batch(batch, cp=cp)
    torch.testing.assert_close(model(**part).logits, expected, rtol=1e-4, atol=1e-4)
    for given, said in (
        (
            {"input_ids": ids},
            r"LlamaForCausalLM is given cp_batch=None: .*shard_batch.*set_attn_implementation\(.sdpa.\)",
        ),
        ({n: x for n, x in part.items() if n != "num_items_in_batch"}, "without num_items_in_batch"),
        (
            {n: x for n, x in part.items() if n != "shift_labels"},
            r"learns each token's next: call shard_batch\(batch, cp",
        ),
        ({**part, "output_router_logits": True}, "output_router_logits is True"),
        ({**part, "logits_to_keep": 1}, "logits_to_keep is 1, .* tokens of a slice"),
        ({n: x for n, x in part.items() if n != "position_ids"}, "is given no position_ids"),
        (
            {**part, "cp_batch": ours.shard_batch({"input_ids": ids[:, :20]}, cp=cp)["cp_batch"]},
            r"input_ids \[2, 24\], and a cp_batch of \[b, s/cp\] = \[2, 20\]: call it with all that one shard_batch",
        ),
    ):
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=said):
            model(**given)
    with pytest.raises(TypeError, match="arguments by place"):
        model(ids, **{n: x for n, x in part.items() if n != "input_ids"})
    with pytest.raises(TypeError, match=r'for generate\(\) .*set_attn_implementation\("sdpa"\)'):
        model.generate(ids, max_new_tokens=2)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False)[:, :24], ids)
    with pytest.raises(ValueError, match="would take a slice for the whole"):
        model(**part)
    model.set_attn_implementation(ours.NAME)
    torch.testing.assert_close(model(**part).logits, expected, rtol=1e-4, atol=1e-4)


def test_labels_that_the_head_does_not_learn() -> None:
    cp = cp_fast.ContextParallel(dist_of_one())
    model = ours.prepare(tiny("BertForMaskedLM"), cp)
    with pytest.raises(ValueError, match="labels are shifted, but BertForMaskedLM learns each token's own"):
        model(**ours.shard_batch(batch_of("BertForMaskedLM"), cp=cp))
    base = ours.prepare(tiny("LlamaForCausalLM").model, cp)
    with pytest.raises(TypeError, match="LlamaModel takes no labels"):
        base(**ours.shard_batch(batch_of("LlamaForCausalLM"), cp=cp, model=base))


def test_losses_that_are_no_mean_over_tokens_are_refused_with_labels_alone() -> None:
    cp = cp_fast.ContextParallel(dist_of_one())
    electra, smoothed = tiny("ElectraForPreTraining"), tiny("LlamaForCausalLM")
    smoothed.loss_function = lambda logits, *_, **__: logits.square().mean()
    for model, said in ((electra, "loss"), (smoothed, "is not the mean cross entropy of its tokens")):
        bare = copy.deepcopy(model)
        ours.prepare(model, cp)
        ids = batch_of("LlamaForCausalLM")["input_ids"]
        logits = model(**ours.shard_batch({"input_ids": ids}, cp=cp, model=model)).logits
        torch.testing.assert_close(logits, bare(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
        for over in (model, None):
            with pytest.raises(NotImplementedError, match=f"{said}.*Leave labels away"):
                model(**ours.shard_batch({"input_ids": ids, "labels": ids % 2}, cp=cp, model=over))


def test_logits_that_do_not_say_whose_labels_are_learnt() -> None:
    model = tiny("LlamaForCausalLM")
    torch.nn.init.zeros_(model.lm_head.weight)
    cp = cp_fast.ContextParallel(dist_of_one())
    model = ours.prepare(model, cp)
    with pytest.raises(NotImplementedError, match=r"gives all classes the same logits.*Leave labels away"):
        ours.shard_batch(batch_of("LlamaForCausalLM"), cp=cp, model=model)


def test_a_head_with_one_class() -> None:
    """A value head: every loss is 0, and labels stay where they are."""

    def one(member: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(copy.deepcopy(bare), cp)
        labelled = {"input_ids": ids, "labels": torch.zeros_like(ids)}
        assert model(**ours.shard_batch(labelled, cp=cp, model=model)).loss == 0
        out = model(**ours.shard_batch({"input_ids": ids}, cp=cp, model=model)).logits
        return out, ours.shard_batch(batch_of("LlamaForCausalLM"), cp=cp, model=model)["labels"]

    bare = tiny("LlamaForTokenClassification", num_labels=1)
    ids = batch_of("LlamaForCausalLM")["input_ids"]
    found = SimGroup(2).run(one)
    for mine, whole in zip(zip(*found, strict=True), (bare(input_ids=ids).logits, labels_of_llama()), strict=True):
        parts = [x.unflatten(1, (2, -1)) for x in mine]  # chunks 0 and 3, 1 and 2
        together = torch.cat([parts[0][:, 0], parts[1][:, 0], parts[1][:, 1], parts[0][:, 1]], dim=1)
        torch.testing.assert_close(together, whole, rtol=1e-4, atol=1e-4)


def labels_of_llama() -> torch.Tensor:
    """Of `batch_of`."""
    return batch_of("LlamaForCausalLM")["labels"]


class Fused(torch.nn.Module):
    """In the place of a layer's attention, or of a whole block."""

    def __init__(self, results: int) -> None:
        super().__init__()
        self.linear, self.results = torch.nn.Linear(32, 32), results

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        out = self.linear(hidden_states)
        return (out, None) if self.results == 2 else out


def own_configuration(layer: Any) -> None:
    layer.self_attn.config = copy.deepcopy(layer.self_attn.config)
    layer.self_attn.config._attn_implementation = "sdpa"


def fused_attention(layer: Any) -> None:
    layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)


def fused_block(layer: Any) -> None:
    layer.forward = lambda hidden_states, **_: hidden_states


def other_attention(layer: Any) -> None:
    layer.self_attn = Fused(2)


CHANGES = [own_configuration, fused_attention, fused_block, other_attention]


def prepared(name: str = "LlamaForCausalLM") -> tuple[Any, dict[str, Any]]:
    """A model for a group of one rank, and a batch."""
    cp = cp_fast.ContextParallel(dist_of_one())
    model = ours.prepare(tiny_hybrid(name) if name in HYBRIDS else tiny(name), cp)
    return model, ours.shard_batch(batch_of("LlamaForCausalLM"), cp=cp)


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_is_changed_after_prepare_is_named(change: Any) -> None:
    model, part = prepared()
    model(**part)
    change(model.model.layers[1])
    with pytest.raises(RuntimeError, match=r"^model.layers.1.self_attn \(.*did not call the attention.*prepare\(model"):
        model(**part)


def test_other_ways_to_change_layers_after_prepare() -> None:
    model, part = prepared()
    transformers.AttentionInterface.register(ours.NAME, transformers.AttentionInterface()["sdpa"])
    with pytest.raises(RuntimeError, match=r"^model.layers.0.self_attn \(LlamaAttention\) did not call"):
        model(**part)
    ours.prepare(model, part["cp_batch"].cp)(**part)  # registers it again
    model.model.layers[0] = Fused(1)
    with pytest.raises(RuntimeError, match=r"^model.layers.0 \(Fused\) did not call"):
        model(**part)
    model, part = prepared("Qwen3NextForCausalLM")
    del model.model.layers[0].linear_attn.forward
    with pytest.raises(RuntimeError, match=r"^model.layers.0.linear_attn \(Qwen3NextGatedDeltaNet\) did not call"):
        model(**part)


class Skipping(torch.nn.Module):
    """A block that is left out."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states


def test_blocks_that_a_call_leaves_out() -> None:
    """Skipped at random, of another stage of a pipeline; a copy of the model; layers that are computed again."""
    model, part = prepared()
    whole = model(**part).loss
    torch.testing.assert_close(copy.deepcopy(model)(**part).loss, whole)
    blocks = list(model.model.layers)
    found = []
    for left in ([Skipping(blocks[0]), blocks[1]], [blocks[1]]):
        model.model.layers = torch.nn.ModuleList(left)
        found.append(model(**part).loss)
    torch.testing.assert_close(*found)
    model.model.layers = torch.nn.ModuleList(blocks)
    model.train().gradient_checkpointing_enable()
    for _ in range(2):
        loss = model(**part).loss
        loss.backward()
        torch.testing.assert_close(loss, whole)


@pytest.mark.thorough
def test_compiled_models_are_checked_too() -> None:
    """As a whole, and block by block."""
    model, part = prepared()
    whole = model(**part).loss.detach()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(**part).loss, whole)
    own_configuration(model.model.layers[1])
    with pytest.raises(RuntimeError, match=r"^model.layers.1.self_attn \(LlamaAttention\), whose .* did not call"):
        compiled(**part)
    model, part = prepared()
    for block in model.model.layers:
        block.compile(backend="eager")
    for _ in range(2):
        torch.testing.assert_close(model(**part).loss, whole)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "RobertaForMaskedLM", "BloomForCausalLM"])
def test_the_inner_model_refuses_as_the_outer_one_does(name: str) -> None:
    cp = cp_fast.ContextParallel(dist_of_one())
    bare = tiny(name)
    model = ours.prepare(copy.deepcopy(bare), cp)
    ids = batch_of(name)["input_ids"]
    part = ours.shard_batch({"input_ids": ids}, cp=cp)
    expected = bare.base_model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(model.base_model(**part).last_hidden_state, expected, rtol=1e-4, atol=1e-4)
    kind = type(model.base_model).__name__
    with pytest.raises(TypeError, match=f"{kind} is given no position_ids"):
        model.base_model(input_ids=ids, cp_batch=part["cp_batch"])
    with pytest.raises(TypeError, match=f"{kind} takes no labels"):
        model.base_model(**part, labels=ids)
    other = ours.shard_batch({"input_ids": ids}, cp=cp_fast.ContextParallel(dist_of_one()))
    torch.testing.assert_close(model.base_model(**other).last_hidden_state, expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_was_not_prepared() -> None:
    ours.register()
    cp = cp_fast.ContextParallel(dist_of_one())
    model = tiny("LlamaForCausalLM")
    with pytest.raises(ValueError, match="LlamaForCausalLM was not prepared"):
        ours.shard_batch(batch_of("LlamaForCausalLM"), cp=cp, model=model)
    model.set_attn_implementation(ours.NAME)
    with pytest.raises(RuntimeError, match=r"LlamaAttention was not prepared: call .*prepare\(model, cp\)"):
        model(**ours.shard_batch(batch_of("LlamaForCausalLM"), cp=cp))


def test_batches_of_the_flattening_collator() -> None:
    rows = [{"input_ids": list(range(3, 3 + n)), "labels": list(range(3, 3 + n))} for n in (9, 4, 6)]
    collate: Any = transformers.DataCollatorWithFlattening
    cp = cp_fast.ContextParallel(dist_of_one())
    plain = ours.shard_batch(collate()(rows), cp=cp)
    for options in ({}, {"return_seq_idx": True}, {"return_position_ids": False}):
        flat = collate(return_flash_attn_kwargs=True, **options)(rows)
        part = ours.shard_batch(flat, cp=cp)
        assert all(torch.equal(part[name], plain[name]) for name in ("input_ids", "position_ids", "shift_labels"))
    flat = collate(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    for name, odd in (
        ("cu_seq_lens_q", torch.tensor([0, 9, 14, 19])),
        ("cu_seq_lens_k", torch.tensor([0, 9, 13])),
        ("cu_seq_lens_q", torch.tensor([2, 11, 15, 21])),
        ("cu_seq_lens_q", torch.tensor([0, 13, 9, 19])),
        ("cu_seq_lens_q", [0, 9, 13, 19]),
        ("max_length_q", 12),
        ("max_length_q", "9"),
        ("seq_idx", torch.zeros(1, 19, dtype=torch.int32)),
    ):
        with pytest.raises((ValueError, TypeError), match=name):
            ours.shard_batch({**flat, name: odd}, cp=cp)
    model = ours.prepare(tiny("RobertaForMaskedLM"), cp)
    flat = collate(position_ids_start=1)(rows)
    assert torch.equal(ours.shard_batch(flat, cp=cp, model=model)["position_ids"], plain["position_ids"])
