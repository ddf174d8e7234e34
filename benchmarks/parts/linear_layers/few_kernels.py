"""cp_fast with a process for each rank, for random linear layers: see `use_few_kernels`."""

from __future__ import annotations

from benchmarks.parts.linear_layers.tuning import use_few_kernels
from conformance.adapters.cp_fast import processes

__all__ = ["processes"]

use_few_kernels()
