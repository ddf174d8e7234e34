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
  float32 copies of dq.
- `torch.nn.attention.activate_flash_attention_impl` replaces these very operators by another library for the whole
  process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from threading import Lock

import torch

from cp_fast.backends.base import Gradients, Partial, Segments
from cp_ref.spec import Feature

__all__ = ["Fa2Backend"]

_flag_lock = Lock()


class Fa2Backend:
    """PyTorch's built-in FlashAttention 2; float16 and bfloat16 on CUDA, d_qk == d_v <= 256, no softcap."""

    name: str = "fa2"
    features: frozenset[Feature] = frozenset(
        {
            Feature.GQA,
            Feature.HEAD_DIM_OVER_128,
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
        _check(q, v, softcap)
        out, lse = torch.ops.aten._flash_attention_forward(
            _aligned(q),
            _aligned(k),
            _aligned(v),
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
        return Partial(out, lse, None)

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
        """See `Backend.backward`; the gradients have q's dtype."""
        left, right, max_q, max_k = _window(segments)
        _check(q, v, softcap)
        if dlse is not None:
            raise ValueError("backend 'fa2' has no gradient through lse: choose by Feature.LSE_GRADIENT")
        q, k, v = (_aligned(x) for x in (q, k, v))
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
        with _deterministic() if deterministic else nullcontext():
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                _aligned(dout),
                q,
                k,
                v,
                _aligned(out),
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
        return Gradients(dq.contiguous(), dk.contiguous(), dv.contiguous())


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


def _check(q: torch.Tensor, v: torch.Tensor, softcap: float) -> None:
    """Refuse what the features already exclude, rather than compute something else."""
    if softcap > 0:
        raise ValueError("backend 'fa2' has no softcap: choose by Feature.SOFTCAP")
    if q.shape[2] != v.shape[2] or q.shape[2] % 8 or q.shape[2] > 256:
        raise ValueError(
            f"backend 'fa2' needs d_qk == d_v, a multiple of 8 up to 256, got d_qk={q.shape[2]} and d_v={v.shape[2]}"
        )


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where its rows do not start on the 16 bytes that the kernel loads at a time."""
    elements = 16 // x.element_size()
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s % elements == 0 for s in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


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
