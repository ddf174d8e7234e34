"""A cost model: predicts attention's time and memory on a machine before a run.

machine   kernel rates, bandwidths, latencies and the host's times, as data: TOML (`cp_fast.compile.planning.machine`)
counts    the work of a rank in each step: the counted instructions of its plan.
memory    the peak bytes of a rank.
predict   counts times a machine's prices; the best schedule and layout.
measure   measures this machine.
"""

from __future__ import annotations

from cp_fast.compile.planning.machine import Host, Kernel, Link, Machine, Rates, built_in, read_machine
from cp_fast.tools.cost.predict import Prediction, candidates, counted, predict, priced, recommended

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
