"""The conformance suite on other libraries, two processes on two GPUs over NCCL, or on the CPU over gloo.

    python benchmarks/peers_conformance.py --device cuda --minutes 2.5 --out benchmarks/results
    python benchmarks/peers_conformance.py --only yunchang --device cpu --minutes 1 --out /tmp

Every object of every adapter is played by a driver of its own, all at once. For each library one file
`peers_NAME_DEVICE.json`: what was played and how it went, by tier; what is refused, and why; and each failing problem,
shrunk, with the command that plays it again. Exit code 1 if a driver died.
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
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from conformance import session
from conformance.conduct import Conduct, describe_run
from conformance.implementation import LoadError
from conformance.player import FAILING, Pairs, Task
from conformance.record import Played
from conformance.report.failures import replay_command
from conformance.session import PROFILES, TierResult
from conformance.workers.pool import ProcessPlayer

PEERS = {
    "pytorch": ("flash", "efficient", "cudnn", "chosen"),
    "ring_flash_attn": ("documented", "accepted", "stripe"),
    "yunchang": ("fa", "accepted"),
}
TIERS = ("probes", "budget", "logic", "special", "known", "determinism", "metamorphic")


class Peers(ProcessPlayer):
    """Processes are kept after a problem that all ranks finished, or none for the same reason: then no message is left,
    over NCCL neither. When the time is up nothing more is played.
    """

    until = float("inf")

    def play(self, task: Task) -> Played:
        if time.time() > self.until:
            return Played(task.level, task.tier, task.text, "missing", ("no time is left",))
        played = self._together(("play", task), task, self._limit_s)
        if played.verdict in FAILING and not _alike(played):
            self.close()
        return played

    def pairs(self, case: str) -> Pairs | None:
        return None


def _alike(played: Played) -> bool:
    """Whether every rank returned, or every rank raised the same."""
    raised = [finding.partition(" raised ")[2] for finding in played.findings if " raised " in finding]
    both = not raised or (len(raised) == 2 and raised[0] == raised[1] and "CUDA error" not in raised[0])
    return both and played.verdict == "wrong"


def one(impl: str, device: str, examples: int, until: float, out: Path) -> None:
    """Play one implementation until the time is up, and write what was seen after every tier."""
    torch.set_num_threads(1)
    session._SHRINK_S = 12.0  # for each failure; the time is short
    profile = replace(PROFILES["quick"], max_examples=examples, most_failures=4)
    record: dict[str, Any] = {"impl": impl, "tiers": {}, "refused": {}, "failures": []}
    player = Peers(impl, device, 60.0, 2)
    player.until = until
    with closing(player):
        try:
            conduct = Conduct(player, profile, TIERS, (2,), device)
            record["meta"] = describe_run(impl, "peers", conduct)
            record["refused"] = conduct.capabilities.refused
            record["supported"] = {axis: list(found) for axis, found in conduct.capabilities.choices.items()}
            for tier in TIERS:
                if time.time() < until:
                    (result,) = Conduct(player, profile, (tier,), (2,), device).results()
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
        failure["command"] = replay_command({"impl": impl, "device": device}, p) + " --cp-size 2"
        record["failures"].append(failure)


def main(
    only: Annotated[str, typer.Option(help="Libraries, with commas.")] = ",".join(PEERS),
    device: Annotated[str, typer.Option(help="cuda, or cpu.")] = "cuda",
    minutes: Annotated[float, typer.Option(help="When drawing stops.")] = 2.5,
    examples: Annotated[int, typer.Option(help="Problems for each tier.")] = 150,
    commit: Annotated[str, typer.Option(help="The commit that is tested.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for peers_NAME_DEVICE.json.")] = Path("benchmarks/results"),
    impl: Annotated[str | None, typer.Option(hidden=True)] = None,
    until: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Play the libraries."""
    if impl is not None:
        one(impl, device, examples, until, out)
        return
    out.mkdir(parents=True, exist_ok=True)
    folder, until = Path(tempfile.mkdtemp(dir=out)), time.time() + 60 * minutes
    drivers = {}
    for name in only.split(","):
        for member in PEERS[name]:
            part, log = folder / f"{name}.{member}.json", (folder / f"{name}.{member}.log").open("w")
            command = [sys.executable, __file__, "--impl", f"conformance.adapters.{name}:{member}", "--device", device]
            command += ["--examples", str(examples), "--until", str(until), "--out", str(part)]
            drivers[name, member] = (part, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    died = []
    for name in only.split(","):
        records = {}
        for member in PEERS[name]:
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
        (out / f"peers_{name}_{device}.json").write_text(json.dumps(whole, indent=1) + "\n")
    print(*died, sep="\n")
    raise typer.Exit(1 if died else 0)


if __name__ == "__main__":
    typer.run(main)
