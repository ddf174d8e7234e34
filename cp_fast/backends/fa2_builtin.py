"""FlashAttention 2's kernels as they are built into CUDA builds of PyTorch.

Facts about `aten::_flash_attention_forward/_backward` (varlen form) that this file rests on, beside those of
`fa2_kernels`; all hold from PyTorch 2.11 on:

- There is no softcap.
- `deterministic` is read from the process-wide flag, and warn_only counts as off.
- `torch.nn.attention.activate_flash_attention_impl` replaces these very operators by another library for the whole
  process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from threading import Lock

import torch

from cp_fast.backends.base import Gradients
from cp_fast.backends.fa2_kernels import Said, checked_lse, gpu_why_not
from cp_ref.spec import Feature

__all__ = ["BuiltInKernels"]

_flag_lock = Lock()


class BuiltInKernels:
    """See `Kernels`."""

    name: str = "PyTorch's built-in kernels"
    features: frozenset[Feature] = frozenset()

    def why_not(self) -> str | None:
        """None where this PyTorch has the kernels and the GPU runs them, else the reason."""
        reason = gpu_why_not()
        if reason is None and not torch.backends.cuda.is_flash_attention_available():
            return "this PyTorch was built without FlashAttention"
        return reason

    def version(self) -> str:
        """PyTorch's."""
        return torch.__version__

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, said: Said
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernels.forward`."""
        _refuse_softcap(said)
        out, lse = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            said.cu_q,
            said.cu_k,
            said.max_q,
            said.max_k,
            0.0,
            False,
            False,
            scale=said.scale,
            window_size_left=said.left,
            window_size_right=said.right,
            **_forward_extras(),
        )[:2]
        return out, checked_lse(lse, q, f"aten::_flash_attention_forward of PyTorch {torch.__version__}")

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        said: Said,
        *,
        deterministic: bool,
    ) -> Gradients:
        """See `Kernels.backward`."""
        _refuse_softcap(said)
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
        with _deterministic() if deterministic else nullcontext():
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                dout,
                q,
                k,
                v,
                out,
                lse,
                said.cu_q,
                said.cu_k,
                said.max_q,
                said.max_k,
                0.0,
                False,
                rng_state,
                rng_state.new_empty(0),
                scale=said.scale,
                window_size_left=said.left,
                window_size_right=said.right,
            )
        return Gradients(dq, dk, dv)


@cache
def _forward_extras() -> dict[str, int]:
    """What only some versions of PyTorch take: num_splits=1 keeps a segment's result the same beside any others."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    return {"num_splits": 1} if any(a.name == "num_splits" for a in schema.arguments) else {}


def _refuse_softcap(said: Said) -> None:
    """Refuse what the features already exclude, rather than compute something else."""
    if said.softcap > 0:
        raise ValueError("backend 'fa2' on PyTorch's built-in kernels has no softcap: choose by Feature.SOFTCAP")


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
