"""Linear attention on flash-linear-attention (extra `linear`), on NVIDIA GPUs from Ampere on.

This folder relies on the functions of flash-linear-attention 0.6 that its files import, on the order of their
arguments, and on sums of g in powers of 2 over chunks of 64 rows. They are not a public interface, so another minor
release is refused.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
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
from cp_fast.kernels.this_gpu import NotInstalled, ampere_why_not
from cp_fast.layers.state_tables import StateTables
from cp_ref.calls.linear_calls import LinearKind
from cp_ref.schedules.words import Feature

__all__ = ["FlaKernels"]

_FROM, _BELOW = (0, 6), (0, 7)  # the releases whose source was read; pyproject.toml says the same


class FlaKernels:
    """See `LinearKernels`."""

    name = "fla"
    features = frozenset({Feature.CUDA, Feature.FLOAT16, Feature.BFLOAT16, Feature.HEAD_DIM_OVER_128})
    kinds = frozenset[LinearKind](("gated_delta_rule", "kda", "mamba2"))

    def why_not(self) -> str | None:
        """None if the package works here, else the reason in one line. It imports the package."""
        return ampere_why_not() or _broken()

    def forward(self, inputs: LinearInputs, fragments: FragmentRows) -> ForwardRun:
        return _runs().FORWARD[inputs.kind](inputs, fragments)

    def backward(
        self,
        inputs: LinearInputs,
        fragments: FragmentRows,
        kept: Sequence[torch.Tensor],
        initial: torch.Tensor | None,
        dout: torch.Tensor,
    ) -> BackwardRun:
        return _runs().BACKWARD[inputs.kind](inputs, fragments, kept, initial, dout)

    def compose(
        self, tables: StateTables, maps: Maps, states: torch.Tensor | None, fragments: int, *, transposed: bool
    ) -> torch.Tensor:
        if maps.m.dim() > 2 and maps.m.shape[-1] > _runs().LARGEST:
            return compose_in_waves(tables, maps, states, fragments, transposed=transposed)
        return _runs().states_before(tables.scans, maps, states, fragments, transposed=transposed)


@cache
def _broken() -> str | None:
    """Why the package does not work."""
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return NotInstalled("flash-linear-attention is not installed: pip install 'flash-linear-attention>=0.6,<0.7'")
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if not _FROM <= numbers < _BELOW:
        return f"fla-core is {version}; this needs 0.6"
    try:
        _runs()
    except Exception as error:  # whatever an import of kernels raises
        return f"flash-linear-attention {version} cannot be imported: {type(error).__name__}: {error}"
    return None


@cache
def _runs() -> Any:
    """The module that imports the package."""
    return importlib.import_module("cp_fast.kernels.linear.fla.fla_runs")
