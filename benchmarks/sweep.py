"""Every causal, masked, token, sequence and question-answering class of transformers, and those of images and text with
text alone: tiny, over two ranks, against one process.

    python -m benchmarks.sweep --commit "$(git rev-parse HEAD)" --out benchmarks/results/sweep.json
    python -m benchmarks.sweep --only "^(Llama|Qwen3)" --again
    python -m benchmarks.sweep --part 1 --parts 4 --out part_1.json  # then --join part_*.json

`benchmarks.parts.tiny_models` makes the models, `benchmarks.parts.sweep_cases` plays one: padded and packed batches in
three layouts, logits, loss and all gradients. Each class has a process of its own, forked from one that has imported
everything, and a time limit. The record is written as results come; a run goes on where it ended, and `--again` plays
what the record has already. Exit code 1 if a class is wrong, or raised something that is no refusal.
"""

from __future__ import annotations

import collections
import json
import multiprocessing
import re
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.parts.ranks import Commit, JsonOut, version

__all__ = ["VERDICTS", "read_record", "sweep", "write_record"]

VERDICTS = ("right", "refused", "not built", "wrong", "raised")
FAULTS = ("wrong", "raised")
LIMIT_S = 60.0
ROOM = 12 * 2**30  # bytes of address space for one class
PRELOADED = ("benchmarks.parts.sweep_cases", "transformers.models.llama.modeling_llama", "transformers.masking_utils")

Record = dict[str, dict[str, Any]]


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


def _play(name: str, task: str, out: Connection) -> None:
    import torch
    import transformers

    from benchmarks.parts.sweep_cases import play

    resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    out.send(play(name, task))


def sweep(names: dict[str, str], limit_s: float, tell: Any) -> None:
    """Play classes, one after the other.

    Args:
        names: of classes, with the task of each.
        limit_s: the seconds that a class may take.
        tell: is called with each class's name and what came of it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    for name, task in names.items():
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_play, args=(name, task, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            found = mine.recv() if mine.poll(limit_s) else {"verdict": "not built", "message": f"{limit_s:.0f} s over"}
        except EOFError:
            process.join()
            found = {"verdict": "not built", "message": f"its process ended with exit code {process.exitcode}"}
        process.kill()
        process.join()
        tell(name, {"task": task} | found)


def main(
    part: Annotated[int, typer.Option(help="Which part of the classes, from 1.")] = 1,
    parts: Annotated[int, typer.Option(help="In how many parts.")] = 1,
    only: Annotated[str, typer.Option(help="A regular expression: only classes in whose name it is found.")] = "",
    tasks: Annotated[str, typer.Option(help="Only classes of these tasks, with commas.")] = "",
    limit: Annotated[float, typer.Option(help="Seconds for one class.")] = LIMIT_S,
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
    from benchmarks.parts.sweep_cases import classes

    wanted = [(name, task) for name, task in classes().items() if not tasks or task in tasks.split(",")]
    mine = {name: task for name, task in wanted[part - 1 :: parts] if re.search(only, name)}
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

    sweep({name: task for name, task in mine.items() if again or name not in record}, limit, tell)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counted.items())))
    if any(counted[verdict] for verdict in FAULTS):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
