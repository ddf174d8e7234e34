"""The costs by which schedules are chosen: a few numbers of one machine, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from cp_fast.compile.planning.machine import read_machine

__all__ = ["Costs", "costs"]


@dataclass(frozen=True)
class Costs:
    """Rates and times for 16-bit operands.

    Attributes:
        flops_per_us: of attention kernels.
        bytes_per_us: of a rank's messages, each way.
        exchange_us: an exchange, without its bytes.
        launch_us: a launch and its step, without the flops.
        idle_rows: the query rows that could be attended to in the time that a launch loses at its end.
        host_us: the host, for a step.
        least_gain: the share of the time that a cut has to save: an estimate is not better than that.
    """

    flops_per_us: float
    bytes_per_us: float
    exchange_us: float
    launch_us: float
    idle_rows: float
    host_us: float
    least_gain: float = 0.005


@cache
def costs() -> Costs:
    """The costs on the H200s of a domain. They are used on every machine, so all ranks choose the same schedule.

    Kernels are those of the first head dims, as the mean of both passes. Messages are the process group's, the slower
    ones. A launch ends with half a wave of tiles of 128 rows on 132 multiprocessors. The host's time is doubled, so
    that chunks that gain little are not made.

    >>> costs().exchange_us, costs().bytes_per_us
    (30.0, 340000.0)
    """
    machine = read_machine("h200-nvlink")
    forward, backward = machine.kernels[0].forward, machine.kernels[0].backward
    tflops = 3.5 / (1 / forward.tflops + 2.5 / backward.tflops)
    launch_us = machine.step_us + forward.launch_us
    link, host_us = machine.group, 2 * machine.host.step_us
    return Costs(1e6 * tflops, 1e3 * link.gbytes_s, link.latency_us, launch_us, 128 * 132 / 2, host_us)
