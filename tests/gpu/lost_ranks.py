"""A rank that is killed, stopped or raises in the middle of `attention`: how the others end, when, and whom they name.

    python -m tests.gpu.lost_ranks --size 2 --seconds 240 --out lost_ranks_2x.json    # over NCCL, and peer memory
    python -m tests.gpu.lost_ranks --size 2 --device cpu                              # over gloo

Each case is processes of its own, since a watchdog may end them; several cases are played at once, as most of their
time is spent waiting. Whatever the processes do, this ends: they are killed when their time is up. Exit code 1 if a
survivor did not end by itself in time, or went on to a number; 2 if there was no time for all cases.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import cp_fast
from benchmarks.parts.ranks import Commit, Device, JsonOut, connect

FAULTS, PHASES = ("SIGKILL", "SIGSTOP", "exception"), ("forward", "backward")
START_S = 100.0  # for importing, connecting and compiling, until the fault
PATIENCE_S = 25.0  # beyond twice the time-out, for a survivor to end by itself
FAILING = "the fault is at"  # and the time


@dataclass(frozen=True)
class Case:
    """Ranks of which the last is lost, in one phase of a call. `limit`: the group's time-out in seconds."""

    messages: str
    fault: str
    phase: str
    size: int
    device: str
    limit: float


def one_rank(rank: int, folder: str, case: Case) -> None:
    """Two calls; in the second one the last rank is lost."""
    device = connect(rank, case.size, folder, case.device, START_S)
    x = torch.randn(1, 256, 2, 64, dtype=torch.bfloat16, device=device, requires_grad=True)

    def planned(group: Any) -> dict[str, Any]:
        """A plan whose kernels are compiled and whose connections are made."""
        cp = cp_fast.ContextParallel(group)
        sizes: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 64, "d_v": 64, "dtype": torch.bfloat16}
        plan = cp_fast.make_plan(cp=cp, batch_size=1, seqlen_q=256 * case.size, device=device, **sizes)
        cp_fast.attention(x, x, x, cp=cp, plan=plan).sum().backward()
        return {"cp": cp, "plan": plan}

    planned(dist.group.WORLD)
    its = planned(dist.new_group(list(range(case.size)), timeout=timedelta(seconds=case.limit)))

    def fails(phase: str) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        if rank == case.size - 1 and phase == case.phase:
            print(FAILING, time.time(), flush=True)
            if case.fault == "exception":
                raise ZeroDivisionError("in the middle")
            os.kill(os.getpid(), getattr(signal, case.fault))

    fails("forward")
    out = cp_fast.attention(x, x, x, **its)
    fails("backward")
    out.sum().backward()
    assert x.grad is not None
    print("a number:", float(x.grad.float().sum()), flush=True)


class Played:
    """The processes of one case."""

    def __init__(self, case: Case) -> None:
        self.case, self.began, self.failed = case, time.time(), 0.0
        self.folder = tempfile.TemporaryDirectory()
        self.ended: dict[int, float] = {}  # when, by rank
        environment = os.environ | {"CP_FAST_MESSAGES": case.messages, "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}
        environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # else its watchdog collects stacks for a minute and more
        words = json.dumps(vars(case))
        self.ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(case.size):
            command = [sys.executable, "-m", "tests.gpu.lost_ranks", "rank", str(rank), self.folder.name, words]
            with self._file(rank).open("wb") as said:  # no pipe: a helper process may keep it open
                self.ranks.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))

    def _file(self, rank: int) -> Path:
        return Path(self.folder.name) / f"{rank}.txt"

    def over(self) -> bool:
        """Look at the processes: whether all survivors have ended, or are out of time."""
        now, last = time.time(), self.case.size - 1
        for rank, process in enumerate(self.ranks):
            if rank not in self.ended and process.poll() is not None:
                self.ended[rank] = now
        if not self.failed and (found := re.search(rf"{FAILING} ([\d.]+)", self._said(last))):
            self.failed = float(found[1])
        until = self.failed + 2 * self.case.limit + PATIENCE_S if self.failed else self.began + START_S
        return set(range(last)) <= set(self.ended) or now > until

    def _said(self, rank: int) -> str:
        return self._file(rank).read_text(errors="replace")

    def end(self) -> dict[str, Any]:
        """Kill what is left, and say what was seen."""
        lost = self.case.size - 1
        survivors: list[dict[str, Any]] = []
        for rank, process in enumerate(self.ranks):
            code = process.poll()
            process.kill()
            process.wait()
            if rank == lost:
                continue
            text = self._said(rank)
            lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
            named = sorted(set(map(int, re.findall(r"global rank (\d+)", text))) - {rank})
            seconds = round(self.ended[rank] - self.failed, 1) if self.failed and rank in self.ended else None
            words = [line for line in lines if f"global rank {lost}" in line][:2] or lines[-3:]
            right = bool(self.failed) and code not in (None, 0) and "a number:" not in text
            survivors.append(
                {"rank": rank, "exit code": code, "seconds": seconds, "names": named, "right": right, "words": words}
            )
        found = {"lost": lost, "it failed": bool(self.failed), "survivors": survivors}
        found["named by"] = [s["rank"] for s in survivors if lost in s["names"]]
        found["verdict"] = "right" if all(s["right"] for s in survivors) else "wrong"
        if found["verdict"] == "wrong" and not self.failed:
            found["of the lost rank"] = self._said(lost)[-600:]
        self.folder.cleanup()
        return vars(self.case) | found


def play(cases: list[Case]) -> list[dict[str, Any]]:
    """Play cases at once."""
    played = [Played(case) for case in cases]
    while sum(one.over() for one in played) < len(played):
        time.sleep(0.1)
    return [one.end() for one in played]


def main(
    size: Annotated[int, typer.Option(help="Ranks.")] = 2,
    device: Device = "cuda",
    limit: Annotated[float, typer.Option(help="The groups' time-out in seconds.")] = 8.0,
    at_once: Annotated[int, typer.Option(help="Cases that are played at once.")] = 4,
    seconds: Annotated[float, typer.Option(help="When no more cases begin.")] = 240.0,
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """Play every fault in every phase, over each kind of messages."""
    messages = ("peer_memory", "group") if device == "cuda" else ("group",)
    todo = [Case(*what, size, device, limit) for what in product(messages, FAULTS, PHASES)]
    began, found = time.time(), []
    while todo and time.time() < began + seconds:
        some, todo = play(todo[:at_once]), todo[at_once:]
        found += some
        for case in some:
            ends = [f"{s['rank']}: {s['seconds']} s" for s in case["survivors"]]
            what = f"{case['messages']}, {case['fault']}, {case['phase']}"
            typer.echo(f"{what}: {case['verdict']}; survivors ended {ends}, named by {case['named by']}")
        if out is not None:
            gpus = [torch.cuda.get_device_name(n) for n in range(size)] if device == "cuda" else []
            record = {"commit": commit, "gpus": gpus, "torch": torch.__version__, "cases": found}
            out.write_text(json.dumps(record | {"not played": list(map(vars, todo))}, indent=1) + "\n")
    wrong = sum(case["verdict"] != "right" for case in found)
    typer.echo(f"{len(found) - wrong} right, {wrong} WRONG, {len(todo)} NOT PLAYED, {time.time() - began:.0f} s")
    raise typer.Exit(1 if wrong else 2 if todo else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        one_rank(int(sys.argv[2]), sys.argv[3], Case(**json.loads(sys.argv[4])))
    else:
        typer.run(main)
