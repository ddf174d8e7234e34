"""Every public function with every argument replaced by wrong values, on all ranks and on one.

    python -m tests.refusals.attacks.attack_calls --out benchmarks/results/attack_calls.md

Arguments come from signatures: a new one is attacked the day it is added. A call ends on every rank in an error of ours
that names an argument, in less than a second of a processor, or gives the right result: what the oracle gives, what
the call gives without the change, or, where neither can say, the result of a value that the annotation allows.
"""

from __future__ import annotations

import argparse
import random
import re
import resource
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cp_ref import SimGroup
from cp_ref.reference.simulator import Deadlock, MessageError
from tests.refusals.attacks.attack_kinds import KINDS, legal
from tests.refusals.attacks.attack_targets import TARGETS, Target

__all__ = ["Attack", "attack", "attacks", "played"]

_OURS = (ValueError, TypeError, NotImplementedError, MemoryError)
_SHORT = ("h_q", "h_kv", "data")  # what errors call several arguments
_HEARD = re.compile(r"refused its arguments|the ranks have different|differs between rank")
_MEMORY = 12 * 2**30


class Attack(NamedTuple):
    """One argument of one call, replaced on rank 1 alone or on both ranks."""

    target: str
    parameter: str
    kind: str
    alone: bool


def attacks() -> list[Attack]:
    """All of them. What no rank agrees on is not replaced on one alone; a wrong group has nobody to tell."""
    found: list[Attack] = []
    for name, target in TARGETS.items():
        found += [Attack(name, *parts) for parts in product(target.parameters, KINDS, (False, True))]
    return [a for a in found if not a.alone or (TARGETS[a.target].collective and a.parameter not in _GROUPS)]


_GROUPS = ("cp", "over", "cp_group", "part")


def attack(this: Attack) -> tuple[str, str]:
    """What came of it: "refused", "right" or "legal", or "WRONG"; and the words."""
    target, untouched, before = TARGETS[this.target], _untouched(this.target), time.process_time()
    try:
        outcomes = played(target, this)
    except (Deadlock, MessageError) as error:
        return "WRONG", f"the ranks part: {error}"
    spent = time.process_time() - before
    if spent > 1:
        return "WRONG", f"{spent:.1f} s of a processor"
    errors = [error for error, _ in outcomes if error is not None]
    if errors:
        if len(errors) < len(outcomes):  # of what the ranks agree on all raise, of the rest each by itself
            return "WRONG", f"one rank alone raises {errors[0]!r}"
        for rank, error in enumerate(errors):
            if "can't allocate memory" in str(error):  # so much was asked for
                continue
            if not isinstance(error, _OURS):
                return "WRONG", f"rank {rank}: {type(error).__name__}: {error}"
            named = any(re.search(rf"\b{n}\b", str(error)) for n in (*target.parameters, *target.also, *_SHORT))
            if not named and not _HEARD.search(str(error)):
                return "WRONG", f"rank {rank} names no argument: {error}"
        return "refused", str(errors[-1])
    value, annotation = KINDS[this.kind](), target.parameters[this.parameter]
    if all(_same(result, other) for (_, result), other in zip(outcomes, untouched, strict=True)):
        return "right", "as without the change"
    if target.oracle is not None and not this.alone:
        expected = _expected(target, this)
        if expected is not None and all(_same(r, e) for (_, r), e in zip(outcomes, expected, strict=True)):
            return "right", "as the oracle"
        return "WRONG", "accepted, and not what the oracle gives"
    return ("legal", "") if legal(annotation, value) else ("WRONG", f"accepted, though the annotation is {annotation}")


@cache
def _untouched(name: str) -> list[Any]:
    """The results of the call without a change, by rank."""
    target = TARGETS[name]

    def one(member: Any) -> Any:
        cp = target.package.ContextParallel(member, layout=target.layout)
        given = target.arguments(cp)
        return _shown(target.function(**given), given)

    return SimGroup(2).run(one)


def played(target: Target, this: Attack) -> list[tuple[Exception | None, Any]]:
    """Of each rank the error and the result."""

    def one(member: Any) -> tuple[Exception | None, Any]:
        cp = target.package.ContextParallel(member, layout=target.layout)
        given = target.arguments(cp)
        if member.rank or not this.alone:
            given[this.parameter] = KINDS[this.kind]()
        try:
            return None, _shown(target.function(**given), given)
        except (Deadlock, MessageError):
            raise
        except Exception as error:
            return error, None

    return SimGroup(2).run(one)


def _expected(target: Target, this: Attack) -> list[Any] | None:
    """The oracle's result, by rank; None where it takes no such value either."""

    def one(member: Any) -> Any:
        cp = target.package.ContextParallel(member, layout=target.layout)
        given = target.arguments(cp) | {this.parameter: KINDS[this.kind]()}
        assert target.oracle is not None
        out = target.oracle(given)
        cut = {"qkv_format": "thd", "cu_seqlens_padded": given.get("cu_seqlens_q", torch.tensor([0, 8, 16]))}
        mine = target.package.shard(out, cp=cp, **(cut if out.ndim == 3 else {}))
        return _shown(mine.transpose(1, 2) if "query" in given else mine, given)

    try:
        return SimGroup(2).run(one)
    except _OURS:
        return None


def _shown(result: Any, given: dict[str, Any]) -> Any:
    """What of a result is compared: a tensor, the first of several, or a text; of a call that writes in place, where it
    writes.
    """
    result = next(iter(given.values())) if result is None else result
    while isinstance(result, tuple | list) and result:
        result = result[0]
    return result.detach().clone() if isinstance(result, torch.Tensor) else str(result)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        close = one.shape == other.shape and torch.allclose(one.double(), other.double(), atol=1e-5, equal_nan=True)
        return bool(close)
    return type(one) is type(other) and one == other


def run(chosen: Iterable[Attack]) -> tuple[Counter[tuple[str, str]], list[str]]:
    """How many came out how, by function; and what is wrong."""
    counts, wrong = Counter[tuple[str, str]](), list[str]()
    for this in chosen:
        outcome, words = attack(this)
        counts[this.target, outcome] += 1
        if outcome == "WRONG":
            where = "on one rank" if this.alone else "on all ranks"
            wrong.append(f"{this.target}({this.parameter}={this.kind}) {where}: {words[:300]}")
    return counts, wrong


def main() -> None:
    """All, or a part; print what is wrong, write the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--target", default="")
    parser.add_argument("--sample", type=int, default=0, help="so many at random")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    chosen = [this for this in attacks() if given.target in this.target]
    chosen = random.Random(0).sample(chosen, given.sample) if given.sample else chosen
    counts, wrong = run(chosen)
    print("\n".join(wrong))
    print(f"{sum(counts.values())} attacks, {len(wrong)} wrong")
    if given.out is not None:
        given.out.write_text(_page(counts, wrong), encoding="utf-8")


def _page(counts: Counter[tuple[str, str]], wrong: list[str]) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    columns = ("refused", "right", "legal", "WRONG")
    rows = [f"| {name} | " + " | ".join(str(counts[name, c]) for c in columns) + " |" for name in TARGETS]
    total = " | ".join(str(sum(n for (_, what), n in counts.items() if what == c)) for c in columns)
    lines = ["# Attacks on calls", ""]
    lines += [
        f"`python -m tests.refusals.attacks.attack_calls`, commit {commit.strip()}, {len(KINDS)} kinds of values.",
        "",
    ]
    lines += ["| function | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    return "\n".join([*lines, *rows, f"| all | {total} |", "", *wrong]).rstrip() + "\n"


if __name__ == "__main__":
    main()
