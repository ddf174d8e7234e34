"""FlashAttention 2 in plain PyTorch, with the rules of its C++ interface: PyTorch's operators and the package's.

What the kernels do not write is NaN here, and what they take on trust is asserted.
"""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from cp_fast.kernels.attention import fa2 as built_in

__all__ = ["Call", "fake_aten", "fake_package"]


class Call(NamedTuple):
    """What a launch was told beside its tensors."""

    deterministic: bool
    max_q: int
    max_k: int
    left: int
    right: int
    segments: int


def band(max_k: int, left: int, right: int, lq: int, lk: int) -> torch.Tensor:
    """Bool [lq, lk], True where seen, of the sides as the interface rewrites them."""
    left, right = (-1 if side >= max_k else side for side in (left, right))
    causal = left < 0 and right == 0
    if left < 0 and right >= 0:
        left = max_k
    if left >= 0 and right < 0:
        right = max_k
    i, j = torch.arange(lq)[:, None] + lk - lq, torch.arange(lk)[None, :]
    if causal:
        return j <= i
    seen = torch.ones(lq, lk, dtype=torch.bool)
    return seen if left < 0 and right < 0 else (j >= i - left) & (j <= i + right)


def scores(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    """[h_q, lq, lk], -inf where hidden."""
    s = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    s = softcap * torch.tanh(s / softcap) if softcap > 0 else s
    return s.masked_fill(~seen, -torch.inf)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor) -> None:
    """What the interface checks, and what its kernels read 16 bytes at a time."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert q.shape[2] == k.shape[2] == v.shape[2]
    assert q.shape[2] % 8 == 0
    assert q.shape[2] <= 256
    for x in (q, k, v):
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0
        assert all(s * x.element_size() % 16 == 0 for s in x.stride()[:-1])


def forward(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, call: Call, scale: float, softcap: float) -> tuple[Any, Any]:
    """(out, lse)."""
    check(q, k, v, cu_q, cu_k)
    assert call.max_q > 1, "another layout where heads are grouped"
    dtype, (q, k, v) = q.dtype, (x.float() for x in (q, k, v))
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], q.shape[0]), torch.nan)
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        assert q1 - q0 <= call.max_q
        assert k1 - k0 <= call.max_k
        s = scores(q[q0:q1], k[k0:k1], band(call.max_k, call.left, call.right, q1 - q0, k1 - k0), scale, softcap)
        lse[:, q0:q1] = s.logsumexp(-1)
        values = v[k0:k1].repeat_interleave(q.shape[1] // k.shape[1], 1)
        out[q0:q1] = torch.einsum("hij,jhd->ihd", s.softmax(-1), values)
    return out.to(dtype), lse


def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_q: Any,
    cu_k: Any,
    call: Call,
    scale: float,
    softcap: float,
) -> tuple[Any, Any, Any]:
    """(dq, dk, dv), from the lse that is given."""
    check(q, k, v, cu_q, cu_k)
    check(q, out, dout, cu_q, cu_k)
    assert lse.is_contiguous()
    group, dtype = q.shape[1] // k.shape[1], q.dtype
    dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        assert q1 - q0 <= call.max_q
        assert k1 - k0 <= call.max_k
        keys, values = (x[k0:k1].repeat_interleave(group, 1) for x in (k, v))
        s = scores(q[q0:q1], k[k0:k1], band(call.max_k, call.left, call.right, q1 - q0, k1 - k0), scale, softcap)
        p = (s - lse[:, q0:q1, None]).exp()
        delta = (dout[q0:q1] * out[q0:q1]).sum(-1).T[:, :, None]
        ds = p * (torch.einsum("ihd,jhd->hij", dout[q0:q1], values) - delta)
        if softcap > 0:
            ds = ds * (1 - (s / softcap) ** 2).nan_to_num(neginf=0.0)
        dq[q0:q1] = scale * torch.einsum("hij,jhd->ihd", ds, keys)
        for into, share in (
            (dk, scale * torch.einsum("hij,ihd->jhd", ds, q[q0:q1])),
            (dv, torch.einsum("hij,ihd->jhd", p, dout[q0:q1])),
        ):
            into[k0:k1] = share.view(k1 - k0, k.shape[1], group, q.shape[2]).sum(2)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def fake_aten(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """aten's operators; the list gets every backward's call."""

    def run_forward(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *rest: Any, **o: Any
    ) -> tuple[Any, ...]:
        assert rest == (0.0, False, False)
        assert o.get("num_splits", 1) == 1
        call = Call(False, max_q, max_k, o["window_size_left"], o["window_size_right"], len(cu_q) - 1)
        return *forward(q, k, v, cu_q, cu_k, call, o["scale"], 0.0), None, None, None

    def run_backward(
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        cu_q: Any,
        cu_k: Any,
        max_q: int,
        max_k: int,
        *rest: Any,
        **o: Any,
    ) -> tuple[Any, ...]:
        assert rest[:2] == (0.0, False)
        deterministic = torch.are_deterministic_algorithms_enabled()
        call = Call(deterministic, max_q, max_k, o["window_size_left"], o["window_size_right"], len(cu_q) - 1)
        calls.append(call)
        return backward(dout, q, k, v, out, lse, cu_q, cu_k, call, o["scale"], 0.0)

    calls: list[Call] = []
    built_in._forward_extras()  # reads the real schema, once
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", run_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", run_backward)
    return calls


def fake_package(calls: list[Call]) -> ModuleType:
    """flash_attn.flash_attn_interface of release 2.8; the list gets every backward's call."""

    def run_forward(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        return_softmax: bool = False,
    ) -> tuple[Any, ...]:
        assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
        right = 0 if causal else window_size_right
        call = Call(False, max_seqlen_q, max_seqlen_k, window_size_left, right, len(cu_seqlens_q) - 1)
        return *forward(q, k, v, cu_seqlens_q, cu_seqlens_k, call, softmax_scale, softcap), None, None

    def run_backward(
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        softmax_lse: Any,
        dq: Any,
        dk: Any,
        dv: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Any,
        deterministic: bool,
    ) -> Any:
        assert (dropout_p, alibi_slopes) == (0.0, None)
        right = 0 if causal else window_size_right
        call = Call(deterministic, max_seqlen_q, max_seqlen_k, window_size_left, right, len(cu_seqlens_q) - 1)
        calls.append(call)
        cu = (cu_seqlens_q, cu_seqlens_k)
        made = backward(dout, q, k, v, out, softmax_lse, *cu, call, softmax_scale, softcap)
        for into, x in zip((dq, dk, dv), made, strict=True):
            into.copy_(x)
        return softmax_lse

    module = ModuleType("flash_attn.flash_attn_interface")
    vars(module).update(_flash_attn_varlen_forward=run_forward, _flash_attn_varlen_backward=run_backward)
    return module
