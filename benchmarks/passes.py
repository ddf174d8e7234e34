"""The worth of each compiler pass, on one GPU: all ranks of a simulated group, with and without the pass.

    python -m benchmarks.passes --cp-size 4 --rounds 3 --out passes_1x_h200.csv
    python -m benchmarks.passes --device cpu --scale 64 --rounds 1       # to try it

The ranks of a simulated group run one after the other on one GPU, and their messages are copies. So a time has the
kernels, copies, accumulations and host work of all ranks, and no message over a link: it is what a pass saves in
work, not what it hides. A call is forward and backward. Its time is the wall time of several calls in a row over
their number. Every case is measured in turns: with all passes, without each pass, without all of them; the median of
the rounds is reported. Before that, out, dq, dk and dv of all ranks are compared with those of the plan with all
passes; where they differ, nothing is reported.

`launches` counts the kernel launches of the fullest rank in both passes; `peak_gib` is the most memory that one call
allocated, over all ranks.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import cp_fast
from benchmarks.parts.ranks import Commit, Device, Schedules, passes_of, switched
from cp_fast import masks
from cp_fast.compile.program import Launch
from cp_ref import SimGroup

_MOST = 1e-2  # Relative error.
_SCHEDULES: tuple[str, ...] = ("p2p", "all_gather", "a2a")


@dataclass(frozen=True)
class Case:
    """A problem in thd: documents under a causal mask, or the mask that `areas` makes."""

    name: str
    lengths: tuple[int, ...]
    layout: Any
    schedules: tuple[str, ...] = _SCHEDULES
    window: int = -1
    areas: Callable[[int], torch.Tensor] | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def cases(scale: int) -> list[Case]:
    """The problems, with lengths divided by `scale`."""

    def lengths(*numbers: int) -> tuple[int, ...]:
        return tuple(n // scale for n in numbers)

    prompt, answer = lengths(4096, 1024)
    return [
        Case("one sequence", lengths(32768), "dual_chunk"),
        Case("five documents", lengths(16384, 8192, 4096, 2048, 2048), "balanced"),
        Case("sixteen documents", lengths(*[2048] * 16), "balanced"),
        Case("window 4096", lengths(32768), "dual_chunk", window=4096 // scale),
        Case(
            "a prompt with 28 answers",
            lengths(32768),
            "balanced",
            ("p2p",),
            areas=lambda n: masks.shared_prefix(prompt, [answer] * ((n - prompt) // answer)),
        ),
        Case("block-causal", lengths(32768), "balanced", areas=lambda n: masks.block_causal(n, 2048 // scale)),
        Case(
            "a tree",
            lengths(32768),
            "balanced",
            areas=lambda n: masks.tree(
                [n // 8] + [n // 16] * 6 + [n // 32] * 16, [-1] + [0] * 6 + [1 + i % 6 for i in range(16)]
            ),
        ),
        Case("dilated blocks", lengths(32768), "balanced", areas=lambda n: masks.dilated_blocks(n, 1024 // scale, 4)),
        Case(
            "first tokens and a window",
            lengths(65536),
            "balanced",
            ("p2p", "all_gather"),
            areas=lambda n: masks.first_tokens_and_window(n, 64, 4096 // scale),
        ),
    ]


@dataclass(frozen=True)
class Job:
    """The options of all measurements."""

    cp_size: int
    device: str
    backend: str
    calls: int
    heads_q: int = 32
    heads_kv: int = 8
    dim: int = 128

    def tensors(self, tokens: int) -> dict[str, torch.Tensor]:
        """q, k, v, dout, whole."""
        generator = torch.Generator(device=self.device).manual_seed(0)
        heads = {"q": self.heads_q, "k": self.heads_kv, "v": self.heads_kv, "dout": self.heads_q}
        return {
            name: torch.randn(tokens, n, self.dim, generator=generator, device=self.device).bfloat16()
            for name, n in heads.items()
        }


class Contender:
    """A case on one schedule, with some passes switched off. Its plans are made once."""

    def __init__(self, job: Job, case: Case, schedule: Any, without: str, x: dict[str, torch.Tensor]) -> None:
        self._job, self._case, self._schedule, self._off = job, case, schedule, switched(without)
        self.without = without
        with self._off():
            self._plans = SimGroup(job.cp_size).run(self._plan)
        self._local = [
            {name: self._slice(rank, whole).requires_grad_(name != "dout") for name, whole in x.items()}
            for rank in range(job.cp_size)
        ]

    def _context(self, member: Any) -> cp_fast.ContextParallel:
        return cp_fast.ContextParallel(
            member, self._schedule, layout=self._case.layout, backend=self._job.backend or "auto"
        )

    def _plan(self, member: Any) -> cp_fast.Plan:
        job, case = self._job, self._case
        cu = torch.tensor([sum(case.lengths[:n]) for n in range(len(case.lengths) + 1)], dtype=torch.int32)
        mask: dict[str, Any] = (
            {"attn_mask_type": "padding_causal", "window_size": (case.window, 0)}
            if case.areas is None
            else {"areas": case.areas(case.tokens)}
        )
        return cp_fast.make_plan(
            cp=self._context(member),
            qkv_format="thd",
            cu_seqlens_q=cu,
            heads_q=job.heads_q,
            heads_kv=job.heads_kv,
            d_qk=job.dim,
            d_v=job.dim,
            dtype=torch.bfloat16,
            device=job.device,
            **mask,
        )

    def _slice(self, rank: int, whole: torch.Tensor) -> torch.Tensor:
        plan = self._plans[rank]
        rows = torch.zeros(
            whole.shape[0] // self._job.cp_size, *whole.shape[1:], dtype=whole.dtype, device=whole.device
        )
        for _, start, stop, row in plan.problem.slots.q.of(rank).rows():
            rows[row : row + stop - start] = whole[start:stop]
        return rows

    def run(self, calls: int) -> list[tuple[torch.Tensor, ...]]:
        """Several calls on all ranks; out, dq, dk, dv of the last one, by rank."""

        def on(member: Any) -> tuple[torch.Tensor, ...]:
            cp, plan, local = self._context(member), self._plans[member.rank], self._local[member.rank]
            q, k, v = (local[name] for name in "qkv")
            results: tuple[torch.Tensor, ...] = ()
            for _ in range(calls):
                out = cp_fast.attention(q, k, v, cp=cp, plan=plan)
                results = out.detach(), *torch.autograd.grad(out, (q, k, v), local["dout"])
            return results

        with self._off():
            return SimGroup(self._job.cp_size).run(on)

    def seconds(self) -> float:
        """The wall time of one of several calls in a row."""
        synchronize(self._job.device)
        begin = time.perf_counter()
        self.run(self._job.calls)
        synchronize(self._job.device)
        return (time.perf_counter() - begin) / self._job.calls

    @property
    def launches(self) -> int:
        """Kernel launches of the fullest rank."""
        return max(
            sum(1 for one in (plan.programs.forward, plan.programs.backward) for _ in one.of(Launch))
            for plan in self._plans
        )

    def peak_bytes(self) -> int:
        """Most memory allocated during a call of all ranks, above what was allocated before it; 0 on a CPU."""
        if self._job.device != "cuda":
            return 0
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run(1)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def synchronize(device: str) -> None:
    """Wait for the GPU, if there is one."""
    if device == "cuda":
        torch.cuda.synchronize()


def worst_error(expected: list[tuple[torch.Tensor, ...]], found: list[tuple[torch.Tensor, ...]]) -> float:
    """The largest relative error of out, dq, dk and dv, over the ranks."""
    pairs = [pair for one, other in zip(expected, found, strict=True) for pair in zip(one, other, strict=True)]
    return max(float((y.float() - x.float()).norm() / x.float().norm()) for x, y in pairs)


def measure(job: Job, case: Case, schedule: Any, words: tuple[str, ...], rounds: int) -> list[dict[str, Any]]:
    """The rows of one case on one schedule: all contenders checked, then timed in turns."""
    x = job.tensors(case.tokens)
    contenders = [Contender(job, case, schedule, word, x) for word in words]
    expected = contenders[0].run(2)
    rows = []
    for contender in contenders:
        if not (error := worst_error(expected, contender.run(2))) < _MOST:
            raise SystemExit(f"{case.name}, {schedule} without {contender.without}: relative error {error:.1e}")
        rows.append({"without": contender.without, "launches": contender.launches, "relative_error": f"{error:.1e}"})
    times = [[contender.seconds() for contender in contenders] for _ in range(rounds)]
    for row, column, contender in zip(rows, zip(*times, strict=True), contenders, strict=True):
        row |= {"ms": round(1e3 * statistics.median(column), 3)}
        row |= {"peak_gib": round(contender.peak_bytes() / 2**30, 3)}
    return [{"case": case.name, "layout": case.layout, "schedule": schedule} | row for row in rows]


def main(
    cp_size: Annotated[int, typer.Option(help="Ranks of the simulated group.")] = 4,
    schedules: Schedules = "p2p,all_gather,a2a",
    without: Annotated[str, typer.Option(help="Compiler passes switched off: each, or -, all, names.")] = "each",
    only: Annotated[str, typer.Option(help="The beginning of the names of the cases; all by default.")] = "",
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 3,
    calls: Annotated[int, typer.Option(help="Calls in a row in a round.")] = 3,
    scale: Annotated[int, typer.Option(help="Divides all lengths.")] = 1,
    seconds: Annotated[float, typer.Option(help="No case begins later.")] = 1e9,
    device: Device = "cuda",
    backend: Annotated[str, typer.Option(help="The kernel library; the best one by default.")] = "",
    commit: Commit = "",
    out: Annotated[Path | None, typer.Option(help="CSV file to write, case by case.")] = None,
) -> None:
    """Measure and print."""
    began, rows = time.monotonic(), list[dict[str, Any]]()
    gpu = torch.cuda.get_device_name(0) if device == "cuda" else "none"
    machine = {"gpu": gpu, "torch": torch.__version__, "commit": commit, "cp_size": cp_size}
    words = passes_of(without)
    if words[0] != "-":
        raise typer.BadParameter(f"without is {without!r}; it begins with -, which all others are compared with")
    job = Job(cp_size, device, backend, calls)
    for case, schedule in product(cases(scale), schedules.split(",")):
        if schedule not in case.schedules or not case.name.startswith(only):
            continue
        if time.monotonic() - began > seconds:
            print(f"not reached in {seconds:.0f} s: {case.name}, {schedule}")
            continue
        found = [machine | row for row in measure(job, case, schedule, words, rounds)]
        rows += found
        for row in found:
            print({name: value for name, value in row.items() if name not in machine}, flush=True)
        if out is not None:
            with out.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    typer.run(main)
