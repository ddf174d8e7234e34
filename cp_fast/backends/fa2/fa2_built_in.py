"""FlashAttention 2's kernels in CUDA builds of PyTorch.

This file relies on these facts about `aten::_flash_attention_forward/_backward` (varlen form), and on those in
`varlen`. All hold from PyTorch 2.11 on:

- `deterministic` is read from the process-wide flag, and warn_only counts as off.
- `torch.nn.attention.activate_flash_attention_impl` replaces these very operators by another library for the whole
  process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from threading import Lock
from typing import Any

import torch

from cp_fast.backends.backend_protocol import BackwardOperands, Gradients
from cp_fast.backends.fa2.fa2_backend import Fa2Backend
from cp_fast.backends.fa2.fa2_varlen import Varlen, checked_lse, gpu_why_not

__all__ = ["BuiltIn"]

_flag_lock = Lock()


class BuiltIn(Fa2Backend):
    """Fa2 on PyTorch's built-in kernels."""

    origin: str = "PyTorch's built-in kernels"

    def why_not(self) -> str | None:
        """None where this PyTorch has the kernels and the GPU runs them, else the reason."""
        reason = gpu_why_not()
        if reason is None and not torch.backends.cuda.is_flash_attention_available():
            return "this PyTorch was built without FlashAttention"
        return reason

    def version(self) -> str:
        """PyTorch's."""
        return torch.__version__

    def launch_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, varlen: Varlen
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Fa2Backend.launch_forward`."""
        lengths = varlen.cu_q, varlen.cu_k, varlen.max_q, varlen.max_k
        how = _scale_and_window(varlen) | _forward_extras()
        out, lse = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, False, False, **how)[:2]
        return out, checked_lse(lse, q, f"aten::_flash_attention_forward of PyTorch {torch.__version__}")

    def launch_backward(self, operands: BackwardOperands, varlen: Varlen, *, deterministic: bool) -> Gradients:
        """See `Fa2Backend.launch_backward`."""
        lengths = varlen.cu_q, varlen.cu_k, varlen.max_q, varlen.max_k
        rng_state = torch.zeros(2, dtype=torch.uint64, device=operands.q.device)  # of dropout, which is off
        dropout = 0.0, False, rng_state, rng_state.new_empty(0)
        given = *operands[:6], *lengths, *dropout
        with _deterministic() if deterministic else nullcontext():
            dq, dk, dv = torch.ops.aten._flash_attention_backward(*given, **_scale_and_window(varlen))
        return Gradients(dq, dk, dv)


def _scale_and_window(varlen: Varlen) -> dict[str, Any]:
    """The keywords of both operators."""
    return {"scale": varlen.scores.scale, "window_size_left": varlen.left, "window_size_right": varlen.right}


@cache
def _forward_extras() -> dict[str, int]:
    """Arguments of some PyTorch versions only: num_splits=1 makes a segment's result independent of the others."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    return {"num_splits": 1} if any(a.name == "num_splits" for a in schema.arguments) else {}


@contextmanager
def _deterministic() -> Iterator[None]:
    """The process-wide deterministic flag, on while the backward is launched.

    The lock keeps two threads from restoring each other's value. Other threads that launch operators at the same time
    see the flag too: their results stay right, but an operator without a deterministic form would raise. A user who
    trains deterministically with several threads per process sets the flag for the whole run; then nothing changes
    here.
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
