"""A cost model: how long attention takes on a machine, and how much memory, before anything is run there.

machine   kernel rates, bandwidths, latencies and the host's times, as data: TOML (`cp_ref.spec.machine`)
counts    what a rank does in each step, in numbers: from the schedule's tables
memory    the most bytes that a rank holds
predict   counts times a machine's prices; which schedule and layout to take
measure   the machine that this runs on
"""

from __future__ import annotations

from cp_fast.cost.predict import Prediction, candidates, counted, predict, priced, recommended
from cp_ref.spec.machine import Host, Kernel, Link, Machine, Rates, built_in, read_machine

__all__ = [
    "Host",
    "Kernel",
    "Link",
    "Machine",
    "Prediction",
    "Rates",
    "built_in",
    "candidates",
    "counted",
    "predict",
    "priced",
    "read_machine",
    "recommended",
]
