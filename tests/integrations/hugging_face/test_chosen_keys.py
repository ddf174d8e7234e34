"""Models whose attention reads the keys that an indexer chooses: over ranks as in one process."""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import importlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cp_fast
from benchmarks.parts import sweep_cases
from benchmarks.parts.tiny_models import tiny_model
from cp_fast.integrations import transformers as ours
from cp_fast.integrations.hugging_face import chosen_keys
from cp_fast.layers import sparse_attention as sparse
from cp_ref import SimGroup
from cp_ref.schedules.words import Unsupported
from tests.dist.workers import Processes
from tests.integrations.hugging_face.documents_apart import Part, alone, batches, check, part_of, parts_of
from tests.integrations.hugging_face.families import EXPERTS, LATENT, SIZES

pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

INDEXER: dict[str, Any] = {"index_topk": 4, "index_head_dim": 12, "index_n_heads": 16, "num_hidden_layers": 3}
INDEXER |= {"n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse", "dense"]}
SHARED = {"indexer_types": ["full", "shared", "full"]}  # the second layer takes the choice of the first
DOTS: dict[str, Any] = {"layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"]}
DOTS |= {"sliding_window": 5, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 8, "swa_q_lora_rank": 24}
DOTS |= {"swa_kv_lora_rank": 24, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 12}
MODELS: dict[str, dict[str, Any]] = {
    "DeepseekV32ForCausalLM": {},
    "GlmMoeDsaForCausalLM": SHARED,
    "AXK2ForCausalLM": {},
    "HYV4ForCausalLM": SHARED,  # with sinks, and the last numbers rotated
    "Dots3NoteForCausalLM": DOTS,
}


def tiny(name: str, **more: Any) -> Any:
    """A small model in training mode, with weights that are large enough for choices to differ."""
    kind = getattr(importlib.import_module("transformers"), name)
    sizes = SIZES | EXPERTS | LATENT | INDEXER | MODELS[name] | more
    torch.manual_seed(0)
    model = kind._from_config(kind.config_class(**sizes), attn_implementation="eager")
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return model.train()


@pytest.mark.parametrize(
    ("name", "size", "comm", "layout"),
    [
        ("DeepseekV32ForCausalLM", 2, "all_gather", "balanced"),
        ("GlmMoeDsaForCausalLM", 2, "a2a", "dual_chunk"),
        pytest.param("GlmMoeDsaForCausalLM", 1, "all_gather", "dual_chunk", marks=pytest.mark.thorough),
        *(
            pytest.param(name, size, comm, layout, marks=pytest.mark.thorough)
            for name in MODELS
            for size, comm, layout in ((3, "all_gather", "contiguous"), (4, "a2a", "balanced"))
        ),
    ],
)
def test_a_model_is_the_same_over_ranks(name: str, size: int, comm: Any, layout: Any) -> None:
    def one(member: Any) -> dict[str, Part]:
        return parts_of(tiny(name), cp_fast.ContextParallel(member, comm, layout=layout))

    found, whole = SimGroup(size).run(one), tiny(name)
    for kind in batches():
        check(whole, kind, [part[kind] for part in found])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["HYV4VL", "Dots3Note", "MistralLarge4"])
def test_a_model_of_images_is_right_over_ranks(name: str) -> None:
    found = sweep_cases.play(f"{name}ForConditionalGeneration", "images")
    assert (found["verdict"], found.get("refused in", {})) == ("right", {}), found


@pytest.mark.parametrize("layout", ["dual_chunk", "balanced"])
def test_an_indexer_without_latent_queries_and_layers_that_share_keys(layout: Any) -> None:
    """Mistral Large 4: its second layer reads the latent keys and the choice of the first; its last has no rotation."""
    whole = tiny_model("MistralLarge4ForConditionalGeneration").model.language_model
    batch = {name: x for name, x in batches()["padded"].items() if name != "labels"}

    def one(member: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        cp = cp_fast.ContextParallel(member, "all_gather", layout=layout)
        model = ours.prepare(copy.deepcopy(whole), cp)
        part = ours.shard_batch(batch, cp=cp, model=model)
        out = model(**part)[0]
        real = part["cp_batch"].documents.view(out.shape[:2]) >= 0
        out[real].square().sum().backward()
        return part["cp_batch"].unshard(out.detach()), {
            n: w.grad for n, w in model.named_parameters() if w.grad is not None
        }

    parts, real = SimGroup(3).run(one), batch["attention_mask"].bool()
    out = whole(**batch, use_cache=False)[0]
    out[real].square().sum().backward()
    torch.testing.assert_close(parts[0][0][real], out[real].detach(), rtol=1e-3, atol=1e-3)
    for name, weight in whole.named_parameters():
        if weight.grad is not None:
            found = torch.stack([grads[name] for _, grads in parts]).sum(0)
            assert float((found - weight.grad).norm()) <= 1e-3 * float(weight.grad.norm()) + 1e-4, name


def over_gloo(name: str, comm: Any) -> Part:
    """One process."""
    return part_of(tiny(name), "packed", cp_fast.ContextParallel(dist.group.WORLD, comm))


@pytest.mark.parametrize(("name", "comm"), [("DeepseekV32ForCausalLM", "a2a"), ("GlmMoeDsaForCausalLM", "all_gather")])
def test_processes(two: Processes, name: str, comm: str) -> None:
    check(tiny(name), "packed", two.run(over_gloo, name, comm))


class Adapted(torch.nn.Module):
    """A linear layer with another one in it, as adapters have it."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_keys_are_latent_unless_their_weight_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter on what expands keys is honoured: then each head has its own keys. The outputs are the same."""
    heads: list[int] = []
    attend = chosen_keys.sparse_attention

    def looked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **how: Any) -> Any:
        heads.append(k.shape[-2])
        assert k.shape[-2] > 1 or v.data_ptr() == k.data_ptr()
        return attend(q, k, v, *rest, **how)

    monkeypatch.setattr(chosen_keys, "sparse_attention", looked)

    def one(member: Any) -> list[torch.Tensor]:
        cp = cp_fast.ContextParallel(member, "all_gather")
        found = []
        for adapted in (False, True):
            model = tiny("DeepseekV32ForCausalLM")
            for layer in model.model.layers if adapted else ():
                layer.self_attn.kv_b_proj = Adapted(layer.self_attn.kv_b_proj)
            model = ours.prepare(model, cp)
            found.append(model(**ours.shard_batch(batches()["packed"], cp=cp, model=model)).logits.detach())
        return found

    for latent, whole in SimGroup(2).run(one):
        torch.testing.assert_close(latent, whole, rtol=1e-4, atol=1e-4)
    assert sorted(set(heads)) == [1, 4]


