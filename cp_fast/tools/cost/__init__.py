"""A cost model: predicts attention's time and memory on a machine before a run.

- machine           kernel rates, bandwidths, latencies, the host's times: data (`cp_fast.compile.machine`).
- pass_bytes        rows and bytes of the buffers of a plan.
- counts            the work of a rank in each step: the counted instructions of its plan.
- predicted_memory  the peak bytes of a rank in a call.
- step_memory       the peak bytes of a rank in a training step.
- predict           counts times a machine's prices.
- candidates        a problem in every layout and schedule.
- measure_machine   measures this machine.
"""

from __future__ import annotations

from cp_fast.compile.machine import Host, Kernel, Link, Machine, Rates, built_in, read_machine
from cp_fast.tools.cost.candidates import candidates
from cp_fast.tools.cost.predict import Prediction, counted, predict, priced, recommended

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
