"""Backend "fa4": FlashAttention 4 (package `flash-attn-4`), through its raw varlen forward and backward.

Facts about `flash_attn.cute.interface` 4.0.0b36 on Hopper (sm90) that this file rests on:

- A window side of None is unbounded and -1 is minus one; but *both* sides negative are taken for unbounded.
  (None, 0) is recognised as causal.
- max_seqlen_* size nothing in the varlen forward, yet enter the key of its compilation cache: they are left out, so
  that a shape class compiles once (2-4 s) and not again for short segments. In the backward they size the semaphores
  of the deterministic mode; stating at least a few blocks there likewise leaves one class.
- cu_seqlens must be int32, contiguous and on the GPU. q, k, v, out and dout are copied by the library where their
  rows are not 16-byte aligned. The lse is float32 [h_q, n], natural logarithm.
- The kernels read whole blocks, past a segment's end into its neighbour's rows: what lies there is multiplied by
  zero, so it has to be finite. Rows between segments must not hold NaN.
- Head dims are multiples of 8. The backward refuses GQA with d_qk != d_v. And for head dims up to 128 that are no
  multiple of 32 its kernel and its float32 accumulators round differently. All three are padded with zero columns
  (`dims`), at the cost of one copy of q, k, v, out and dout and of the wider products (192/128: about a fifth of the
  speed).
- The first call of a shape class compiles, which is not safe in two threads at once: a lock is held while launching.
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from threading import Lock
from types import ModuleType
from typing import Any

import torch

from cp_fast.backends.base import BackwardOperands, Gradients, LaunchOptions, NotInstalled, Partial, Segments
from cp_fast.backends.dims import round_up, trim, widen
from cp_fast.backends.fa4_cache import keep_on_disk
from cp_fast.backends.fa4_recorded import Launches
from cp_ref.spec import Feature

__all__ = ["Fa4Backend"]

_launch_lock = Lock()
_SEVERAL_BLOCKS = 257  # more rows than two blocks of any kernel


class Fa4Backend:
    """FlashAttention 4 on Hopper; float16 and bfloat16, head dims up to 256."""

    name: str = "fa4"
    rounded_gradients: bool = True  # in q's dtype, always: see `planning.narrow`
    features: frozenset[Feature] = frozenset(
        {
            Feature.GQA,
            Feature.ASYMMETRIC_DIMS,
            Feature.GQA_ASYMMETRIC_DIMS,
            Feature.HEAD_DIM_OVER_128,
            Feature.HEAD_DIM_ODD,
            Feature.SOFTCAP,
            Feature.LSE_GRADIENT,
            Feature.DETERMINISTIC,
            Feature.IN_PLACE,
            Feature.CUDA,
            Feature.FLOAT16,
            Feature.BFLOAT16,
        }
    )

    def why_not(self) -> str | None:
        """None where the library is installed, looks as expected and the GPU is a Hopper, else the reason."""
        return _why_not()

    @torch.no_grad()
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, options: LaunchOptions
    ) -> Partial:
        """See `Backend.forward`; out has q's dtype."""
        d_qk, d_v = _forward_dims(q.shape[2], v.shape[2])
        tensors: dict[str, torch.Tensor | None] = {
            "q": _operand(q, d_qk),
            "k": _operand(k, d_qk),
            "v": _operand(v, d_v),
            "cu_seqlens_q": segments.device_cu_q,
            "cu_seqlens_k": segments.device_cu_kv,
        }
        softcap = options.softcap if options.softcap > 0 else None
        how = {"softmax_scale": options.scale, "softcap": softcap, "return_lse": True}
        out, lse = _launch("_flash_attn_fwd", q.device, tensors, _band(segments) | how, 2)
        return Partial(trim(out, v.shape[2]), lse, None)

    @torch.no_grad()
    def backward(self, operands: BackwardOperands, segments: Segments, options: LaunchOptions) -> Gradients:
        """See `Backend.backward`; the gradients have q's dtype."""
        dout, q, k, v, out, lse, dlse = operands
        d_qk, d_v = _backward_dims(q.shape[2], v.shape[2], gqa=q.shape[1] != k.shape[1])
        longest: dict[str, int] = {}
        if options.deterministic:
            longest = {
                "max_seqlen_q": max(segments.max_q, _SEVERAL_BLOCKS),
                "max_seqlen_k": max(segments.max_kv, _SEVERAL_BLOCKS),
            }
        tensors: dict[str, torch.Tensor | None] = {
            "q": _operand(q, d_qk),
            "k": _operand(k, d_qk),
            "v": _operand(v, d_v),
            "out": _operand(out, d_v),
            "dout": _operand(dout, d_v),
            "lse": lse.contiguous(),
            "dlse": None if dlse is None else dlse.contiguous(),
            "cu_seqlens_q": segments.device_cu_q,
            "cu_seqlens_k": segments.device_cu_kv,
        }
        how = {
            "softmax_scale": options.scale,
            "softcap": max(options.softcap, 0.0),
            "deterministic": options.deterministic,
        }
        dq, dk, dv = _launch("_flash_attn_bwd", q.device, tensors, _band(segments) | longest | how, 3)
        return Gradients(trim(dq, q.shape[2]), trim(dk, q.shape[2]), trim(dv, v.shape[2]))


