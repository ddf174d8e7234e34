"""The host's time of a pass of `attention`, and of each part of it.

    python -m benchmarks.planning.host_time --out benchmarks/results/host_time_1x_h200.csv
    python -m benchmarks.planning.host_time --device cpu    # one rank without peers, and kernels that only allocate

Ranks are processes that share a GPU and its peer memory. Their messages and kernels are slow there, so a few calls are
made in a row, and then everybody waits for the GPU: the host does not. Medians over the calls of rank 0, microseconds.
The backward pass runs in the thread of the forward pass. This thread has a core of its own, and the processors that
share the core are idle where the machine has enough.

    whole       a pass, with no clock inside: `processor_us` of its thread, `us` by the clock
    engine      a backward pass in autograd's own thread, as training runs it
    edge        the checks of arguments, and autograd: all that lies around the pass itself
    format      between the user's format and packed rows
    loop        the rest of the pass: its results, and the loop over the operations

All other parts are the operations, by name. `library` lies within `launch`, `messages` within `post`. Parts are
measured in other calls than the whole: a clock around each takes time too.
"""

from __future__ import annotations

import csv
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import typer
from torch.multiprocessing.spawn import spawn

import cp_fast
from benchmarks.parts.ranks import Commit, Device, Schedules, connect
from cp_fast.api import attention
from cp_fast.api.calls import compile_call
from cp_fast.compile.packing import Packing
from cp_fast.kernels.attention.fa4.fa4_recorded import Launches
from cp_fast.transport import memory_group
from cp_fast.transport.peer_exchange import _Pulls  # pyright: ignore[reportPrivateUsage]

HEADS, DIM, SIZE = (32, 8), 128, 2
CASES: dict[str, tuple[Any, list[int]]] = {  # Layout, and lengths.
    "one sequence, 4,096 a rank": ("dual_chunk", [4096 * SIZE]),
    "sixteen documents": (
        "balanced",
        [1024, 512, 2048, 256, 4096, 1024, 512, 8192, 256, 2048, 512, 1024, 64, 2048, 4096, 5056],
    ),
}
_IN_A_ROW = 4  # Calls, before everybody waits for the GPU.
_NESTED = ("library", "messages")
Spent = dict[
    tuple[str, str], list[tuple[float, float]]
]  # By pass and part: microseconds of the thread, and by the clock.


class Call(NamedTuple):
    """The arguments of a rank's calls."""

    cp: cp_fast.ContextParallel
    plan: cp_fast.Plan
    qkv: list[torch.Tensor]
    dout: torch.Tensor

    def forward(self) -> torch.Tensor:
        return cp_fast.attention(*self.qkv, cp=self.cp, plan=self.plan)

    def backward(self, out: torch.Tensor) -> Any:
        return torch.autograd.grad(out, self.qkv, self.dout)


def main(
    device: Device = "cuda",
    schedules: Schedules = "p2p,all_gather,a2a",
    rounds: Annotated[int, typer.Option(help="Of a few calls each.")] = 25,
    commit: Commit = "",
    out: Annotated[Path | None, typer.Option(help="CSV file to write.")] = None,
) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        file = out or Path(folder) / "rows.csv"
        job = folder, device, schedules.split(","), rounds, commit, file
        if device == "cuda":
            spawn(_rank, job, nprocs=SIZE)
        else:
            _rank(0, *job)
        print(file.read_text(encoding="utf-8"))


def _rank(rank: int, folder: str, device: str, schedules: list[str], rounds: int, commit: str, out: Path) -> None:
    """Everything that a process does."""
    torch.set_num_threads(1)
    if device == "cuda":
        memory_group.why_not = lambda: None  # Ranks that share a GPU reach its memory.
        own, others = cores_of(rank)
        os.sched_setaffinity(0, others)  # Of the threads that begin from here on.
        connect(rank, SIZE, folder, seconds=120)
        os.sched_setaffinity(0, {own})
    rows: list[dict[str, Any]] = []
    for case, (layout, lengths) in CASES.items():
        for schedule in schedules:
            call = (_on_gpu if device == "cuda" else _on_cpu)(schedule, layout, lengths)
            for (direction, part), times in measured(call, rounds).items():
                processor, clock = (round(statistics.median(some), 1) for some in zip(*times, strict=True))
                known = part == "whole"  # Of the others, not all is in this thread, or it has no such clock.
                name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
                rows.append({"device": name, "commit": commit, "case": case, "schedule": schedule})
                rows[-1] |= {"pass": direction, "part": part, "us": clock, "processor_us": processor if known else ""}
    if device == "cuda":
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def cores_of(rank: int) -> tuple[int, set[int]]:
    """The processor of a rank's main thread, and those of all other threads. They share no core if possible."""
    allowed = os.sched_getaffinity(0)
    free, own = sorted(allowed), list[int]()
    for _ in range(SIZE):
        own.append(free[-1])
        taken = _neighbours(own[-1])
        free = [core for core in free if core not in taken] or sorted(allowed)
    return own[rank], set(free)