def test_checkpointing_does_not_choose_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from cp_fast.checkpoint import save_attention

    chosen: list[int] = []
    select = sparse.SelectionLayer.forward

    def counted(*given: Any) -> Any:
        chosen.append(1)
        return select(*given)

    monkeypatch.setattr(sparse.SelectionLayer, "forward", counted)

    def one(member: Any) -> list[torch.Tensor]:
        cp = cp_fast.ContextParallel(member, "all_gather")
        found = []
        for saved in (False, True):
            model = ours.prepare(tiny("GlmMoeDsaForCausalLM"), cp)
            if saved:
                how = {"use_reentrant": False, "context_fn": save_attention()}
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
            model(**ours.shard_batch(batches()["packed"], cp=cp, model=model)).loss.backward()
            found += [w.grad for w in model.parameters() if w.grad is not None]
        return found

    for grads in SimGroup(2).run(one):
        half = len(grads) // 2
        assert all(map(torch.equal, grads[:half], grads[half:]))
    assert len(chosen) == 2 * 2 * 2  # of two ranks, two layers with an indexer, with and without checkpointing


@pytest.mark.thorough
def test_inside_torch_compile() -> None:
    """The logits are equal bit for bit; the gradients of a compiled graph are, but for rounding."""
    layers = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "shared"]}

    def one(member: Any, *, compiled: bool) -> list[torch.Tensor]:
        cp = cp_fast.ContextParallel(member, "all_gather")
        model = ours.prepare(tiny("GlmMoeDsaForCausalLM", **layers), cp)
        run: Any = torch.compile(model, backend="eager") if compiled else model
        out = run(**ours.shard_batch(batches()["packed"], cp=cp, model=model))
        out.loss.backward()
        return [out.logits.detach(), *(w.grad for w in model.parameters() if w.grad is not None)]

    for found, wanted in zip(*(SimGroup(2).run(partial(one, compiled=on)) for on in (True, False)), strict=True):
        assert torch.equal(found[0], wanted[0])
        torch.testing.assert_close(found[1:], wanted[1:], rtol=1e-5, atol=1e-6)


def test_autocast() -> None:
    """In bfloat16 the latent keys are still sent once, and the loss is near that of one process."""

    def one(member: Any) -> torch.Tensor:
        cp = cp_fast.ContextParallel(member, "all_gather")
        model = ours.prepare(tiny("DeepseekV32ForCausalLM"), cp)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(**ours.shard_batch(batches()["packed"], cp=cp, model=model))
        out.loss.backward()
        assert all(bool(w.grad.isfinite().all()) for w in model.parameters() if w.grad is not None)
        return out.loss.detach()

    _, loss, _ = alone(tiny("DeepseekV32ForCausalLM"), batches()["packed"])
    torch.testing.assert_close(torch.stack(SimGroup(2).run(one)).sum(), loss, rtol=5e-2, atol=5e-2)


def test_a_ring_is_refused_by_name() -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(tiny("DeepseekV32ForCausalLM"), cp)
        with pytest.raises(Unsupported, match=r"by cp_comm_type 'p2p'.*\n.*cp_comm_type='all_gather'"):
            model(**ours.shard_batch(batches()["packed"], cp=cp, model=model))

    SimGroup(2).run(one)


def test_an_indexer_that_scores_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of transformers may change it: the trial of `prepare` compares the choices."""
    projected = chosen_keys._projected  # pyright: ignore[reportPrivateUsage]

    def other(*given: Any) -> tuple[torch.Tensor, ...]:
        q, k, weights = projected(*given)
        return q.flip(-1), k, weights

    monkeypatch.setattr(chosen_keys, "_projected", other)
    model = tiny("DeepseekV32ForCausalLM")

    def one(member: Any) -> None:
        with pytest.raises(NotImplementedError, match=r"layers.0.self_attn.indexer .* scores its keys in a way"):
            ours.prepare(model, cp_fast.ContextParallel(member, "all_gather"))

    SimGroup(1).run(one)
    assert "forward" not in model.model.layers[0].self_attn.__dict__
    assert model.config._attn_implementation == "eager"


def test_a_model_by_itself_is_as_before() -> None:
    """A prepared model whose attention is switched back runs its own indexer."""
    batch = {"input_ids": batches()["one"]["input_ids"], "use_cache": False}
    want = tiny("GlmMoeDsaForCausalLM")(**batch).logits

    def one(member: Any) -> torch.Tensor:
        model = ours.prepare(tiny("GlmMoeDsaForCausalLM"), cp_fast.ContextParallel(member, "all_gather"))
        model.set_attn_implementation("eager")
        return model(**batch).logits

    assert torch.equal(SimGroup(1).run(one)[0], want)
