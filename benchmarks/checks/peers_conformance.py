"""The conformance suite on other libraries, over 2 (or 4) processes: with a GPU for each, or sharing those that there
are, over NCCL, or on the CPU over gloo.

    python -m benchmarks.checks.peers_conformance --device cuda --minutes 2.5 --out benchmarks/results
    python -m benchmarks.checks.peers_conformance --only yunchang --ranks 4 --minutes 2.5 --out benchmarks/results
    python -m benchmarks.checks.peers_conformance --only yunchang --device cpu --minutes 1 --out /tmp

Each object of each adapter has its own driver, and all drivers play at once. Each library gets one file,
`peers_NAME_DEVICE.json` (for 4 ranks `peers_NAME_DEVICE_4.json`). It has the verdicts by tier, the refusals with their
reasons, and each failing problem, shrunk, with the command that plays it again. Exit code 1 if a driver died.
"""

from __future__ import annotations

import collections
import json
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from conformance.case import Case
from conformance.implementation import LoadError
from conformance.record import FAILING, Played, TierResult, replay_command
from conformance.runner.play_problem import Pairs, Task
from conformance.runner.run_tiers import PROFILES
from conformance.runner.suite_run import SuiteRun, describe_run
from conformance.runner.workers import WorkerRunner
from cp_ref.schedules.problem import Problem, Sequence

PEERS = {
    "pytorch": ("flash", "efficient", "cudnn", "chosen"),
    "ring_flash_attn": ("documented", "accepted", "stripe"),
    "yunchang": ("fa", "accepted"),
    "transformer_engine": ("fused", "flash"),
    "magi_attention": ("bf16", "sdpa", "accepted"),
}
# what is played first, since what is drawn from a plain problem misses what does not go with it
SHAPES = (
    {"layout": "dual_chunk", "attn_mask_type": "causal"},
    {"layout": "contiguous", "attn_mask_type": "causal"},
    {"layout": "contiguous", "attn_mask_type": "no_mask"},
    {"layout": "contiguous", "attn_mask_type": "no_mask", "lengths": (128, 256)},
    {"layout": "dual_chunk", "qkv_format": "thd", "attn_mask_type": "padding_causal"},
    {"layout": "contiguous", "qkv_format": "thd", "attn_mask_type": "padding_causal"},
    {"layout": "contiguous", "qkv_format": "thd", "attn_mask_type": "padding"},
    {"layout": "contiguous", "qkv_format": "thd", "areas": ((0, 9, 0, 9, -1, 0), (0, 8, 1, 9, 0, -1))},  # no pair twice
)
CHANGES = (
    {},
    {"heads_q": 8},
    {"dtype": "float16"},
    {"dtype": "float32"},
    {"window_size": (40, -1)},
    {"d_v": 32},
    {"d_qk": 36, "d_v": 36},
)
TIERS = "probes,budget,logic,hygiene,determinism,torch,metamorphic,special,errors,known"


def table(ranks: int, changes: int) -> list[tuple[str, str]]:
    """(tier, case) of every shape with each of the first changes, under every schedule."""
    found = []
    ways = {"p2p": 1, "all_gather": 1, "a2a": ranks} | ({"a2a+p2p": 2} if ranks == 4 else {})
    for change, (comm, a2a_size), shape in product(CHANGES[:changes], ways.items(), SHAPES):
        fields: dict[str, Any] = {"heads_q": ranks, "heads_kv": ranks, "d_qk": 64, "d_v": 64, "dtype": "bfloat16"}
        fields |= {**shape, **change, "cp_comm_type": comm, "a2a_size": a2a_size}
        lengths = fields.pop("lengths", (256, 256))
        more = (128, 128) if "qkv_format" in shape else lengths
        sequences = tuple(Sequence(q, kv, q, kv) for q, kv in (lengths, more))
        case = str(Case(Problem(ranks, sequences, **fields)))
        found += [("probes", case), ("logic" if fields["dtype"] == "float32" else "budget", case)]
        if "d_qk" in change and comm == "p2p":
            found.append(("budget", case[:-1] + ', grads="")'))  # whose backward pass may fail, and hide the forward's
    return found


class Peers(WorkerRunner):
    """Processes are kept after a problem that all ranks finished, or none for the same reason: then no message is left,
    over NCCL neither. When the time is up nothing more is played.
    """

    until = float("inf")
    aligned = False  # whether problems with odd strides are played with plain ones: their kernels end the process

    def play(self, task: Task) -> Played:
        task = replace(task, text=task.text.replace(", strided=True", "")) if self.aligned else task
        if time.time() > self.until:
            return Played(task.level, task.tier, task.text, "missing", ("no time is left",))
        played = self._play(task)
        if played.verdict in FAILING and not _alike(played, self._size or 1):
            self.close()
        return played

    def pairs(self, case: str) -> Pairs | None:
        return None


def _alike(played: Played, ranks: int) -> bool:
    """Whether every rank returned, or every rank raised the same."""
    raised = [finding.partition(" raised ")[2] for finding in played.findings if " raised " in finding]
    same = not raised or (len(raised) == ranks and len(set(raised)) == 1 and "CUDA error" not in raised[0])
    return same and played.verdict == "wrong"


