"""TransformerEngine's function, alone: it needs a GPU, the function that takes its place does not."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.integrations import transformer_engine as ours
from cp_fast.kernels.attention import choose_backend as backends
from cp_ref import SimGroup, dense_attention

CU = torch.tensor([0, 13, 20, 40], dtype=torch.int32)
PADDED = torch.tensor([0, 16, 24, 48], dtype=torch.int32)
FUNCTION: Any = ours.attn_forward_func_with_cp
REST = (None, None)  # cp_global_ranks, cp_stream


def tensors(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, h, 8, generator=generator, dtype=torch.float64) for h in (4, 2, 2, 4)]


def call(member: Any, local: list[torch.Tensor], comm: str, **given: Any) -> Any:
    """The function, called by position as TransformerEngine calls it."""
    lengths = given.pop("lengths", (None, None))
    group = list(member.split(2)) if comm == "a2a+p2p" else member
    return FUNCTION(
        True, *local, lengths[0], lengths[0], 24, 24, lengths[1], lengths[1], 0.0, group, *REST, comm, **given
    )


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "a2a+p2p"])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "thd"])
@pytest.mark.one_in(5)
def test_the_function_is_right(fmt: str, comm: str) -> None:
    packed = fmt == "thd"
    whole = tensors(48) if packed else tensors(2, 16) if fmt == "bshd" else tensors(16, 2)
    offset = torch.linspace(-1, 1, 4, dtype=torch.float64)
    given: dict[str, Any] = {
        "qkv_format": fmt,
        "attn_mask_type": "padding_causal" if packed else "causal",
        "softmax_scale": 0.4,
        "window_size": (5, 0),
        "softmax_type": "learnable",
    }
    lengths = {"cu_seqlens_q": CU, "cu_seqlens_q_padded": PADDED} if packed else {}
    *leaves, sink = (x.clone().requires_grad_() for x in (*whole[:3], offset))
    out, _, max_logit = dense_attention(*leaves, **given, **lengths, softmax_offset=sink)
    grads = torch.autograd.grad(out, [*leaves, sink], whole[3])

    def one(member: Any) -> list[torch.Tensor]:
        cp = cp_fast.ContextParallel(member)
        split: dict[str, Any] = {"cp": cp, "qkv_format": fmt, "cu_seqlens_padded": PADDED if packed else None}
        *local, dout = (cp_fast.shard(x, **split) for x in whole)
        local = [x.requires_grad_() for x in local]
        sink = offset.view(1, 4, 1, 1).clone().requires_grad_()
        found, largest = call(
            member, local, comm, lengths=(CU, PADDED), softmax_offset=sink, return_max_logit=True, **given
        )
        found.backward(dout)
        gathered = [cp_fast.unshard(x.detach(), **split) for x in (found, *(x.grad for x in local)) if x is not None]
        assert sink.grad is not None
        return [largest, sink.grad.flatten(), *gathered]

    ranks = SimGroup(4).run(one)
    for largest, _, *gathered in ranks:
        torch.testing.assert_close(largest, max_logit)
        for x, y in zip(gathered, (out, *grads[:3]), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(sum(rank[1] for rank in ranks), grads[3])


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"attn_bias": torch.zeros(1, 4, 8, 8)}, r"attn_bias is a tensor \[1, 4, 8, 8\]"),
        ({"attn_bias_type": "pre_scale_bias"}, "attn_bias_type is 'pre_scale_bias'"),
        ({"attn_bias_type": "alibi"}, "attn_bias_type is 'alibi'"),
        (
            {"attn_bias_type": "post_scale_bias", "attn_bias": torch.zeros(1, 4, 8, 8, requires_grad=True)},
            r"attn_bias that requires a gradient is not supported[^$]*give attn_bias\.detach\(\)",
        ),
        ({"attn_bias_type": "post_scale_bias", "qkv_format": "thd", "lengths": (CU, CU)}, "attn_bias_type .* 'thd'"),
        ({"fp8": True}, "fp8 is True"),
        ({"fp8_output": True}, "fp8_output is True"),
    ],
)
def test_what_cannot_be_honoured_is_named(odd: dict[str, Any], said: str) -> None:
    def one(member: Any) -> None:
        with pytest.raises(NotImplementedError, match=said):
            call(member, tensors(2, 8)[:3], "p2p", **odd)

    SimGroup(1).run(one)


@pytest.mark.parametrize("padded", [None, CU, CU.clone()], ids=["without", "the same", "equal"])
def test_lengths_that_do_not_divide_need_padded_ones(padded: torch.Tensor | None) -> None:
    """TransformerEngine cuts by lengths // (2 * cp): the rows are others than those of an uneven cut."""

    def one(member: Any) -> str:
        given = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
        mine = {"lengths": (CU, padded)} if member.rank else {"lengths": (CU, PADDED)}
        with pytest.raises(ValueError, match=r"give the padded lengths as cu_seqlens_q_padded") as caught:
            call(member, tensors(24)[:3], "p2p", **given, **mine)
        return str(caught.value)

    first, second = SimGroup(2).run(one)
    name = "cu_seqlens_q" if padded is None else "cu_seqlens_q_padded"
    assert second.startswith(f"{name} gives sequence 0 13 rows, which do not divide by 2 * cp_size = 4")
    assert second in first


