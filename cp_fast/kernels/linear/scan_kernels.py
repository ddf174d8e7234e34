"""Mamba's selective scan on Triton, on NVIDIA GPUs from Ampere on.

The kernels are our own. The scan of mamba-ssm takes no state that enters, and its backward pass leaves the gradient of
the last state out: the two that ranks exchange. Its tensors lie channel by channel, so that all rows would have to be
transposed before and after it. Its wheels are compiled for single releases of PyTorch and Python.
Flash-linear-attention's layer of Mamba calls mamba-ssm.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from cp_fast.kernels.linear.linear_kernels import (
    BackwardRun,
    ForwardRun,
    FragmentRows,
    LinearInputs,
    Maps,
    compose_in_waves,
)
from cp_fast.kernels.this_gpu import triton_why_not
from cp_fast.layers.state_tables import StateTables
from cp_ref.calls.linear_calls import LinearKind
from cp_ref.schedules.words import Feature

__all__ = ["ScanKernels"]


class ScanKernels:
    """See `LinearKernels`."""

    name = "triton"
    features = frozenset(
        {
            Feature.CUDA,
            Feature.FLOAT16,
            Feature.BFLOAT16,
            Feature.FLOAT32,
            Feature.HEAD_DIM_OVER_128,
            Feature.HEAD_DIM_OVER_256,
            Feature.HEAD_DIM_ODD,
        }
    )
    kinds = frozenset[LinearKind](("mamba",))

    def why_not(self) -> str | None:
        """None if Triton works on this GPU, else the reason in one line."""
        return triton_why_not()

    def forward(self, inputs: LinearInputs, fragments: FragmentRows) -> ForwardRun:
        return _runs().ScanForward(inputs, fragments)

    def backward(
        self,
        inputs: LinearInputs,
        fragments: FragmentRows,
        kept: Sequence[torch.Tensor],
        initial: torch.Tensor | None,
        dout: torch.Tensor,
    ) -> BackwardRun:
        return _runs().ScanBackward(inputs, fragments, initial, dout)

    def compose(
        self, tables: StateTables, maps: Maps, states: torch.Tensor | None, fragments: int, *, transposed: bool
    ) -> torch.Tensor:
        return compose_in_waves(tables, maps, states, fragments, transposed=transposed)


@cache
def _runs() -> Any:
    """The module that imports Triton."""
    return importlib.import_module("cp_fast.kernels.linear.triton_scan")