def one(
    impl: str, device: str, ranks: int, tiers: tuple[str, ...], examples: int, changes: int, until: float, out: Path
) -> None:
    """Play one implementation until the time is up, and write what was seen after every tier."""
    torch.set_num_threads(1)
    profile = replace(PROFILES["quick"], max_examples=examples, most_failures=4, shrink_s=12.0)
    record: dict[str, Any] = {"impl": impl, "ranks": ranks, "tiers": {}, "refused": {}, "failures": []}
    runner = Peers(impl, device, 60.0, ranks)  # some libraries compile at their first calls
    runner.until, runner.aligned = until, device == "cuda"
    with closing(runner):
        try:
            suite_run = SuiteRun(runner, profile, tiers, (ranks,), device)
            record["meta"] = describe_run(impl, "peers", suite_run)
            record["refused"] = suite_run.capabilities.refused
            record["supported"] = {axis: list(found) for axis, found in suite_run.capabilities.choices.items()}
            played = [runner.play(Task("schedule", tier, case)) for tier, case in table(ranks, changes)]
            _note(record, TierResult("table", played), impl, device)
            out.write_text(json.dumps(record, indent=1) + "\n")
            for tier in tiers:
                if time.time() < until:
                    (result,) = SuiteRun(runner, profile, (tier,), (ranks,), device).results()
                    _note(record, result, impl, device)
                out.write_text(json.dumps(record, indent=1) + "\n")
        except (LoadError, ValueError) as error:
            record["failures"].append({"tier": "load", "findings": [str(error)]})
    out.write_text(json.dumps(record, indent=1) + "\n")


def _note(record: dict[str, Any], result: TierResult, impl: str, device: str) -> None:
    played = [p for p in result.drawn if p.findings != ("no time is left",)]
    record["tiers"][result.tier] = dict(collections.Counter(p.verdict for p in played))
    record["tiers"][result.tier]["seconds"] = round(result.seconds, 1)
    for p in result.smallest:
        failure = {"tier": p.tier, "verdict": p.verdict, "text": p.text, "findings": [*p.findings[:6]]}
        failure["command"] = replay_command({"impl": impl, "device": device}, p) + f" --cp-size {record['ranks']}"
        record["failures"].append(failure)


def main(
    only: Annotated[str, typer.Option(help="Libraries, with commas.")] = ",".join(PEERS),
    device: Annotated[str, typer.Option(help="cuda, or cpu.")] = "cuda",
    ranks: Annotated[int, typer.Option(help="2, or 4.")] = 2,
    minutes: Annotated[float, typer.Option(help="When drawing stops.")] = 2.5,
    examples: Annotated[int, typer.Option(help="Problems for each tier.")] = 150,
    changes: Annotated[int, typer.Option(help="How many of the table's changes are played first.")] = len(CHANGES),
    tiers: Annotated[str, typer.Option(help="Tiers behind the table, with commas; none if empty.")] = TIERS,
    objects: Annotated[str, typer.Option(help="Only these objects, with commas.")] = "",
    commit: Annotated[str, typer.Option(help="The commit that is tested.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for peers_NAME_DEVICE.json.")] = Path("benchmarks/results"),
    impl: Annotated[str | None, typer.Option(hidden=True)] = None,
    until: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Play the libraries."""
    if impl is not None:
        one(impl, device, ranks, tuple(filter(None, tiers.split(","))), examples, changes, until, out)
        return
    out.mkdir(parents=True, exist_ok=True)
    folder, until = Path(tempfile.mkdtemp(dir=out)), time.time() + 60 * minutes
    drivers = {}
    for name in only.split(","):
        for member in PEERS[name]:
            if objects and member not in objects.split(","):
                continue
            part, log = folder / f"{name}.{member}.json", (folder / f"{name}.{member}.log").open("w")
            command = [sys.executable, __file__, "--impl", f"conformance.adapters.{name}:{member}", "--device", device]
            command += ["--ranks", str(ranks), "--tiers", tiers]
            command += [
                "--examples",
                str(examples),
                "--changes",
                str(changes),
                "--until",
                str(until),
                "--out",
                str(part),
            ]
            drivers[name, member] = (part, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    died = []
    for name in only.split(","):
        records = {}
        for member in PEERS[name]:
            if (name, member) not in drivers:
                continue
            part, process = drivers[name, member]
            try:
                code = process.wait(timeout=max(1.0, until + 20 - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = -9
            tail = (folder / f"{name}.{member}.log").read_text()[-2000:]
            if code:
                died.append(f"{name}:{member}: exit code {code}\n{tail}")
            records[member] = json.loads(part.read_text()) if part.exists() else {"died": tail}
            counts = records[member].get("tiers", {})
            print(name, member, *(f"\n    {tier}: {found}" for tier, found in counts.items()), flush=True)
            for failure in records[member].get("failures", []):
                print("   ", failure["tier"], failure.get("text", ""), *failure["findings"][:2], sep="\n      ")
        whole = {"library": name, "commit": commit, "device": device, "objects": records}
        whole["gpu"] = torch.cuda.get_device_name(0) if device == "cuda" else None
        (out / f"peers_{name}_{device}{'_4' if ranks == 4 else ''}.json").write_text(json.dumps(whole, indent=1) + "\n")
    print(*died, sep="\n")
    raise typer.Exit(1 if died else 0)


if __name__ == "__main__":
    typer.run(main)
