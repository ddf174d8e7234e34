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
from dataclasses import fields, replace
from itertools import zip_longest

import torch

from cp_ref.spec import Problem, side_of
from cp_ref.tracing.differences import Comparison, Difference
from cp_ref.tracing.recorded_trace import Trace
from cp_ref.tracing.trace_items import DIRECTIONS, WHOLE, Item, Piece

__all__ = ["compare"]

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
