"""`flash_attn.flash_attn_interface` for libraries that import FlashAttention 2's private functions, where the package
flash-attn is not installed.

On CUDA they call the FlashAttention 2 kernels that are built into PyTorch: the same source, without softcap. On the
CPU they compute the same by plain PyTorch: float32 inside, rounded to the operands' dtype once per call, as the kernels
do. Either way nothing of the library under test is replaced but the kernel below it.

Facts about FlashAttention 2 that the CPU side keeps: a window side of -1 is unbounded; causal is aligned to the last
query and the last key; a row that sees nothing has out 0 and LSE +inf.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import torch

__all__ = ["VERSION", "stood_in"]

VERSION = "2.8.3"  # the private signatures are those of this release
PACKAGE, INTERFACE = "flash_attn", "flash_attn.flash_attn_interface"


@contextmanager
def stood_in() -> Iterator[None]:
    """Inside, `import flash_attn.flash_attn_interface` finds the package, or else these functions. Afterwards
    `sys.modules` is as before: what was imported inside keeps the functions, and nobody else takes them for flash-attn.
    """
    if _is_installed():
        yield
        return
    before = {name: sys.modules.get(name) for name in (PACKAGE, INTERFACE)}
    sys.modules.update(_stand_ins(before[PACKAGE]))
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _is_installed() -> bool:
    try:
        return INTERFACE in sys.modules or find_spec(INTERFACE) is not None
    except ImportError:
        return False


def _stand_ins(package_before: ModuleType | None) -> dict[str, ModuleType]:
    """The package and its module, by name. FlashAttention 4 is in a package `flash_attn` too, and is still found."""
    package, interface = (module_from_spec(ModuleSpec(name, None)) for name in (PACKAGE, INTERFACE))
    functions = (_flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward)
    for function in (*functions, flash_attn_func):
        setattr(interface, function.__name__, function)
    package.__path__ = getattr(package_before, "__path__", [])
    package.__version__ = VERSION  # type: ignore[attr-defined]
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    package.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    return {PACKAGE: package, INTERFACE: interface}


def _flash_attn_forward(
    q: Any, k: Any, v: Any, dropout_p: Any, softmax_scale: Any, causal: Any, window_size_left: Any,
    window_size_right: Any, softcap: Any, alibi_slopes: Any, return_softmax: Any,
) -> Any:  # fmt: skip
    """[b, s, h, d] -> (out, softmax_lse [b, h, s], S_dmask, rng_state)."""
    _plain(dropout_p, alibi_slopes)
    window = (window_size_left, window_size_right)
    if q.is_cuda:
        return _on_cuda(q, k, v, None, None, q.shape[1], k.shape[1], softmax_scale, causal, window, softcap)
    parts = [_tile(*x, softmax_scale, causal, window, softcap) for x in zip(q, k, v, strict=True)]
    return torch.stack([o for o, _ in parts]), torch.stack([lse for _, lse in parts]), None, None


def _flash_attn_varlen_forward(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    dropout_p: Any, softmax_scale: Any, causal: Any, window_size_left: Any = -1, window_size_right: Any = -1,
    softcap: Any = 0.0, alibi_slopes: Any = None, return_softmax: Any = False, block_table: Any = None,
    leftpad_k: Any = None, seqused_k: Any = None, zero_tensors: Any = False,
) -> Any:  # fmt: skip
    """[t, h, d] -> (out, softmax_lse [h, t], S_dmask, rng_state)."""
    _plain(dropout_p, alibi_slopes)
    window = (window_size_left, window_size_right)
    if q.is_cuda:
        lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
        return _on_cuda(q, k, v, *lengths, softmax_scale, causal, window, softcap)
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)
    for rows, columns in _segments(cu_seqlens_q, cu_seqlens_k):
        out[rows], lse[:, rows] = _tile(q[rows], k[columns], v[columns], softmax_scale, causal, window, softcap)
    return out, lse, None, None


def _flash_attn_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, dropout_p: Any,
    softmax_scale: Any, causal: Any, window_size_left: Any, window_size_right: Any, softcap: Any, alibi_slopes: Any,
    deterministic: Any, rng_state: Any = None,
) -> None:  # fmt: skip
    """Into dq, dk and dv."""
    _plain(dropout_p, alibi_slopes)
    window = (window_size_left, window_size_right)
    if q.is_cuda:
        lengths = (None, None, q.shape[1], k.shape[1])
        grads = _cuda_backward(dout, q, k, v, out, softmax_lse, *lengths, softmax_scale, causal, window, softcap)
    else:
        parts = [
            _tile_backward(dout[n], q[n], k[n], v[n], out[n], softmax_lse[n], softmax_scale, causal, window, softcap)
            for n in range(len(q))
        ]
        grads = [torch.stack(x) for x in zip(*parts, strict=True)]
    for place, grad in zip((dq, dk, dv), grads, strict=True):
        place.copy_(grad)


def _flash_attn_varlen_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, cu_seqlens_q: Any,
    cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, dropout_p: Any, softmax_scale: Any, causal: Any,
    window_size_left: Any = -1, window_size_right: Any = -1, softcap: Any = 0.0, alibi_slopes: Any = None,
    deterministic: Any = False, rng_state: Any = None, zero_tensors: Any = False,
) -> None:  # fmt: skip
    """Write dq, dk and dv; rows outside the sequences do not change."""
    _plain(dropout_p, alibi_slopes)
    window = (window_size_left, window_size_right)
    if q.is_cuda:
        lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
        grads = _cuda_backward(dout, q, k, v, out, softmax_lse, *lengths, softmax_scale, causal, window, softcap)
        for place, grad in zip((dq, dk, dv), grads, strict=True):
            place.copy_(grad)
        return
    for rows, columns in _segments(cu_seqlens_q, cu_seqlens_k):
        tile = (dout[rows], q[rows], k[columns], v[columns], out[rows], softmax_lse[:, rows])
        grads = _tile_backward(*tile, softmax_scale, causal, window, softcap)
        for place, grad in zip((dq[rows], dk[columns], dv[columns]), grads, strict=True):
            place.copy_(grad)


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The public function, which Ulysses uses as its local attention."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _Dense.apply(q, k, v, scale, causal, *window_size, softcap)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, *options: Any) -> Any:
        scale, causal, left, right, softcap = options
        out, lse, _, _ = _flash_attn_forward(q, k, v, 0.0, scale, causal, left, right, softcap, None, False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        scale, causal, left, right, softcap = ctx.options
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        dout = grads[0].contiguous()
        _flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, 0.0, scale, causal, left, right, softcap, None, False)
        return dq, dk, dv, None, None, None, None, None


def _plain(dropout_p: float, alibi_slopes: Any) -> None:
    if dropout_p or alibi_slopes is not None:
        raise NotImplementedError("what stands in for flash-attn has no dropout and no ALiBi")


def _on_cuda(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, causal: bool,
    window: tuple[int, int], softcap: float,
) -> Any:  # fmt: skip
    if softcap:
        raise NotImplementedError("PyTorch's FlashAttention 2 has no softcap")
    out, lse, rng, _, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale, window_size_left=window[0],
        window_size_right=window[1],
    )  # fmt: skip
    return out, lse, None, rng


def _cuda_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float,
    causal: bool, window: tuple[int, int], softcap: float,
) -> Any:  # fmt: skip
    if softcap:
        raise NotImplementedError("PyTorch's FlashAttention 2 has no softcap")
    nothing = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state, unused without dropout
    return torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, causal, nothing, nothing[:1], scale=scale,
        window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip


def _segments(cu_q: Any, cu_k: Any) -> list[tuple[slice, slice]]:
    q, k = cu_q.tolist(), cu_k.tolist()
    return [(slice(q[n], q[n + 1]), slice(k[n], k[n + 1])) for n in range(len(q) - 1)]


def _scores(q: Any, k: Any, scale: float, causal: bool, window: tuple[int, int], softcap: float) -> Any:
    """(scores [h, n, m] after the softcap, slope of the softcap or None, hidden [n, m])."""
    n, m = len(q), len(k)
    left, right = window[0], 0 if causal else window[1]
    offset = torch.arange(m)[None] - torch.arange(n)[:, None] - (m - n)
    hidden = torch.zeros(n, m, dtype=torch.bool)
    hidden |= (offset < -left) if left >= 0 else hidden
    hidden |= (offset > right) if right >= 0 else hidden
    k = k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k) * scale
    if not softcap:
        return scores, None, hidden
    bent = torch.tanh(scores / softcap)
    return softcap * bent, 1 - bent**2, hidden


@torch.autocast("cpu", enabled=False)  # autocast does not reach into a kernel
def _tile(q: Any, k: Any, v: Any, scale: float, causal: bool, window: tuple[int, int], softcap: float) -> Any:
    scores, _, hidden = _scores(q, k, scale, causal, window, softcap)
    lse = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    weights = (scores - lse[..., None]).exp().masked_fill(hidden, 0.0)
    v = v.float().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("hnm,mhd->nhd", weights, v).to(q.dtype), lse


@torch.autocast("cpu", enabled=False)
def _tile_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, causal: bool, window: tuple[int, int],
    softcap: float,
) -> Any:  # fmt: skip
    scores, slope, hidden = _scores(q, k, scale, causal, window, softcap)
    weights = (scores - lse[..., None]).exp().masked_fill(hidden, 0.0)
    group, dout = q.shape[1] // k.shape[1], dout.float()
    wide_k, wide_v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    delta = (dout * out.float()).sum(-1).t()[..., None]
    ds = weights * (torch.einsum("nhd,mhd->hnm", dout, wide_v) - delta)
    ds = (ds if slope is None else ds * slope) * scale
    dq = torch.einsum("hnm,mhd->nhd", ds, wide_k)
    dk, dv = torch.einsum("hnm,nhd->mhd", ds, q.float()), torch.einsum("hnm,nhd->mhd", weights, dout)
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return tuple(x.to(q.dtype) for x in (dq, dk, dv))
