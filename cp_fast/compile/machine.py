"""A machine as data: the speeds of its kernels, copies and links, and the times of its host. Standard library alone.

A machine is read from and written to TOML; `machines/` has those that are built in, by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

from cp_ref.schedules.problem import Problem
from cp_ref.schedules.values import parse_toml

__all__ = [
    "Costs",
    "Host",
    "Kernel",
    "Link",
    "Machine",
    "Rates",
    "built_in",
    "costs",
    "read_machine",
]

_BUILT_IN = Path(__file__).parent / "machines"
_LIKE = {"float16": "bfloat16"}  # has the rates of

Made = TypeVar("Made")


@dataclass(frozen=True)
class Kernel:
    """One pass of an attention kernel: launch_us + flops / tflops, of the visible pairs and `edge` more keys for every
    query row.

    Attributes:
        tflops: TFLOP/s in the limit of long rows; 4 operations a pair, head and mean head dim forward, 10 backward.
        edge: the extra keys that a query row costs: for blocks that the mask cuts, and for work done once per row.
            Short sequences are slow by it: rows that see n keys run at n / (n + edge) of the rate.
        launch_us: microseconds of a launch that do not depend on its size.
    """

    tflops: float
    edge: float
    launch_us: float


@dataclass(frozen=True)
class Rates:
    """Both passes of the kernels for one pair of head dims in one dtype."""

    d_qk: int
    d_v: int
    dtype: str
    forward: Kernel
    backward: Kernel


@dataclass(frozen=True)
class Link:
    """A way for messages.

    Attributes:
        gbytes_s: GB/s of one rank, in each direction at once.
        latency_us: microseconds from a step's begin until its first message has come, without its bytes.
        slows: the share of a message's time that concurrent kernels lose; 0 for copy engines.
    """

    gbytes_s: float
    latency_us: float
    slows: float


@dataclass(frozen=True)
class Host:
    """The host's time to launch one pass: microseconds per pass, step, kernel launch and tensor of a message."""

    pass_us: float
    step_us: float
    launch_us: float
    tensor_us: float


@dataclass(frozen=True)
class Machine:
    """GPUs in domains, within which every GPU reaches every other by NVLink; domains on a network.

    Attributes:
        name, source: the machine, and the source of its numbers.
        domain: GPUs of a domain; ranks are numbered domain by domain.
        copy_gbytes_s: bytes that packing and adding read and write, GB/s.
        step_us: microseconds of a step on the GPU that are neither kernels nor bytes: waits, and small kernels.
        peer_memory, group: inside a domain, bytes pulled by copy engines (`cp_fast.transport`), and the process group's
            messages.
        network: the process group's messages between domains.
        host: see `Host`.
        kernels: by head dims and dtype.
    """

    name: str
    source: str
    domain: int
    copy_gbytes_s: float
    step_us: float
    peer_memory: Link
    group: Link
    network: Link
    host: Host
    kernels: tuple[Rates, ...]

    def rates(self, problem: Problem) -> Rates:
        """The rates for a problem's dtype, and of its head dims or the nearest ones.

        Raises:
            ValueError: no kernel of this dtype has been measured.
        """
        dtype = _LIKE.get(problem.dtype, problem.dtype)
        found = [rates for rates in self.kernels if rates.dtype == dtype]
        if not found:
            known = ", ".join(sorted({rates.dtype for rates in self.kernels}))
            raise ValueError(f"dtype is {problem.dtype!r}; machine {self.name!r} has rates of kernels for {known}")
        return min(found, key=lambda rates: abs(rates.d_qk - problem.d_qk) + abs(rates.d_v - problem.d_v))

    def __str__(self) -> str:
        """As TOML, which `read_machine` reads."""
        return "\n".join(_lines(asdict(self), "")) + "\n"


def built_in() -> list[str]:
    """The names of the machines that come along.

    >>> "h200-nvlink" in built_in()
    True
    """
    return sorted(path.stem for path in _BUILT_IN.glob("*.toml"))


def read_machine(name: str | Path) -> Machine:
    """A machine that is built in, by its name, or one from a TOML file.

    Raises:
        ValueError: it is neither, or a field is missing, unknown or no number above 0 (0 is a number for `slows`,
            `edge` and times).
    """
    path = _BUILT_IN / f"{name}.toml" if name in built_in() else Path(name)
    if not path.is_file():
        raise ValueError(f"machine is {str(name)!r}; it must be one of {', '.join(built_in())}, or a TOML file")
    try:
        return _read(Machine, parse_toml(path.read_text(encoding="utf-8")), "")
    except (ValueError, TypeError) as error:
        raise ValueError(f"machine {path}: {error}") from error


def _read(cls: type[Made], given: Any, where: str) -> Made:
    """A dataclass from a TOML table; fields that are dataclasses are tables, a tuple of them is an array."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{where or 'it'} is {given!r}; it must be a table")
    given = cast(Mapping[str, Any], given)
    hints = get_type_hints(cls)
    if wrong := set(given) ^ set(hints):
        raise ValueError(f"{where}{sorted(wrong)[0]} is {'unknown' if sorted(wrong)[0] in given else 'missing'}")
    return cls(**{name: _value(kind, given[name], where + name) for name, kind in hints.items()})


def _value(kind: Any, given: Any, where: str) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return _read(kind, given, f"{where}.")
    if args := get_args(kind):  # a tuple of dataclasses
        if not isinstance(given, list) or not given:
            raise ValueError(f"{where} is {given!r}; it must be an array of tables")
        return tuple(_read(args[0], one, f"{where}[{n}].") for n, one in enumerate(cast(list[Any], given)))
    if kind is str and isinstance(given, str):
        return given
    if kind is str:
        raise ValueError(f"{where} is {given!r}; it must be a string")
    may_be_0 = where.endswith(("_us", "slows", "edge"))
    numbers = (int,) if kind is int else (int, float)
    if isinstance(given, bool) or not isinstance(given, numbers) or not 0 <= given < inf or not (given or may_be_0):
        what = "an integer" if kind is int else "a number"
        raise ValueError(f"{where} is {given!r}; it must be {what} {'from' if may_be_0 else 'above'} 0")
    return cast(float, kind(given))


def _lines(table: Mapping[str, Any], where: str) -> list[str]:
    """A table's values, then the tables inside it."""
    values = [f"{name} = {_text(value)}" for name, value in table.items() if isinstance(value, str | int | float)]
    for name, value in table.items():
        if isinstance(value, dict):
            values += ["", f"[{where}{name}]", *_lines(cast(dict[str, Any], value), f"{where}{name}.")]
        elif isinstance(value, tuple):
            for one in cast(tuple[dict[str, Any], ...], value):
                values += ["", f"[[{where}{name}]]", *_lines(one, f"{where}{name}.")]
    return values


def _text(value: str | float) -> str:
    return json.dumps(value) if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else str(value)


# ---- The costs by which schedules are chosen
#
# The costs by which schedules are chosen: a few numbers of one machine, the same on every rank.


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
        least_saved: the share of the time that a cut has to save: an estimate is not better than that.
    """

    flops_per_us: float
    bytes_per_us: float
    exchange_us: float
    launch_us: float
    idle_rows: float
    host_us: float
    least_saved: float = 0.005


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
