"""What cannot be right over ranks is refused by name, on all ranks."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cp_fast
from cp_fast.integrations import diffusers as ours
from cp_fast.integrations.diffusion.joint_attention import check_mask
from cp_ref import SimGroup
from tests.integrations.diffusion.families import batch_of, noise, outputs, tiny

diffusers = pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[test-integrations]'")


def refused(family: str, change: Callable[[Any, Any, int], Any], size: int = 2) -> Callable[[], Any]:
    """Calls a family over ranks; change(model, batch, rank) comes after `use`, and every rank must raise."""

    def one(member: Any) -> str:
        model = ours.use(tiny(family), cp_fast.ContextParallel(member))
        batch = batch_of(family)
        change(model, batch, member.rank)
        try:
            outputs(model, batch)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    said = SimGroup(size).run(one)
    assert all(words != "nothing" for words in said), said

    def again() -> None:
        raise RuntimeError(" | ".join(said))

    return again


def _seed(model: Any, batch: Any, rank: int) -> None:
    torch.manual_seed(rank)
    batch["hidden_states"] = noise(*batch["hidden_states"].shape)


def _processor(model: Any, batch: Any, rank: int) -> None:
    model.set_attention_backend("native")


def _cache(model: Any, batch: Any, rank: int) -> None:
    model.enable_cache(diffusers.FirstBlockCacheConfig())


def _dropout(model: Any, batch: Any, rank: int) -> None:
    model.blocks[1].ffn.net[1].p = 0.1


class _Mixing(nn.Module):
    """Gives each token a share of the one before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        return out + 0.1 * out.roll(1, 1)


def _mixing(model: Any, batch: Any, rank: int) -> None:
    model.blocks[0].ffn = _Mixing(model.blocks[0].ffn)


class _Counting(nn.Module):
    """Adds the number of each row."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + torch.arange(x.shape[1])[None, :, None]


def _counting(model: Any, batch: Any, rank: int) -> None:
    model.blocks[0].ffn = _Counting(model.blocks[0].ffn)


def _own_attention(model: Any, batch: Any, rank: int) -> None:
    def attend(q: Any, k: Any, v: Any, **_: Any) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    class Own:
        def __call__(self, attn: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
            q, k, v = (to(x).unflatten(2, (attn.heads, -1)) for to in (attn.to_q, attn.to_k, attn.to_v))
            return attn.to_out[0](attend(q, k, v).flatten(2))

    model.blocks[0].attn1.processor = Own()


def _control(model: Any, batch: Any, rank: int) -> None:
    batch["controlnet_block_samples"] = [torch.ones(2, 11, 32)]


def _steps(model: Any, batch: Any, rank: int) -> None:
    batch["timestep"] = torch.arange(2 * 46).reshape(2, 46)  # 45 tokens


def _mask_of_pairs(model: Any, batch: Any, rank: int) -> None:
    batch["video_self_attention_mask"] = torch.ones(2, 30, 30)


def _bias(model: Any, batch: Any, rank: int) -> None:
    attn = model.transformer_blocks[0].attn
    attn.register_forward_pre_hook(lambda _, args, named: (args, named | {"attention_mask": torch.full((1, 9), -1.0)}),
                                   with_kwargs=True)  # fmt: skip


def _references(model: Any, batch: Any, rank: int) -> None:
    for block in model.transformer_blocks:
        block.attn.set_processor(type(block.attn)._available_processors[1]())
    ours.use(model, model.__dict__["_cp_fast_state"].cp)
    batch |= {"kv_cache_mode": "extract", "num_ref_tokens": 4}


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("wan", _seed, "rank 0 and rank 1 call WanTransformer3DModel with another hidden_states"),
        ("wan", _processor, "blocks.0.attn1 of WanTransformer3DModel has another processor or attention backend"),
        ("wan", _cache, "has a cache, which skips blocks.*disable_cache"),
        ("wan", _dropout, "blocks.1.ffn.net.1 of WanTransformer3DModel drops out with p=0.1"),
        ("wan", _mixing, r"mixes tokens without attention before blocks.\*.attn1"),
        ("wan", _counting, r"it counts tokens, or takes their positions, from a slice's beginning"),
        ("wan", _own_attention, "mixes tokens"),
        ("wan", _steps, "timestep is given for 46 tokens, and there are hidden_states 45"),
        ("flux", _control, "An argument with a row for each token may be missing in its plan"),
        ("flux", _bias, r"attn_mask with values between -10000 and 0"),
        ("ltx2", _mask_of_pairs, "An argument with a row for each token may be missing in its plan"),
        ("flux2", _references, "no slices of streams"),
    ],
)
def test_calls_that_cannot_be_right(family: str, change: Any, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        refused(family, change)()


def test_a_module_that_is_changed_between_calls() -> None:
    """The next call looks again."""

    def one(member: Any) -> None:
        model = ours.use(tiny("wan").requires_grad_(False), cp_fast.ContextParallel(member))
        outputs(model, batch_of("wan"))
        _mixing(model, None, 0)
        with pytest.raises(NotImplementedError, match="mixes tokens"):
            outputs(model, batch_of("wan"))

    SimGroup(2).run(one)


def test_a_call_after_an_error() -> None:
    """The ranks that were told of another rank's error can go on."""

    def one(member: Any) -> torch.Tensor:
        model = ours.use(tiny("flux").requires_grad_(False), cp_fast.ContextParallel(member))
        odd = batch_of("flux") | {"timestep": torch.full((2,), 0.1 * (1 + member.rank))}
        with pytest.raises(ValueError, match="timestep"):
            model(**odd)
        return outputs(model, batch_of("flux"))[0]

    expected = outputs(tiny("flux").requires_grad_(False), batch_of("flux"))[0]
    for found in SimGroup(2).run(one):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _paper() -> Any:
    from cp_ref.groups.group import PaperGroup

    return cp_fast.ContextParallel(PaperGroup(1))


