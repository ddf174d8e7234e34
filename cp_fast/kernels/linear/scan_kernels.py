"""Mamba's selective scan on Triton, on NVIDIA GPUs from Ampere on.

The kernels are our own. Those of mamba-ssm take no `cu_seqlens` and no state that enters, so they would need a launch
for each document and another for each rank's share of it. Its wheels are built for single releases of PyTorch and
Python, and need a compiler elsewhere. Flash-linear-attention has no scan whose decay is another for each number of a
state in which many channels share B and C.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from cp_fast.kernels.attention.backend_protocol import NotInstalled, ampere_why_not
from cp_fast.kernels.linear.linear_kernels import (
    BackwardRun,
    ForwardRun,
    FragmentRows,
    Kind,
    LinearInputs,
    Maps,
    compose_in_waves,
)
from cp_fast.layers.state_tables import StateTables
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
    kinds = frozenset[Kind](("mamba",))

    def why_not(self) -> str | None:
        """None if Triton works on this GPU, else the reason in one line."""
        if importlib.util.find_spec("triton") is None:
            return ampere_why_not() or NotInstalled("Triton is not installed: pip install triton")
        return ampere_why_not()

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
