"""What a plan that is updated in place has, beside what the next batch needs: each message, copy and launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from cp_fast.planning.tables import RowKey
from cp_fast.program import Launch

__all__ = ["matched", "matched_launches"]

Item = TypeVar("Item")


def matched(
    needs: str, what: str, wanted: Sequence[Item], given: Sequence[Item], key: Callable[[Item], Any]
) -> list[tuple[Item, Item | None]]:
    """Every item of the shape with the batch's item of the same key, None where the batch has none."""
    found = {key(item): item for item in given}
    assert len(found) == len(given)
    pairs = [(item, found.pop(key(item), None)) for item in wanted]
    if found:
        raise ValueError(
            f"{needs} a message or copy ({what} {next(iter(found))}) that the plan does not have; make a plan with a "
            "batch that needs it"
        )
    return pairs


def matched_launches(
    where: str, wanted: Sequence[Launch[RowKey]], given: Sequence[Launch[RowKey]]
) -> list[tuple[str, Launch[RowKey], Launch[RowKey] | None]]:
    """Every launch of the shape with one of the batch that has the same window, in order; None for what it lacks."""

    def window(launch: Launch[RowKey]) -> tuple[Any, ...]:
        return launch.q.buffer, launch.kv.buffer, launch.segments.left, launch.segments.right

    rest = list(reversed(given))
    pairs: list[tuple[str, Launch[RowKey], Launch[RowKey] | None]] = []
    for one in wanted:
        pairs.append((where, one, rest.pop() if rest and window(rest[-1]) == window(one) else None))
    if rest:
        windows = [(launch.segments.left, launch.segments.right) for launch in wanted]
        last = rest[-1].segments
        raise ValueError(
            f"{where} needs a launch with window {(last.left, last.right)} that the plan does not have (its windows are"
            f" {windows}); make a plan with a batch that needs it"
        )
    return pairs
