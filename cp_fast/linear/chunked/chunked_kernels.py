"""The library of linear attention in plain PyTorch: backward passes by PyTorch's derivatives of the chunked form."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.linear.affine_maps import Maps
from cp_fast.linear.chunked.chunk_states import compute_dtype, prepare
from cp_fast.linear.compose_maps import compose_in_waves
from cp_fast.linear.linear_kernels import FragmentRows, LinearGradients, LinearInputs
from cp_ref.spec import Feature

__all__ = ["ChunkedKernels"]


class ChunkedKernels:
    """See `LinearKernels`."""

    name = "torch"
    features = frozenset(
        {
            Feature.CPU,
            Feature.CUDA,
            Feature.FLOAT16,
            Feature.BFLOAT16,
            Feature.FLOAT32,
            Feature.FLOAT64,
            Feature.HEAD_DIM_OVER_128,
            Feature.HEAD_DIM_OVER_256,
            Feature.HEAD_DIM_ODD,
        }
    )

    def why_not(self) -> str | None:
        """None: PyTorch works."""
        return None

    def forward(self, inputs: LinearInputs, fragments: FragmentRows) -> _Forward:
        return _Forward(inputs, fragments)

    def backward(
        self,
        inputs: LinearInputs,
        fragments: FragmentRows,
        kept: Sequence[torch.Tensor],
        initial: torch.Tensor | None,
        dout: torch.Tensor,
    ) -> _Backward:
        return _Backward(inputs, fragments, initial, dout)

    compose = staticmethod(compose_in_waves)


class _Forward:
    kept: tuple[torch.Tensor, ...] = ()

    def __init__(self, inputs: LinearInputs, fragments: FragmentRows) -> None:
        self._inputs, self._fragments = inputs, fragments
        self._states = prepare(inputs, fragments)

    def maps(self, chosen: Sequence[int]) -> Maps:
        m, b = self._states.maps(len(self._fragments))
        return Maps(m[list(chosen)], b[list(chosen)])

    def run(self, initial: torch.Tensor | None, *, final: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, states = self._states.run(_zeros(self._inputs, self._fragments) if initial is None else initial)
        return out.to(self._inputs.v.dtype), states if final else None


class _Backward:
    def __init__(
        self, inputs: LinearInputs, fragments: FragmentRows, initial: torch.Tensor | None, dout: torch.Tensor
    ) -> None:
        with torch.enable_grad():
            q, k, v, g = (x.detach().requires_grad_() for x in inputs[:4])
            beta = None if inputs.beta is None else inputs.beta.detach().requires_grad_()
            start = _zeros(inputs, fragments) if initial is None else initial.detach()
            self._initial = start.requires_grad_()
            states = prepare(LinearInputs(q, k, v, g, beta, inputs.scale, inputs.kind), fragments)
            self._results = states.run(self._initial)
        self._given = [q, k, v, g, *([] if beta is None else [beta])]
        self._dout = dout.to(compute_dtype(dout.dtype))

    def reverse_maps(self, chosen: Sequence[int], dfinal: torch.Tensor | None) -> torch.Tensor:
        grads = torch.zeros_like(self._initial)
        if dfinal is not None:
            grads[list(chosen)] = dfinal
        (found,) = torch.autograd.grad(self._results, [self._initial], [self._dout, grads], retain_graph=True)
        return found[list(chosen)]

    def meanwhile(self) -> None:
        pass

    def run(self, dfinal: torch.Tensor | None) -> LinearGradients:
        grads = torch.zeros_like(self._initial) if dfinal is None else dfinal
        dinitial, dq, dk, dv, dg, *rest = torch.autograd.grad(
            self._results, [self._initial, *self._given], [self._dout, grads], materialize_grads=True
        )
        return LinearGradients(dq, dk, dv, dg, rest[0] if rest else None, dinitial)


def _zeros(inputs: LinearInputs, fragments: FragmentRows) -> torch.Tensor:
    """Initial states."""
    d_k, (_, h_v, d_v) = inputs.q.shape[-1], inputs.v.shape
    return inputs.v.new_zeros(len(fragments), h_v, d_k, d_v, dtype=compute_dtype(inputs.v.dtype))
