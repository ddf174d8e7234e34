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

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

Part = tuple[torch.Tensor, dict[str, torch.Tensor]]
QUICK = list(FAMILIES)[:4]


def part_of(name: str, group: Any) -> Part:
    """A rank's part of the loss, and of the gradients."""
    cp = cp_fast.ContextParallel(group)
    model = ours.prepare(tiny(name), cp)
    loss = model(**ours.shard_batch(batch_of(name), cp=cp, model=model)).loss
    loss.backward()
    return loss.detach(), grads_of(model)


def grads_of(model: Any) -> dict[str, torch.Tensor]:
    """What a backward pass has left."""
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def parts_of_all(names: list[str]) -> dict[str, Part]:
    """The same of several families, over this process's gloo group."""
    return {name: part_of(name, dist.group.WORLD) for name in names}


def check(name: str, parts: list[Part]) -> None:
    """The parts add up to what one process computes with transformers' own attention."""
    alone = tiny(name)
    alone.set_attn_implementation("eager")
    loss = alone(**batch_of(name)).loss
    loss.backward()
    torch.testing.assert_close(torch.stack([part for part, _ in parts]).sum(), loss.detach(), rtol=1e-5, atol=1e-5)
    for weight, grad in grads_of(alone).items():
        found = sum(part[weight] for _, part in parts)
        torch.testing.assert_close(found, grad, rtol=1e-3, atol=1e-5, msg=lambda said, w=weight: f"{name} {w}: {said}")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.thorough) for n in FAMILIES])
def test_a_family_is_the_same_over_ranks(name: str) -> None:
    check(name, SimGroup(2).run(lambda member: part_of(name, member)))


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
    else:
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
        *(("LlamaForTokenClassification", kind) for kind in ("DDP", "FSDP", "compile")),  # whose edge computes the loss
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

    def routed(model: Any) -> None:
        model.config.output_router_logits = True

    assert "output_router_logits is True" in refused(routed)

    def skipping(model: Any) -> None:
        model.config.layerdrop = 0.1

    assert "layerdrop is 0.1; in training each rank would skip layers of its own" in refused(skipping)

    def smoothed(model: Any) -> None:
        model.loss_function = lambda logits, *_, **__: logits.square().mean()

    assert "is not the mean cross entropy of its tokens" in refused(smoothed)
    assert "has no values yet" in refused(lambda model: model.to("meta"))
    with pytest.raises(TypeError, match="model is a Linear"):
        ours.prepare(torch.nn.Linear(2, 2), cp_fast.ContextParallel(dist_of_one()))


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
        (ours.shard_batch(batch, cp=cp_fast.ContextParallel(dist_of_one())), "another group of ranks"),
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
