"""Plans at other costs: head chunks are then chosen always or never, and keys wait always or never."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from cp_fast.compile import chosen_head_chunks, own_keys
from cp_fast.compile.machine import Costs, costs

__all__ = [
    "ALWAYS_CHUNKS",
    "ALWAYS_WAIT",
    "NEVER_CHUNKS",
    "NEVER_WAIT",
    "planned_at",
]

_COSTS = costs()
# Much to hide behind, and chunks for nothing.
ALWAYS_CHUNKS = Costs(1e-3, 1.0, exchange_us=1.0, launch_us=0.0, idle_rows=0.0, host_us=0.0, least_saved=0.0)
NEVER_CHUNKS = replace(_COSTS, launch_us=1e9)
ALWAYS_WAIT = replace(_COSTS, flops_per_us=1e-9, exchange_us=0.0)  # Any computation hides every message.
NEVER_WAIT = replace(_COSTS, flops_per_us=1e30)


@contextmanager
def planned_at(other: Costs) -> Iterator[None]:
    """Inside, plans are made as if a machine had these costs."""
    with patch.object(chosen_head_chunks, "costs", lambda: other), patch.object(own_keys, "costs", lambda: other):
        yield
