"""`compare` walks two traces side by side and names the first item that differs.

    a    given  received  tile  tile  received  tile  merged  final
         =      =         =     =     X                                    here: everything before it agrees, so the
    b    given  received  tile  tile  received  tile  merged  final        fault lies in this item's own making

Two runs of one schedule are compared item by item. Runs whose schedules differ (another cp_size, say) have different
intermediates, but the same inputs and results: these are compared in global positions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import zip_longest

import torch

from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import side_of
from cp_ref.tracing.recorded_trace import DIRECTIONS, EVENTS, WHOLE, Item, Piece, Trace

__all__ = [
    "Comparison",
    "Difference",
    "compare",
]

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
            place = DIRECTIONS.index(item.direction), item.step, EVENTS.index(item.kind)
            ranks.setdefault(place, Counter())[item.rank] += 1
        lines: list[str] = []
        for (direction, step, kind), of in sorted(ranks.items()):
            at = "the end" if EVENTS[kind] in ("merged", "final") else f"step {step}"
            who = "" if -1 in of else f", rank {' '.join(map(str, sorted(of)))}"
            lines.append(f"{DIRECTIONS[direction]:<8} {at:<7}  {EVENTS[kind]:<8}  {sum(of.values()):>4} items{who}")
        return lines


_SIZES = ("sequences", "heads_q", "heads_kv", "d_qk", "d_v")
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def compare(trace_a: Trace, trace_b: Trace, *, rtol: float | None = None, atol: float | None = None) -> Comparison:
    """Name the first step and rank at which two runs differ.

    Args:
        trace_a, trace_b: of `cp_ref.trace()`, or loaded.
        rtol, atol: numbers agree when |a - b| <= atol + rtol * |b|, and NaN agrees with NaN. By default a little more
            than rounding in the coarser dtype of the two: 1e-10 for float64, 1e-5 float32, 4e-3 float16, 3e-2 bfloat16.

    Returns:
        A `Comparison`: `assert compare(a, b)`, `print(compare(a, b))`, `compare(a, b).first.item.rank`.

    >>> from cp_ref import ContextParallel, SimGroup, attention
    >>> from cp_ref.tracing.recorder import trace
    >>> def fn(member):
    ...     x = torch.linspace(0, 1, 4).view(1, 4, 1, 1) + member.rank
    ...     attention(x, x, x, cp=ContextParallel(member))
    >>> with trace() as a:
    ...     _ = SimGroup(2).run(fn)
    >>> print(compare(a, a))
    the runs agree in all 54 items (rtol and atol 1e-05 for float32)
    """
    problem_a, problem_b = trace_a.problem, trace_b.problem
    if problem_a is None or problem_b is None:
        empty = " and ".join(name for name, problem in (("a", problem_a), ("b", problem_b)) if problem is None)
        return Comparison((), 0, (), (f"no attention call was recorded in {empty}",), "")
    plans = _plan_differences(trace_a, trace_b)
    if unlike := _field_differences(problem_a, problem_b, _SIZES):
        return Comparison((), 0, plans, (f"the results are of different sizes: {'; '.join(unlike)}",), "")
    notes: list[str] = []
    same_rows = problem_a.workload.ownership == problem_b.workload.ownership
    same_steps = same_rows and trace_a.schedule == trace_b.schedule
    items_a, items_b = (_common_parts if same_steps else _wholes)(trace_a, trace_b, notes)
    coarse: set[torch.dtype] = (
        {getattr(torch, p.dtype) for p in (problem_a, problem_b)} if problem_a.dtype != problem_b.dtype else set()
    )
    found: list[Difference] = []
    used: dict[torch.dtype, float] = {}
    pairs = _pairs(items_a, items_b)
    for a, b in pairs:
        dtype = max({x.tensor.dtype for x in (a, b) if x is not None} | coarse, key=lambda d: _TOLERANCE[d])
        used[dtype] = _TOLERANCE[dtype]
        tolerances = (used[dtype] if rtol is None else rtol), (used[dtype] if atol is None else atol)
        difference = _difference(problem_a, a, b, *tolerances)
        found += [] if difference is None else [difference]
    return Comparison(tuple(found), len(pairs), plans, tuple(notes), _tolerance_text(used, rtol, atol))


def _tolerance_text(used: dict[torch.dtype, float], rtol: float | None, atol: float | None) -> str:
    usual = ", ".join(f"{t:g} for {str(d).removeprefix('torch.')}" for d, t in used.items())
    if rtol is None and atol is None:
        return f"rtol and atol {usual}"
    return ", ".join(f"{name} {usual if t is None else f'{t:g}'}" for name, t in (("rtol", rtol), ("atol", atol)))


def _field_differences(a: Problem, b: Problem, names: Iterable[str]) -> list[str]:
    pairs = ((name, _field(a, name), _field(b, name)) for name in names)
    return [f"{name} is {x} in a, {y} in b" for name, x, y in pairs if x != y]


def _field(problem: Problem, name: str) -> object:
    """A field of a problem; sequences are without padding, which does not change results."""
    return [(s.len_q, s.len_kv) for s in problem.sequences] if name == "sequences" else getattr(problem, name)


def _plan_differences(trace_a: Trace, trace_b: Trace) -> tuple[str, ...]:
    assert trace_a.problem is not None
    assert trace_b.problem is not None
    lines = _field_differences(trace_a.problem, trace_b.problem, [f.name for f in fields(Problem)])
    place, step = "", -1
    texts = (str(t.schedule).splitlines() for t in (trace_a, trace_b))
    for a, b in zip_longest(*texts, fillvalue="the end"):
        if a != b:
            at = f", in {place}{f' step {step}' if step >= 0 else ''}," if place else ""
            lines.append(f"the schedules part{at} with {a.strip()!r} in a, {b.strip()!r} in b")
            break
        if not a.startswith(" "):
            place, step = a, -1
        step += a.strip() == "step"
    return tuple(lines)


def _common_parts(trace_a: Trace, trace_b: Trace, notes: list[str]) -> tuple[list[Item], list[Item]]:
    """The items of the passes and ranks that both traces have; a note on the others."""
    parts: set[tuple[str, int]] = set()
    for direction in DIRECTIONS:
        a, b = set(trace_a.ranks(direction)), set(trace_b.ranks(direction))
        parts |= {(direction, rank) for rank in a & b}
        for name, only in (("a", a - b), ("b", b - a)):
            if only:
                ranks = " ".join(map(str, sorted(only)))
                notes.append(f"left out, as only {name} has it: the {direction} pass of rank {ranks}")
    items_a, items_b = ([i for i in t if (i.direction, i.rank) in parts] for t in (trace_a, trace_b))
    return items_a, items_b


def _wholes(trace_a: Trace, trace_b: Trace, notes: list[str]) -> tuple[list[Item], list[Item]]:
    """The inputs and results in global positions; adds a note that only these are compared."""
    notes.append("the steps cannot be compared, as the schedules differ: inputs and results are, in global positions")
    complete: list[str] = []
    for direction in DIRECTIONS:
        missing = [
            f"{name} has rank {' '.join(map(str, t.ranks(direction))) or 'none'} of {t.problem.cp_size}"
            for name, t in (("a", trace_a), ("b", trace_b))
            if t.problem is not None and len(t.ranks(direction)) < t.problem.cp_size
        ]
        complete += [] if missing else [direction]
        if missing:
            notes.append(f"left out, as it takes all ranks: the {direction} pass ({'; '.join(missing)})")
    items_a, items_b = (
        [i for i in _whole_items(t, trace_a.problem) if i.direction in complete] for t in (trace_a, trace_b)
    )
    return items_a, items_b


def _whole_items(trace: Trace, rows_of: Problem | None) -> list[Item]:
    """Inputs and results, one item a sequence, at the rows that it has in the problem `rows_of`."""
    assert rows_of is not None
    found: list[Item] = []
    for name, (direction, kind) in WHOLE.items():
        parts = trace.select(direction, kind=kind, name=name)
        if parts and parts[0].piece is None:  # one value a head, the same on every rank
            found.append(replace(parts[0], step=0, rank=-1))
        elif parts:
            for start, x in zip(rows_of.starts(side_of(name)), trace.whole(name), strict=False):
                found.append(Item(direction, 0, -1, kind, "", name, Piece(start, start + len(x), 0, x.shape[1]), x))
    return found


def _pairs(items_a: list[Item], items_b: list[Item]) -> list[tuple[Item | None, Item | None]]:
    """The items of two runs side by side, in the order of the schedule."""
    a, b = _numbered(items_a), _numbered(items_b)
    keys = [*a, *(key for key in b if key not in a)]
    pairs = [(a.get(key), b.get(key)) for key in keys]
    return sorted(pairs, key=lambda pair: (pair[0] or pair[1]).order)  # type: ignore[union-attr]


def _numbered(items: list[Item]) -> dict[tuple[object, ...], Item]:
    """By key, and by the item's number among those of that key."""
    seen: Counter[tuple[object, ...]] = Counter()
    found: dict[tuple[object, ...], Item] = {}
    for item in items:
        found[*item.key, seen[item.key]] = item
        seen[item.key] += 1
    return found


def _difference(problem: Problem, a: Item | None, b: Item | None, rtol: float, atol: float) -> Difference | None:
    """How two items differ; `problem` has the rows of both."""
    if a is None or b is None:
        return Difference(a, b)
    x, y = a.tensor.double(), b.tensor.double()
    unlike = ~torch.isclose(x, y, rtol=rtol, atol=atol, equal_nan=True)
    if not unlike.any():
        return None
    gap = (x - y).abs().nan_to_num(nan=float("inf")).masked_fill(~unlike, -1.0)
    where = [int(n) for n in torch.unravel_index(gap.argmax(), gap.shape)]
    values = x[tuple(where)].item(), y[tuple(where)].item()
    seq, position, head, element = None, None, where[0], None
    if a.piece is not None:
        starts, row = problem.starts(side_of(a.name)), a.piece.start + where[0]
        seq = bisect_right(starts, row) - 1
        position, head = row - starts[seq], a.piece.head_start + where[1]
        element = where[2] if len(where) > 2 else None
    return Difference(a, b, int(unlike.sum()), unlike.numel(), seq, position, head, element, *values)