def _launch(
    name: str, device: torch.device, tensors: dict[str, torch.Tensor | None], numbers: dict[str, Any], results: int
) -> tuple[torch.Tensor, ...]:
    """One of the library's functions, for one thread at a time and on this device: so many of its results."""
    with _launch_lock, torch.cuda.device(device):
        return _launches(_interface(), name)(tensors, numbers, results)


@cache
def _launches(library: ModuleType, name: str) -> Launches:
    return Launches(library, name)


@cache
def _interface() -> ModuleType:
    """The library, imported on first use: the import takes seconds."""
    keep_on_disk()
    return importlib.import_module("flash_attn.cute.interface")


@cache
def _why_not() -> str | None:
    """The reason why the library does not run here, found once."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"it is checked on Hopper (compute capability 9.0) only, and this GPU has {major}.{minor}"
    try:
        library = _interface()
    except Exception as error:  # a broken installation fails in many ways, and all of them mean "not here"
        return NotInstalled(
            f"importing flash_attn.cute.interface (pip install flash-attn-4) failed: {type(error).__name__}: {error}"
        )
    both = {"cu_seqlens_q", "cu_seqlens_k", "window_size_left", "window_size_right", "softmax_scale", "softcap"}
    for name, arguments in (("_flash_attn_fwd", {"return_lse"}), ("_flash_attn_bwd", {"deterministic", "dlse"})):
        function = getattr(library, name, None)
        if function is None or not both | arguments <= set(inspect.signature(function).parameters):
            return f"this flash-attn-4 has another {name} than 4.0.0b36, the release that this backend is written for"
    return None


def _band(segments: Segments) -> dict[str, Any]:
    """The window of segments as the library's arguments."""
    left, right = segments.left, segments.right
    if left is not None and right is not None and left < 0 and right < 0:
        raise ValueError(f"backend 'fa4' takes a window of ({left}, {right}) for unbounded; no row sees anything in it")
    return {
        "causal": False,
        "window_size_left": left,
        "window_size_right": right,
    }


def _forward_dims(d_qk: int, d_v: int) -> tuple[int, int]:
    """The head dims to run the forward with: 192/128 has its own kernel, any other pair is padded to be equal.

    >>> _forward_dims(192, 128), _forward_dims(128, 64), _forward_dims(80, 80), _forward_dims(75, 20)
    ((192, 128), (128, 128), (80, 80), (80, 80))
    """
    wide = round_up(max(d_qk, d_v), 8)
    return (d_qk, d_v) if (d_qk, d_v) == (192, 128) else (wide, wide)


def _backward_dims(d_qk: int, d_v: int, *, gqa: bool) -> tuple[int, int]:
    """The head dims to run the backward with, see the head of this file.

    >>> _backward_dims(192, 128, gqa=False), _backward_dims(192, 128, gqa=True), _backward_dims(80, 80, gqa=False)
    ((192, 128), (192, 192), (96, 96))
    """
    if (d_qk, d_v) == (192, 128) and not gqa:
        return d_qk, d_v
    wide = max(d_qk, d_v)
    wide = round_up(wide, 8 if wide > 128 else 32)
    return wide, wide


def _operand(x: torch.Tensor, d: int) -> torch.Tensor:
    """x [rows, heads, up to d] with zero columns up to d."""
    x = x.contiguous() if 0 in x.stride() else x  # strides of zero would be compiled in, a shape class of their own
    return widen(x, d)