def _neighbours(core: int) -> set[int]:
    """The processors that share a core with this one, itself included, as Linux says."""
    file = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    if not file.exists():
        return {core}
    ends = [[int(n) for n in part.split("-")] for part in file.read_text().strip().split(",")]
    return {n for first, *last in ends for n in range(first, (last or [first])[0] + 1)}


def _on_gpu(schedule: Any, layout: Any, lengths: list[int]) -> Call:
    cp = cp_fast.ContextParallel(dist.group.WORLD, schedule, layout=layout)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    how: dict[str, Any] = {"heads_q": HEADS[0], "heads_kv": HEADS[1], "d_qk": DIM, "d_v": DIM, "dtype": torch.bfloat16}
    plan = cp_fast.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=ends, device="cuda", **how)
    rows, heads = sum(lengths) // SIZE, (*HEADS, HEADS[1], HEADS[0])
    q, k, v, dout = (torch.randn(rows, n, DIM, dtype=torch.bfloat16, device="cuda") for n in heads)
    return Call(cp, plan, [x.requires_grad_() for x in (q, k, v)], dout)


def _on_cpu(schedule: Any, layout: Any, lengths: list[int]) -> Call:
    from tests.cp_fast.memory.one_rank import arguments_of

    return Call(*arguments_of(schedule, SIZE, 0, (8, 2), 32, [n // 64 * 2 for n in lengths], layout))


def measured(call: Call, rounds: int) -> Spent:
    """All parts of both passes."""
    for _ in range(3):
        play(call, 1)
    with torch.autograd.set_multithreading_enabled(False):
        spent = play(call, rounds)
        with clocks(call) as clock:
            play(call, rounds, clock)
    spent["backward", "engine"] = play(call, rounds)["backward", "whole"]
    return spent | clock.spent


def play(call: Call, rounds: int, clock: Clock | None = None) -> Spent:
    """The time of whole passes."""
    spent: Spent = defaultdict(list)

    def timed(direction: str, act: Callable[[], Any]) -> Any:
        begin, begun = time.perf_counter(), time.thread_time()
        result = act()
        used, took = time.thread_time() - begun, time.perf_counter() - begin
        spent[direction, "whole"].append((1e6 * used, 1e6 * took))
        if clock is not None:
            clock.end(direction, took)
        return result

    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        outs = [timed("forward", call.forward) for _ in range(_IN_A_ROW)]
        for out in outs:
            timed("backward", lambda out=out: call.backward(out))
    return spent


class Clock:
    """The time of each part of a pass."""

    def __init__(self) -> None:
        self.spent: Spent = defaultdict(list)
        self._now: dict[str, float] = defaultdict(float)

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its time added to a part."""

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments, **named)
            self._now[part] += time.perf_counter() - begin
            return result

        return timed

    def end(self, direction: str, took: float) -> None:
        """A pass has ended after this time."""
        now, inside = self._now, self._now.pop("inside")
        now["edge"] = took - inside
        now["loop"] = inside - sum(t for part, t in now.items() if part not in ("edge", *_NESTED))
        for part, seconds in now.items():
            self.spent[direction, part].append((0.0, 1e6 * seconds))
        self._now = defaultdict(float)


@contextmanager
def clocks(call: Call) -> Iterator[Clock]:
    """A clock around each part of the calls."""
    clock, compiled = Clock(), compile_call(call.plan, call.cp, *call.qkv)
    with ExitStack() as stack:

        def watch(owner: Any, name: str, part: str) -> None:
            stack.enter_context(patch.object(owner, name, clock.around(part, getattr(owner, name))))

        for operations in compiled._operations.values():  # pyright: ignore[reportPrivateUsage]
            for n, operation in enumerate(operations):
                stack.callback(operations.__setitem__, n, operation)
                operations[n] = clock.around(operation.__name__, operation)
        for name in ("forward_pass", "backward_pass"):
            watch(attention, name, "inside")
        for name in ("pack", "unpack", "pack_lse", "unpack_lse"):
            watch(Packing, name, "format")
        watch(Launches, "__call__", "library")
        watch(_Pulls, "post", "messages")
        yield clock


if __name__ == "__main__":
    typer.run(main)