def test_one_rank_takes_any_lengths() -> None:
    given = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "lengths": (CU, None)}
    SimGroup(1).run(lambda member: call(member, tensors(40)[:3], "p2p", **given))


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("shape", ["bhss", "1hss", "b1ss", "11ss", "111s"])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd"])
@pytest.mark.one_in(7)
def test_a_bias_is_added_to_scaled_scores(fmt: str, shape: str, comm: str) -> None:
    """Rows of this rank's queries, all keys, as TransformerEngine has them; also under the check of equal arguments."""
    whole = tensors(2, 16) if fmt == "bshd" else tensors(16, 2)
    sizes = [n if letter != "1" else 1 for n, letter in zip((2, 4, 16, 16), shape, strict=True)]
    dtype = torch.float32 if backends.BACKENDS[0].name == "fa4-dry" else torch.float64  # which biases fa4 reads
    bias = torch.randn(sizes, generator=torch.Generator().manual_seed(1), dtype=dtype)
    *leaves, dout = (x.clone().requires_grad_() for x in whole)
    q, k, v = (x if fmt == "bshd" else x.transpose(0, 1) for x in leaves)
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = (torch.einsum("bihd,bjhd->bhij", q, k) * 0.4 + bias).masked_fill(
        torch.ones(16, 16).triu(1).bool(), -torch.inf
    )
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    out = out if fmt == "bshd" else out.transpose(0, 1)
    grads = torch.autograd.grad(out, leaves, dout)

    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        *local, upstream = (cp_fast.shard(x, cp=cp, qkv_format=fmt) for x in whole)
        local = [x.requires_grad_() for x in local]
        mine = bias
        if bias.shape[2] > 1:
            mine = cp_fast.shard(bias.permute(2, 0, 1, 3), cp=cp, qkv_format="sbhd").permute(1, 2, 0, 3)
        given = {"attn_bias_type": "post_scale_bias", "attn_bias": mine, "softmax_scale": 0.4, "qkv_format": fmt}
        with cp_fast.checked():
            found = call(member, local, comm, **given)
        found.backward(upstream)
        of_ranks: list[Any] = [found.detach(), *(x.grad for x in local)]
        for x, want in zip(of_ranks, (out.detach(), *grads), strict=True):
            torch.testing.assert_close(cp_fast.unshard(x, cp=cp, qkv_format=fmt), want, rtol=1e-10, atol=1e-10)
        for odd in (mine[..., :8], mine[0], mine.bool(), None):
            with pytest.raises((ValueError, TypeError), match="attn_bias"):
                call(member, local, comm, **{**given, "attn_bias": odd if member.rank else mine})

    SimGroup(2).run(one)


def test_dropout_is_refused_in_training_alone() -> None:
    def one(member: Any) -> None:
        local = tensors(2, 8)[:3]
        rest = (None, None, 8, 8, None, None, 0.1, member, *REST, "p2p")
        with pytest.raises(NotImplementedError, match=r"dropout_p is 0\.1, .* dropout_p and dropout_seed"):
            FUNCTION(True, *local, *rest)
        FUNCTION(False, *local, *rest)

    SimGroup(1).run(one)


def test_it_has_the_33_arguments() -> None:
    names = list(inspect.signature(ours.attn_forward_func_with_cp).parameters)
    assert len(names) == 34
    assert names[-1] == "context"
    assert names[:4] == ["is_training", "q", "k", "v"]
    assert names[10:16] == ["dropout_p", "cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type", "softmax_scale"]
    assert names[28:33] == ["softmax_type", "softmax_offset", "fp8_output", "layer_number", "return_max_logit"]


def test_patch_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over modules with TransformerEngine's names, as it is not installed here."""

    def original() -> None: ...

    for name in ours._USERS:
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:n]), ModuleType(".".join(parts[:n])))
    modules = [sys.modules[name] for name in ours._USERS]
    for module in modules:
        module.attn_forward_func_with_cp = original  # type: ignore[attr-defined]
    ours.patch(softmax_offset_grad="total")
    ours.patch(backend="cpu")

    def one(member: Any) -> torch.Tensor:
        rest = (None, None, 8, 8, None, None, 0.0, member, *REST, "p2p")
        return modules[1].attn_forward_func_with_cp(True, *tensors(2, 8)[:3], *rest)

    assert SimGroup(1).run(one)[0].shape == (2, 8, 4, 8)
    ours.unpatch()
    assert all(module.attn_forward_func_with_cp is original for module in modules)
