"""Backend "fa2": the FlashAttention 2 kernels that are built into CUDA builds of PyTorch.

Facts about `aten::_flash_attention_forward/_backward` (varlen form) that this file rests on; all hold from PyTorch
2.11 on:

- A negative window side means unbounded, so a side of -1 cannot be said: tiles must be cropped until both sides are
  None or non-negative. Causal is the window (unbounded, 0); `is_causal` adds nothing and stays False.
- A side that is >= max_k is taken for unbounded, and an unbounded right side beside a bounded left one is replaced by
  max_k. Both are wrong where a segment has more rows than columns. `_window` states a max_k that keeps either from
  mattering: max_k only sizes the backward's grid.
- With max_q = 1 and GQA the forward takes a path that lays its results out differently; max_q = 2 avoids it.
- The lse is [h_q, n] float32, natural logarithm, and +inf for a row that sees nothing (`Segments` has no such row).
- `deterministic` is read from the process-wide flag, and warn_only counts as off. It makes dq repeatable, but the order
  of its sums depends on how many segments and heads are in the launch, and it takes about SMs / (segments * heads) + 1
  float32 copies of dq. So that a segment's gradients do not depend on its neighbours, every segment is a launch of its
  own then.
- Head dims are equal and multiples of 8; others are padded with zero columns (`dims`).
- There is no gradient through lse; a second backward launch adds it (`lse_gradient`).
- The package flash-attn has the same kernels, and softcap in the bargain. It is not used: none could be checked here.
- `torch.nn.attention.activate_flash_attention_impl` replaces these very operators by another library for the whole
  process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock

import torch

from cp_fast.backends.base import Gradients, Partial, Segments
from cp_fast.backends.dims import aligned, round_up, trim, widen
from cp_fast.backends.lse_gradient import lse_launch
from cp_ref.spec import Feature

__all__ = ["Fa2Backend"]

_flag_lock = Lock()


class Fa2Backend:
    """PyTorch's built-in FlashAttention 2; float16 and bfloat16 on CUDA, head dims up to 256, no softcap."""

    name: str = "fa2"
    features: frozenset[Feature] = frozenset(
        {
            Feature.GQA,
            Feature.ASYMMETRIC_DIMS,
            Feature.GQA_ASYMMETRIC_DIMS,
            Feature.HEAD_DIM_OVER_128,
            Feature.HEAD_DIM_ODD,
            Feature.LSE_GRADIENT,
            Feature.DETERMINISTIC,
            Feature.CUDA,
            Feature.FLOAT16,
            Feature.BFLOAT16,
        }
    )

    def why_not(self) -> str | None:
        """None where this PyTorch has the kernels and the GPU runs them, else the reason."""
        return _why_not()

    @torch.no_grad()
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, *, scale: float, softcap: float
    ) -> Partial:
        """See `Backend.forward`; out has q's dtype."""
        left, right, max_q, max_k = _window(segments)
        d, d_v = _dim(q, v, softcap), v.shape[2]
        out, lse = torch.ops.aten._flash_attention_forward(
            aligned(widen(q, d)),
            aligned(widen(k, d)),
            aligned(widen(v, d)),
            segments.device_cu_q,
            segments.device_cu_kv,
            max_q,
            max_k,
            0.0,
            False,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
            **_forward_extras(),
        )[:2]
        if lse.shape != (q.shape[1], q.shape[0]) or lse.dtype != torch.float32:
            raise RuntimeError(
                f"aten::_flash_attention_forward of PyTorch {torch.__version__} returned an lse {lse.dtype} "
                f"{list(lse.shape)}, not float32 [{q.shape[1]}, {q.shape[0]}]: backend 'fa2' does not know this layout"
            )
        return Partial(trim(out, d_v), lse, None)

    @torch.no_grad()
    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        segments: Segments,
        *,
        scale: float,
        softcap: float,
        deterministic: bool,
    ) -> Gradients:
        """See `Backend.backward`; the gradients have q's dtype, float32 where dlse is given."""
        d, d_qk, d_v = _dim(q, v, softcap), q.shape[2], v.shape[2]
        q, k, v, out, dout = (aligned(widen(x, d)) for x in (q, k, v, out, dout))
        dq, dk, dv = _gradients(dout, q, k, v, out, lse, segments, scale, deterministic)
        if dlse is not None:
            ones, products = lse_launch(dlse, q.dtype, d)
            nothing = torch.zeros_like(v)
            more_dq, more_dk, _ = _gradients(ones, q, k, nothing, products, lse, segments, scale, deterministic)
            dq, dk = dq.float() + more_dq, dk.float() + more_dk
        return Gradients(trim(dq, d_qk), trim(dk, d_qk), trim(dv, d_v))


