"""`causal_conv1d`: a short convolution of a hybrid model, on the slices of attention."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from cp_fast.kernels.convolution import torch_convolution
from cp_fast.kernels.convolution.torch_convolution import ConvolutionInputs
from cp_fast.kernels.this_gpu import on_triton
from cp_fast.layers.layer_operators import called, registered
from cp_fast.layers.layers import Layer, Outputs, Run
from cp_fast.layers.linear_plan import HALO, linear_tables
from cp_ref.calls import linear_calls
from cp_ref.calls.layer import public_function

__all__ = [
    "LAYER",
    "ConvolutionKernels",
    "ConvolutionLayer",
    "causal_conv1d",
    "choose_convolution",
]

# ---- the choice of kernels
#
# The interface of what computes a convolution on one rank, and the one place where it is chosen.
#
# legend   n = own rows, a = rows that arrived, s = n + a slots, r = any rows


class ConvolutionKernels(Protocol):
    """Sums are in float32, or in float64 for float64. Each has a fixed order."""

    def forward(self, inputs: ConvolutionInputs) -> torch.Tensor:
        """The result [n, channels], in x's dtype."""
        ...

    def backward(
        self, inputs: ConvolutionInputs, dout: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Given dout [n, channels], the gradients of x from the own rows, of the weight and of the bias, in the dtypes
        of these.
        """
        ...

    def edges_backward(self, inputs: ConvolutionInputs, dout: torch.Tensor, read_by: torch.Tensor) -> torch.Tensor:
        """The gradients of some rows [r, channels] from the own rows, wide.

        read_by: see `HaloTables.edges_read_by`.
        """
        ...


_MOST = 16  # kernel_size: beyond it registers run out, and compiling takes long


def choose_convolution(x: torch.Tensor, kernel_size: int, backend: str) -> ConvolutionKernels:
    """Triton on NVIDIA GPUs from Ampere on. Float64, kernel sizes above 16, other devices, and
    `ContextParallel.backend` "torch" or "cpu" take plain PyTorch.
    """
    given = x.device.type != "cuda" or x.dtype == torch.float64 or kernel_size > _MOST or backend in ("torch", "cpu")
    if given or not on_triton("causal_conv1d"):
        return torch_convolution
    return importlib.import_module("cp_fast.kernels.convolution.triton_convolution")  # pyright: ignore[reportReturnType]


# ---- the layer


class ConvolutionLayer(Layer):
    """A causal convolution: the rows before each fragment arrive, and the gradients of these go back."""

    declared = linear_calls.CONVOLUTION
    tables = staticmethod(linear_tables)
    reads = frozenset({"weight", "bias"})
    hides = True

    def shapes(self, tensors: Sequence[Any], qkv_format: str, options: dict[str, Any]) -> list[torch.Tensor]:
        """That of x."""
        return [tensors[0].new_empty(tensors[0].shape)]

    def forward(self, run: Run, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Outputs:
        """The slice of the result; hidden are the packed rows, and those that arrived."""
        tables, call = run.tables, run.call
        halos, rows = tables.halo(call.kernel_size), tables.rows.take(x)
        (halo,) = run.gather(f"{HALO}{call.kernel_size}", rows)
        inputs = ConvolutionInputs(rows, halo, halos.reads, weight, bias, call.activation is not None)
        kernels = choose_convolution(rows, call.kernel_size, run.cp.backend)
        return (tables.rows.put(kernels.forward(inputs), x),), (rows, halo)

    def backward(self, run: Run, tensors: Any, results: Any, hidden: Any, grads: Any) -> Any:
        """Gradients of x, weight and bias; those of the last two are this rank's share."""
        tables, call, (_, weight, bias), (x, halo), (dout,) = run.tables, run.call, tensors, hidden, grads
        halos, kernels = tables.halo(call.kernel_size), choose_convolution(x, call.kernel_size, run.cp.backend)
        inputs = ConvolutionInputs(x, halo, halos.reads, weight, bias, call.activation is not None)
        dsums = tables.rows.take(dout)
        of_edges = kernels.edges_backward(inputs, dsums, halos.edges_read_by)
        (of_edges,) = run.give_back(f"{HALO}{call.kernel_size}", of_edges)
        dx, dweight, dbias = kernels.backward(inputs, dsums)
        dx.index_copy_(0, halos.edges, of_edges.to(x.dtype))
        return tables.rows.put(dx, dout), dweight, dbias


LAYER = registered(ConvolutionLayer())
causal_conv1d = public_function(linear_calls.causal_conv1d, called, LAYER, __name__)
