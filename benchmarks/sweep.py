"""Every causal, masked, token, sequence and question-answering class of transformers, and those of images and text:
tiny, over two ranks, against one process. Classes that read images, videos or sound are played with these too, over two
ranks and over three; the three ranks share the pictures out, where they can.

    python -m benchmarks.sweep --commit "$(git rev-parse HEAD)" --out benchmarks/results/sweep.json
    python -m benchmarks.sweep --only "^(Llama|Qwen3)" --again
    python -m benchmarks.sweep --tasks causal,masked --switches --out switches.json
    python -m benchmarks.sweep --part 1 --parts 4 --out part_1.json  # then --join part_*.json

`--switches` plays each class with each switch of its configuration set another way, one at a time.
`benchmarks.parts.tiny_models` makes the models, `benchmarks.parts.sweep_cases` plays one: padded and packed batches in
three layouts, logits, loss and all gradients. A process plays them one by one, each with a time limit; another process
goes on behind a class that hangs or dies. The record is written as results come; a run goes on where it ended, and
`--again` plays what the record has already. Exit code 1 if a class is wrong, or raised something that is no refusal.
"""

from __future__ import annotations

import collections
import json
import math
import multiprocessing
import re
import resource
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.parts.ranks import Commit, JsonOut, version

__all__ = ["VERDICTS", "read_record", "sweep", "write_record"]

VERDICTS = ("right", "refused", "not built", "wrong", "raised")
FAULTS = ("wrong", "raised")
LIMIT_S = 60.0
IDLE = 10.0  # how much longer a class may take that waits: the machine may be busy
MOST_CLASSES = 40
ROOM = 12 * 2**30  # bytes of address space for one class
PRELOADED = ("benchmarks.parts.sweep_cases", "transformers.models.llama.modeling_llama", "transformers.masking_utils")

Record = dict[str, dict[str, Any]]
Cases = Mapping[str, tuple[str, dict[str, Any]]]


def read_record(path: Path | None) -> tuple[dict[str, Any], Record]:
    """A record's head, and what it has of each class; nothing where there is no file."""
    if path is None or not path.exists():
        return {}, {}
    head = json.loads(path.read_text())
    return head, head.pop("classes")


def write_record(path: Path | None, head: dict[str, Any], found: Record) -> None:
    """Write a record, with a line for each class."""
    if path is None:
        return
    counts = {task: dict(sorted(count.items())) for task, count in sorted(_counts(found).items())}
    lines = [f" {json.dumps(key)}: {json.dumps(x)}" for key, x in (head | {"counts": counts}).items()]
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
    path.write_text("{\n" + ",\n".join(lines) + f',\n "classes": {{\n{rows}\n }}\n}}\n')


def _counts(found: Record) -> dict[str, collections.Counter[str]]:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for one in found.values():
        counts[one["task"]][one["verdict"]] += 1
    return counts


def _serve(work: Connection) -> None:
    """Play classes as they come, in a process of its own."""
    import torch
    import transformers

    from benchmarks.parts.sweep_cases import play

    resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    while True:
        name, task, more, limit_s = work.recv()
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + limit_s), most))
        work.send(play(name.partition(" ")[0], task, **more))


class Player:
    """A process that plays one class after the other. It is ended, and another one begins, when a class takes too long,
    or ends it, or when it has played `MOST_CLASSES`: what a class leaves behind is gone then.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self._process: Any = None
        self._left = 0

    def play(self, name: str, task: str, more: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """What comes of a class. limit_s: of the processor's time."""
        if not self._left:
            self.close()
            self._work, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
            self._left = MOST_CLASSES
        self._left -= 1
        self._work.send((name, task, more, limit_s))
        try:
            if self._work.poll(limit_s * IDLE):
                return self._work.recv()
            why = f"did not end in {limit_s * IDLE:.0f} s, most of them idle"
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode
            why = f"did not end in {limit_s:.0f} s" if code == -signal.SIGXCPU else f"its process ended, {code}"
        self._left = 0
        return {"verdict": "not built", "message": why, "task": task}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._work.close()
            self._process = None


def sweep(cases: Cases, limit_s: float, tell: Callable[[str, dict[str, Any]], None]) -> None:
    """Play classes, one after the other.

    Args:
        cases: the task of each class, and entries of its configuration, by its name.
        limit_s: the seconds of the processor that a class may take.
        tell: is called with each class's name and what came of it.
    """
    player = Player()
    try:
        for name, (task, more) in cases.items():
            tell(name, player.play(name, task, more, limit_s))
    finally:
        player.close()


def main(
    part: Annotated[int, typer.Option(help="Which part of the classes, from 1.")] = 1,
    parts: Annotated[int, typer.Option(help="In how many parts.")] = 1,
    only: Annotated[str, typer.Option(help="A regular expression: only classes in whose name it is found.")] = "",
    tasks: Annotated[str, typer.Option(help="Only classes of these tasks, with commas.")] = "",
    limit: Annotated[float, typer.Option(help="Seconds of the processor for one class.")] = LIMIT_S,
    switched: Annotated[bool, typer.Option("--switches", help="Play each class with each switch set.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also play what the record has.")] = False,
    commit: Commit = "",
    out: JsonOut = None,
    join: Annotated[list[Path] | None, typer.Option(help="Only put these records into one.")] = None,
) -> None:
    """Play the classes that the record does not have yet."""
    head, record = read_record(out)
    for path in join or ():
        theirs, found = read_record(path)
        head, record = head | theirs, record | found
    if join:
        write_record(out, head, record)
        return
    from benchmarks.parts.sweep_cases import classes, switches

    wanted = [(name, task) for name, task in classes().items() if not tasks or task in tasks.split(",")]
    wanted = [(name, task) for name, task in wanted[part - 1 :: parts] if re.search(only, name)]
    cases = {name: (task, dict[str, Any]()) for name, task in wanted}
    if switched:
        cases = {f"{name} {how}": (task, more) for name, task in wanted for how, more in switches(name)}
    head |= {"commit": commit, "versions": {name: version(name) for name in ("torch", "transformers")}}
    began, counted = time.monotonic(), collections.Counter[str]()

    def tell(name: str, found: dict[str, Any]) -> None:
        record[name] = found
        verdict = found["verdict"]
        counted[verdict] += 1
        figures = "" if verdict in ("refused", "not built") else f"{found.get('logits')} {found.get('gradients')}"
        at = f"{time.monotonic() - began:5.0f} s"
        mark = verdict.upper() if verdict in FAULTS else verdict
        print(f"{at}  {mark:9} {name}  {figures}  {found.get('message', '')[:150]}", flush=True)
        write_record(out, head, record)

    sweep({name: case for name, case in cases.items() if again or name not in record}, limit, tell)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counted.items())))
    if any(counted[verdict] for verdict in FAULTS):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
