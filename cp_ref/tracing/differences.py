"""The answer of `cp_ref.compare`: a `Difference` for every item in which two runs differ, and a report of all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cp_ref.tracing.trace_items import DIRECTIONS, KINDS, Item

__all__ = ["Comparison", "Difference"]

# Why the error arises at this item, when everything before it agrees.
_ADVICE = {
    "given": "The runs were given different numbers: look at what calls attention (how it shards, its positions).",
    "received": "All before this agrees, so look at this message: what was sent, and how it travelled.",
    "tile": "Everything that this tile needs agrees, so look at the tile itself: its mask, its rows, its arithmetic.",
    "merged": "All partial results agree, so look at how they are put together.",
    "final": "The merged result agrees, so look at what is done to it last: the sink, the cast, the reductions over "
    "ranks.",
}


@dataclass(frozen=True)
class Difference:
    """An item in which two runs differ.

    Attributes:
        a, b: the item in either run; None where a run does not have it.
        unlike, count: how many of its `count` elements differ by more than the tolerance.
        seq, position, head, element: where the difference is largest; None where there is no such axis.
        value_a, value_b: the two numbers there.
    """

    a: Item | None
    b: Item | None
    unlike: int = 0
    count: int = 0
    seq: int | None = None
    position: int | None = None
    head: int | None = None
    element: int | None = None
    value_a: float = float("nan")
    value_b: float = float("nan")

    @property
    def item(self) -> Item:
        """The item that differs: its direction, step, rank, kind and name."""
        item = self.a or self.b
        assert item is not None
        return item

    def __str__(self) -> str:
        item = self.item
        lines = [f"{self._where()}: {self._what()}"]
        if self.a is None or self.b is None:
            lines.append(f"  only {'b' if self.a is None else 'a'} has it")
            return "\n".join(lines)
        places = {"sequence": self.seq, "position": self.position, "head": self.head, "element": self.element}
        at = ", ".join(f"{axis} {n}" for axis, n in places.items() if n is not None)
        lines.append(f"  largest difference at {at}: {self.value_a:.9g} in a, {self.value_b:.9g} in b")
        lines.append(f"  {self.unlike:,} of {self.count:,} elements differ")
        if self.value_a != self.value_a or self.value_b != self.value_b:
            lines.append("  NaN: a row that nobody sent, or an input that is NaN")
        return "\n".join([*lines, *([f"  {self._advice()}"] if item.rank >= 0 else [])])

    def _advice(self) -> str:
        if self.item.kind == "received" and self.item.name in ("out", "dq", "dk", "dv"):
            return "Everything before this agrees, so look at how the sender added up what it sends here."
        return _ADVICE[self.item.kind]

    def _where(self) -> str:
        item = self.item
        if item.rank < 0:
            return f"{item.direction}, over all ranks"
        at = "after the last step" if item.kind in ("merged", "final") else f"step {item.step}"
        return f"{item.direction}, {at}, rank {item.rank}"

    def _what(self) -> str:
        item = self.item
        where = f" {item.piece}" if item.piece else ""
        return {
            "given": f"{item.name}{where}, as given",
            "received": f"{item.name}{where}, received by {item.source!r}",
            "tile": f"{item.name}{where} of {item.source!r}",
            "merged": f"{item.name}{where}, all partial results merged",
            "final": f"{item.name}{where}, the final result",
        }[item.kind]


@dataclass(frozen=True)
class Comparison:
    """The findings of `compare`: true where the runs agree, and `str` is the report.

    Attributes:
        differences: all differing items, in the order of the schedule.
        compared: how many items were compared; with none the runs do not count as equal.
        plans: the differences of problem and schedule, a line each; empty if they are equal.
        notes: the omissions and their reasons.
        tolerance: rtol and atol, in words.
    """

    differences: tuple[Difference, ...]
    compared: int
    plans: tuple[str, ...]
    notes: tuple[str, ...]
    tolerance: str

    @property
    def first(self) -> Difference | None:
        """Where the runs first differ."""
        return self.differences[0] if self.differences else None

    def __bool__(self) -> bool:
        return not self.differences and self.compared > 0

    def __str__(self) -> str:
        lines = [*(f"the plans differ: {line}" for line in self.plans), *self.notes]
        if self.first is None:
            said = f"the runs agree in all {self.compared:,} items" if self.compared else "there is nothing to compare"
            return "\n".join([*lines, f"{said} ({self.tolerance})" if self.compared else said])
        lines += ["the runs part here:", str(self.first)]
        lines += ["", f"{len(self.differences):,} of {self.compared:,} items differ ({self.tolerance}):"]
        return "\n".join(lines + [f"  {line}" for line in self._spread()])

    def _spread(self) -> list[str]:
        """How the difference spreads: which ranks differ in which step."""
        ranks: dict[tuple[int, int, int], Counter[int]] = {}
        for item in (d.item for d in self.differences):
            place = DIRECTIONS.index(item.direction), item.step, KINDS.index(item.kind)
            ranks.setdefault(place, Counter())[item.rank] += 1
        lines: list[str] = []
        for (direction, step, kind), of in sorted(ranks.items()):
            at = "the end" if KINDS[kind] in ("merged", "final") else f"step {step}"
            who = "" if -1 in of else f", rank {' '.join(map(str, sorted(of)))}"
            lines.append(f"{DIRECTIONS[direction]:<8} {at:<7}  {KINDS[kind]:<8}  {sum(of.values()):>4} items{who}")
        return lines