def _gradients(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
    scale: float,
    deterministic: bool,
) -> Gradients:
    """One backward of all segments, or one of each where their number may not matter."""
    if not deterministic:
        return _launch_backward(dout, q, k, v, out, lse, segments, scale)
    parts: list[Gradients] = []
    with _deterministic():
        for s in range(len(segments.cu_q) - 1):
            rows, columns = slice(*segments.cu_q[s : s + 2]), slice(*segments.cu_kv[s : s + 2])
            own = (dout[rows], q[rows], k[columns], v[columns], out[rows], lse[:, rows])
            parts.append(_launch_backward(*own, segments.alone(s), scale))
    return Gradients(*(torch.cat(x) for x in zip(*parts, strict=True)))


def _launch_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
    scale: float,
) -> Gradients:
    """One launch on aligned operands."""
    left, right, max_q, max_k = _window(segments)
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        segments.device_cu_q,
        segments.device_cu_kv,
        max_q,
        max_k,
        0.0,
        False,
        rng_state,
        rng_state.new_empty(0),
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    return Gradients(dq, dk, dv)


@cache
def _why_not() -> str | None:
    """The reason why the kernels do not run here, found once."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    if torch.version.hip is not None:
        return "this is a ROCm build of PyTorch"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this PyTorch was built without FlashAttention"
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 8 else f"it needs compute capability 8.0 or later, and this GPU has {major}.{minor}"


@cache
def _forward_extras() -> dict[str, int]:
    """What only some versions of PyTorch take: num_splits=1 keeps a segment's result the same beside any others."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    return {"num_splits": 1} if any(a.name == "num_splits" for a in schema.arguments) else {}


def _window(segments: Segments) -> tuple[int, int, int, int]:
    """(left, right, max_q, max_k) as aten reads them: -1 is unbounded, max_k beyond every row, column and side."""
    left, right = segments.left, segments.right
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise ValueError(f"backend 'fa2' takes window sides of None or >= 0, got ({left}, {right}): crop the tile")
    max_q = max(2, segments.max_q)
    if left is None and right in (None, 0):
        return -1, -1 if right is None else 0, max_q, segments.max_kv
    longest = max(segments.max_q, segments.max_kv)  # a side this long hides nothing in any segment
    return (
        -1 if left is None else min(left, longest),
        -1 if right is None else min(right, longest),
        max_q,
        longest + 1,
    )


def _dim(q: torch.Tensor, v: torch.Tensor, softcap: float) -> int:
    """The head dim to run with. Refuses what the features already exclude, rather than compute something else."""
    if softcap > 0:
        raise ValueError("backend 'fa2' has no softcap: choose by Feature.SOFTCAP")
    if max(q.shape[2], v.shape[2]) > 256:
        raise ValueError(f"backend 'fa2' needs head dims up to 256, got d_qk={q.shape[2]} and d_v={v.shape[2]}")
    return round_up(max(q.shape[2], v.shape[2]), 8)


@contextmanager
def _deterministic() -> Iterator[None]:
    """The process-wide deterministic flag, on while the backward is launched.

    The lock keeps two threads from restoring each other's value. A thread that launches something else meanwhile sees
    the flag as well: its results stay right, but an operator without a deterministic form would raise. Whoever trains
    with several threads per process and wants determinism sets the flag for the whole run, and nothing changes here.
    """
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        yield
        return
    with _flag_lock:
        enabled = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
