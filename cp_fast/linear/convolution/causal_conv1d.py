"""`causal_conv1d`: a short convolution of a hybrid model, on the slices of attention."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, Protocol

import torch

from cp_fast.api.checked_calls import agree_on_backward, layer_call
from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan import Plan, messages_of
from cp_fast.backends.backend_protocol import on_triton
from cp_fast.dispatch.handles import hide_from_checkpointing, outside_of_graphs
from cp_fast.linear.convolution import torch_convolution
from cp_fast.linear.convolution.halo_tables import HaloMessage, HaloTables
from cp_fast.linear.convolution.torch_convolution import ConvolutionInputs
from cp_fast.linear.linear_plan import LinearTables, linear_tables
from cp_fast.runtime.prepared_exchange import Exchanges
from cp_ref.contract import linear_calls
from cp_ref.contract.call_checks import check_context
from cp_ref.contract.declared import implements
from cp_ref.contract.group import Group, Parcel
from cp_ref.contract.linear_calls import ConvolutionCall, read_convolution
from cp_ref.contract.tensors import autocast, differentiable_once, no_autocast, refuse_transforms

__all__ = [
    "ConvolutionKernels",
    "causal_conv1d",
    "choose_convolution",
    "exchange_gradients",
    "exchange_rows",
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
    return importlib.import_module("cp_fast.linear.convolution.triton_convolution")  # pyright: ignore[reportReturnType]


# ---- messages
#
# The messages of a causal convolution: rows before fragments in the forward pass, their gradients in the backward.


def exchange_rows(tables: HaloTables, exchanges: Exchanges, group: Group, x: torch.Tensor) -> torch.Tensor:
    """The rows that arrive [arriving, channels], given the own rows x [n, channels]."""
    halo = x.new_empty(tables.arriving, x.shape[1])
    for sends, recvs in tables.forward:
        out = [Parcel(send.peer, send.tag, _taken(send, x, halo)) for send in sends]
        back = [Parcel(recv.peer, recv.tag, halo[recv.start : recv.stop]) for recv in recvs]
        exchanges.post(group, "rows of a convolution, forward", out, back).wait()
    return halo


def _taken(send: HaloMessage, x: torch.Tensor, halo: torch.Tensor) -> torch.Tensor:
    """The rows of a message. A pair of groups forwards rows that arrived before."""
    if not len(send.forwarded):
        return x.index_select(0, send.own)
    rows = halo.index_select(0, send.forwarded)
    if send.order is None:
        return rows
    return torch.cat([x.index_select(0, send.own), rows]).index_select(0, send.order)


def exchange_gradients(tables: HaloTables, exchanges: Exchanges, group: Group, edges: torch.Tensor) -> None:
    """Add up what the ranks have of the gradients of the rows in `HaloTables.edges_read_by`, in place."""
    for sends, recvs in tables.backward:
        arriving = [edges.new_empty(len(recv.numbers), edges.shape[1]) for recv in recvs]
        out = [Parcel(send.peer, send.tag, edges.index_select(0, send.numbers)) for send in sends]
        back = [Parcel(recv.peer, recv.tag, rows) for recv, rows in zip(recvs, arriving, strict=True)]
        exchanges.post(group, "rows of a convolution, backward", out, back).wait()
        for recv, rows in zip(recvs, arriving, strict=True):
            edges[recv.numbers] += rows


# ---- the layer


@implements(linear_calls.causal_conv1d)
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    cp: ContextParallel,
    plan: Plan,
    activation: str | None,
) -> torch.Tensor:
    check_context(cp, ContextParallel)
    if torch.compiler.is_compiling():
        return outside_of_graphs(causal_conv1d, x, weight, bias, cp=cp, plan=plan, activation=activation)
    refuse_transforms()
    x = autocast(x)
    read = partial(read_convolution, cp, plan, Plan, x, weight, bias, activation)
    call, number = layer_call(cp, plan, "causal_conv1d", [activation], (x, weight, bias), read)
    return Convolution.apply(plan, cp, call, number, x, weight, bias)


class Convolution(torch.autograd.Function):
    """From x, weight and bias to the slice of the result."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        cp: ContextParallel,
        call: ConvolutionCall,
        number: int,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        tables = linear_tables(plan)
        with hide_from_checkpointing(), cp.naming_errors("causal_conv1d, forward"), no_autocast(x.device):
            halos, rows = tables.halo(call.kernel_size), tables.rows.take(x.detach())
            halo = exchange_rows(halos, tables.exchanges, messages_of(plan, cp.comm), rows)
            inputs = ConvolutionInputs(rows, halo, halos.reads, weight, bias, call.activation is not None)
            kernels = choose_convolution(rows, call.kernel_size, cp.backend)
            out = tables.rows.put(kernels.forward(inputs), x)
        ctx.save_for_backward(rows, halo, weight, bias)
        ctx.plan, ctx.tables, ctx.cp, ctx.call, ctx.number = plan, tables, cp, call, number
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        tables: LinearTables = ctx.tables
        agree_on_backward(ctx, "causal_conv1d, backward")
        x, halo, weight, bias = ctx.saved_tensors
        with hide_from_checkpointing(), ctx.cp.naming_errors("causal_conv1d, backward"), no_autocast(x.device):
            size = ctx.call.kernel_size
            halos, kernels = tables.halo(size), choose_convolution(x, size, ctx.cp.backend)
            inputs = ConvolutionInputs(x, halo, halos.reads, weight, bias, ctx.call.activation is not None)
            grads = tables.rows.take(dout)
            edges = kernels.edges_backward(inputs, grads, halos.edges_read_by)
            exchange_gradients(halos, tables.exchanges, messages_of(ctx.plan, ctx.cp.comm), edges)
            dx, dweight, dbias = kernels.backward(inputs, grads)
            dx.index_copy_(0, halos.edges, edges[: len(halos.edges)].to(x.dtype))
            dx = tables.rows.put(dx, dout)
        return None, None, None, None, dx, dweight, dbias