def test_models_that_use_refuses() -> None:
    with pytest.raises(TypeError, match="use takes a transformer of diffusers"):
        ours.use(nn.Linear(2, 2), _paper())
    with pytest.raises(NotImplementedError, match="AutoencoderKL has no _cp_plan"):
        ours.use(diffusers.AutoencoderKL(), _paper())
    with pytest.raises(TypeError, match="cp is"):
        ours.use(tiny("flux"), "p2p")
    with pytest.raises(ValueError, match="plan names 'head'"):
        ours.use(tiny("flux"), _paper(), plan={"head": _gather()})
    with pytest.raises(TypeError, match="plan is of type list"):
        ours.use(tiny("flux"), _paper(), plan=[])
    offloaded = tiny("flux")
    offloaded.forward = offloaded.forward
    with pytest.raises(NotImplementedError, match="a forward of its own"):
        ours.use(offloaded, _paper())
    shared = tiny("wan")
    for block in shared.blocks:
        block.attn2.processor = block.attn1.processor
    with pytest.raises(NotImplementedError, match="share one attention processor"):
        ours.use(shared, _paper())
    theirs = tiny("flux")
    theirs._parallel_config = object()
    with pytest.raises(ValueError, match="in place of enable_parallelism"):
        ours.use(theirs, _paper())


def _gather() -> Any:
    return diffusers.models._modeling_parallel.ContextParallelOutput(gather_dim=1)


def _cut(**how: Any) -> Any:
    return diffusers.models._modeling_parallel.ContextParallelInput(**how)


def test_a_mask_of_pairs() -> None:
    with pytest.raises(
        NotImplementedError, match=r"layer is given attn_mask a tensor \[2, 3, 4, 4\];.*no mask with a row"
    ):
        check_mask("layer", torch.ones(2, 3, 4, 4, dtype=torch.bool), 2, 4)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"": {"hidden_states": _cut(split_dim=1, expected_dims=3)}, "proj_out": _gather()}, "does not run on 6 of 11"),
        ({"": {"img_ids": _cut(split_dim=0)}, "proj_out": _gather()}, "cuts no argument whose name ends with"),
        ({"": {0: _cut(split_dim=0)}}, "with split_output=True of an output by number"),
        ({"proj_out": 1}, "it must be a ContextParallelOutput"),
    ],
)
def test_plans_that_leave_something_out(plan: Any, words: str) -> None:
    def one(member: Any) -> None:
        model = ours.use(tiny("flux"), cp_fast.ContextParallel(member), plan=plan)
        model(**batch_of("flux"))

    with pytest.raises((NotImplementedError, ValueError, TypeError), match=words):
        SimGroup(2).run(one)


def test_a_plan_that_leaves_the_text_whole() -> None:
    """Then some keys are whole, and others are cut."""
    plan = dict(diffusers.FluxTransformer2DModel._cp_plan)
    plan[""] = {name: cut for name, cut in plan[""].items() if name in ("hidden_states", "img_ids")}

    def one(member: Any) -> None:
        model = ours.use(tiny("flux"), cp_fast.ContextParallel(member), plan=plan)
        model(**batch_of("flux"))

    with pytest.raises(NotImplementedError, match="keys of tokens that are cut and of tokens that are not"):
        SimGroup(2).run(one)


def test_attention_outside_of_a_call() -> None:
    model = ours.use(tiny("wan"), _paper())
    with pytest.raises(RuntimeError, match="outside of a call"):
        model.blocks[0](noise(1, 5, 24), noise(1, 3, 24), noise(1, 6, 24), None)
