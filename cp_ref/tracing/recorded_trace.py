"""A trace: every intermediate of one attention call, with its place, in the order of the schedule.

    forward    step 0   rank 0   given     q, k, v                     the rank's own slices
                                 received  kv, q, out                  message by message
                                 tile      out, lse                    tile by tile: the partial result
               ...
               the end  rank 0   merged    out, lse                    all partial results, wide, before any sink
                                 final     out, lse, max_logit         what the caller gets
    backward   step 0   rank 0   given     dout, lse, delta
                                 received  do, dkv, dq
                                 tile      dq, dk, dv                  the tile's contributions
               ...
               the end  rank 0   merged    dq, dk, dv                  their sums, wide
                                 final     dq, dk, dv                  what the caller gets

An item is one tensor: rows [n, h, d] or [n, h] of one span of the packed global buffer, so that every number in it has
a sequence, a position and a head. Padding and tail are not recorded.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any, NamedTuple, cast

import torch

from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule, side_of
from cp_ref.schedules.values import FURTHEST, MOST_RANKS, check_choice, read_count
from cp_ref.schedules.verify.well_formed import malformed
from cp_ref.show.picture_plane import title

__all__ = [
    "DIRECTIONS",
    "EVENTS",
    "PER_HEAD",
    "WHOLE",
    "Content",
    "Item",
    "Piece",
    "Trace",
    "read_content",
    "write_content",
]

DIRECTIONS = ("forward", "backward")
EVENTS = ("given", "received", "tile", "merged", "final")
PER_HEAD = ("max_logit", "softmax_offset", "dsoftmax_offset")  # names of items of one value a head
WHOLE = {  # the places of a call's inputs and results
    **dict.fromkeys(("q", "k", "v", "softmax_offset"), ("forward", "given")),
    **dict.fromkeys(("out", "lse", "max_logit"), ("forward", "final")),
    "dout": ("backward", "given"),
    **dict.fromkeys(("dq", "dk", "dv", "dsoftmax_offset"), ("backward", "final")),
}


class Piece(NamedTuple):
    """Rows [start, stop) of the packed global buffer of queries, or of keys, for heads [head_start, head_stop).

    >>> str(Piece(2, 4, 0, 1))
    '[2:4]h0:1'
    """

    start: int
    stop: int
    head_start: int
    head_stop: int

    def __str__(self) -> str:
        return f"[{self.start}:{self.stop}]h{self.head_start}:{self.head_stop}"


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One recorded tensor.

    Attributes:
        direction: "forward" or "backward".
        step: from 0; items after the last step have the number of steps.
        rank: who had it.
        kind: "given", "received", "tile", "merged" or "final".
        source: the line of the schedule that it comes from, a message or a tile; "" for the rank's own rows.
        name: "q", "k", "v", "out", "lse", "dout", "delta", "dq", "dk", "dv"; "max_logit" and the like.
        piece: which rows and heads it is; None for one value a head.
        tensor: [n, h, d] or [n, h]; [h] where `piece` is None. On the CPU, in its own dtype.
    """

    direction: str
    step: int
    rank: int
    kind: str
    source: str
    name: str
    piece: Piece | None
    tensor: torch.Tensor

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Forward before backward, by step, by rank, by kind; as recorded within that."""
        return DIRECTIONS.index(self.direction), self.step, self.rank, EVENTS.index(self.kind)

    @property
    def key(self) -> tuple[str, int, int, str, str, str, str]:
        """The item's identity, without its value: equal in two runs of one schedule."""
        return self.direction, self.step, self.rank, self.kind, self.source, self.name, str(self.piece or "")

    def __str__(self) -> str:
        of = f" of {self.source}" if self.source else ""
        at = f" {self.piece}" if self.piece else ""
        return (
            f"{self.direction} step {self.step} rank {self.rank}: {self.kind} {self.name}{at}{of}, "
            f"{str(self.tensor.dtype).removeprefix('torch.')} {list(self.tensor.shape)}"
        )


# ---- files
#
# Files of traces, read with care: all content is checked before it is used.
#
# A file may come from another version, or be cut off. So this module looks first at the kind of file, at the numbers in
# its header and at every item's place. It raises ValueError with the file's name where they do not fit together.


_FIELDS = {f.name for f in fields(Item)}
_DIMS = {  # the head dim of each name's tensors; None where they have none
    **dict.fromkeys(("q", "k", "dq", "dk"), "d_qk"),
    **dict.fromkeys(("v", "out", "dout", "dv"), "d_v"),
    **dict.fromkeys(("lse", "delta"), None),
}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Content(NamedTuple):
    """The content of a file: the fields of a `Trace`, in their order."""

    call: int
    problem: Problem | None
    schedule: Schedule | None
    calls: dict[int, int]
    items: list[Item]


def write_content(path: str | os.PathLike[str], content: Content) -> None:
    """Write a file of plain values, which `torch.load` reads without running any code."""
    items = [{name: getattr(item, name) for name in _FIELDS} for item in content.items]
    plain = {
        "call": content.call,
        "problem": str(content.problem or ""),
        "schedule": str(content.schedule or ""),
        "calls": content.calls,
        "items": [values | {"piece": values["piece"] and tuple(values["piece"])} for values in items],
    }
    with open(path, "wb") as file:
        torch.save(plain, file)


def read_content(path: str) -> Content:
    """The content of a file that `write_content` wrote.

    Raises:
        OSError: it cannot be read. ValueError: it is no plain file, or it holds no trace; with the reason.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path} is no plain file; a trace is saved in one")
    with open(path, "rb") as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # of torch and pickle: they advise the reader to load code, or name their own lists
            raise ValueError(f"{path} holds no trace: {_UNREADABLE}") from error
    try:
        return _checked(content)
    except Exception as error:  # values of any kind, in any place
        raise ValueError(f"{path} holds no trace: {error or type(error).__name__}") from error


_UNREADABLE = "it is no file of torch.save with plain values alone, or it is cut off; make one by record or Trace.save"


def _checked(content: Any) -> Content:
    """The content, once everything in it has been looked at."""
    if not isinstance(content, dict) or set(cast(Any, content)) != set(Content._fields):
        raise ValueError(f"its values are not {', '.join(Content._fields)}; make one by record or Trace.save")
    content = cast(dict[str, Any], content)
    if not content["problem"]:
        raise ValueError("no attention call was recorded in it")
    problem = Problem.parse(content["problem"])
    _check_sizes(problem)
    schedule = Schedule.parse(content["schedule"])
    if errors := next(malformed(problem.workload, schedule), ""):
        raise ValueError(errors)
    last = problem.cp_size - 1
    calls = {
        read_count("rank", rank, at_least=0, at_most=last): read_count("calls", number, at_least=0)
        for rank, number in content["calls"].items()
    }
    items: list[Item] = []
    for n, values in enumerate(list(content["items"])):
        try:
            items.append(_checked_item(problem, schedule, values))
        except Exception as error:
            raise ValueError(f"item {n} has no meaning: {error or type(error).__name__}") from error
    return Content(read_count("call", content["call"], at_least=0), problem, schedule, calls, items)


def _check_sizes(problem: Problem) -> None:
    """Raise unless lengths, sizes and edges are integers within bounds: they decide how much memory is taken."""
    read_count("cp_size", problem.cp_size, at_least=1, at_most=MOST_RANKS)
    read_count("a2a_size", problem.a2a_size, at_least=1, at_most=problem.cp_size)
    for name in ("heads_q", "heads_kv", "d_qk", "d_v"):
        read_count(name, getattr(problem, name), at_least=1)
    for sequence in problem.sequences:
        for value in (sequence.len_q, sequence.len_kv, sequence.slots_q, sequence.slots_kv):
            read_count("a length", value, at_least=0, at_most=FURTHEST)
    if max(sum(s.slots_q for s in problem.sequences), sum(s.slots_kv for s in problem.sequences)) > FURTHEST:
        raise ValueError(f"the sequences have more than {FURTHEST} tokens")
    if any(s.len_q > s.slots_q or s.len_kv > s.slots_kv for s in problem.sequences):
        raise ValueError("a sequence is longer than its slots")
    tables = (problem.areas or (), () if isinstance(problem.layout, str) else problem.layout, (problem.window_size,))
    for value in (value for table in tables for row in table for value in row):
        read_count("an edge", value, at_least=-1, at_most=FURTHEST)
    if getattr(torch, problem.dtype) not in _FLOATS:
        raise ValueError(f"dtype is {problem.dtype!r}")


def _checked_item(problem: Problem, schedule: Schedule, values: Any) -> Item:
    """An item; raises unless it has its fields, a place in the schedule, and a tensor of the shape of its piece."""
    if set(values) != _FIELDS:
        raise ValueError(f"its fields are {sorted(values)}")
    if values["direction"] not in DIRECTIONS or values["kind"] not in EVENTS or not isinstance(values["source"], str):
        raise ValueError(f"it is {values['direction']!r} {values['kind']!r} of {values['source']!r}")
    rank = read_count("rank", values["rank"], at_least=0, at_most=problem.cp_size - 1)
    rank_schedule = (schedule.forward if values["direction"] == "forward" else schedule.backward)[rank]
    read_count("step", values["step"], at_least=0, at_most=len(rank_schedule))
    tensor, name = values["tensor"], values["name"]
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _FLOATS or not tensor.is_contiguous():
        raise ValueError(f"its tensor is {type(tensor).__name__}; it must be of floating-point numbers, in their order")
    if (shape := _shape(problem, name, values["piece"])) != list(tensor.shape):
        raise ValueError(f"{name} of {values['piece']} has shape {list(tensor.shape)}; it must have {shape}")
    return Item(**values | {"piece": values["piece"] and Piece(*values["piece"])})


def _shape(problem: Problem, name: Any, piece: Any) -> list[int]:
    """The shape of a tensor of this name and these rows and heads."""
    if name in PER_HEAD and piece is None:
        return [problem.heads_q]
    side = side_of(name)
    rows, heads = problem.starts(side)[-1], problem.heads_q if side == "q" else problem.heads_kv
    start, stop, head_start, head_stop = piece
    for what, first, last, end in (("rows", start, stop, rows), ("heads", head_start, head_stop, heads)):
        last = read_count(f"the end of its {what}", last, at_least=0, at_most=end)
        read_count(f"the first of its {what}", first, at_least=0, at_most=last)
    dim = _DIMS[name]
    return [stop - start, head_stop - head_start, *([] if dim is None else [getattr(problem, dim)])]


@dataclass
class Trace:
    """The items that `cp_ref.trace()` recorded of one call; iterate over it, `select` from it, print it for a table of
    contents.

    Attributes:
        call: which attention call of each rank it is, counted from 0 inside the `with` block.
        problem, schedule: what was computed, and how; None until the call has begun.
        calls: how many attention calls each rank has made inside the block.
    """

    call: int = 0
    problem: Problem | None = None
    schedule: Schedule | None = None
    calls: dict[int, int] = field(default_factory=dict[int, int])
    _items: list[Item] = field(default_factory=list[Item], repr=False)

    def add(self, item: Item) -> None:
        """Take in one more item, in any order of the ranks."""
        self._items.append(item)

    @property
    def items(self) -> list[Item]:
        """All items, in the order of the schedule."""
        return sorted(self._items, key=lambda item: item.order)

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self._items)

    def select(
        self,
        direction: str | None = None,
        step: int | None = None,
        rank: int | None = None,
        kind: str | None = None,
        name: str | None = None,
    ) -> list[Item]:
        """The items that have all of these.

        `t.select("forward", step=1, rank=2, kind="tile", name="lse")`
        """
        wanted = {"direction": direction, "step": step, "rank": rank, "kind": kind, "name": name}
        wanted = {attribute: value for attribute, value in wanted.items() if value is not None}
        return [item for item in self.items if all(getattr(item, a) == value for a, value in wanted.items())]

    def ranks(self, direction: str = "forward") -> tuple[int, ...]:
        """The ranks that have items of this pass."""
        return tuple(sorted({item.rank for item in self._items if item.direction == direction}))

    def whole(self, name: str) -> list[torch.Tensor]:
        """An input or a result in global positions: for every sequence its real tokens, [len, h, d] or [len, h].

        Args:
            name: "q", "k", "v", "dout", "out", "lse", "dq", "dk" or "dv". Rows of ranks that are not here are NaN.
        """
        check_choice("name", name, list(WHOLE))
        if self.problem is None:
            return []
        direction, kind = WHOLE[name]
        items, side = self.select(direction, kind=kind, name=name), side_of(name)
        starts, counts = self.problem.starts(side), self.problem.lengths.tokens(side)
        shape, dtype = (items[0].tensor.shape[1:], items[0].tensor.dtype) if items else ((), torch.float32)
        x = torch.full((starts[-1], *shape), float("nan"), dtype=dtype)
        for item in items:
            if item.piece is not None:
                x[item.piece.start : item.piece.stop] = item.tensor
        return [x[start : start + count] for start, count in zip(starts, counts, strict=False)]

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a file, for `Trace.load`."""
        write_content(path, Content(self.call, self.problem, self.schedule, self.calls, self.items))

    @staticmethod
    def load(*paths: str | PathLike[str]) -> Trace:
        """Read a saved trace, or several that belong together: one a process, brought together as by `merge`.

        A path may be a pattern: `Trace.load("run-*.pt")`.

        Raises:
            OSError: there is no such file. ValueError: a file holds no trace, or they do not belong together.
        """
        files = [file for path in paths for file in (sorted(glob.glob(str(path))) or [str(path)])]
        return Trace.merge(*(Trace(*read_content(file)) for file in files))

    @staticmethod
    def merge(*traces: Trace) -> Trace:
        """Make one trace of several ranks' traces of the same call.

        Raises:
            ValueError: they are of different problems or calls, or two of them have the same rank.
        """
        traces = tuple(t for t in traces if t.problem is not None)
        if not traces:
            return Trace()
        first = traces[0]
        merged = Trace(first.call, first.problem, first.schedule)
        for t in traces:
            if (t.call, str(t.problem), str(t.schedule)) != (first.call, str(first.problem), str(first.schedule)):
                raise ValueError(
                    f"traces of different calls do not belong together: call {first.call} of {first.problem} "
                    f"and call {t.call} of {t.problem}"
                )
            for direction in DIRECTIONS:
                if both := set(merged.ranks(direction)) & set(t.ranks(direction)):
                    raise ValueError(f"two of the traces have rank {min(both)}; each rank may be in one of them")
            merged._items += t._items
            merged.calls |= t.calls
        return merged

    def __str__(self) -> str:
        """A table of contents: one line for every step and kind of item."""
        if self.problem is None or self.schedule is None:
            made = max(self.calls.values(), default=0)
            return f"an empty trace: it waits for attention call {self.call}, and {made} were made while it recorded"
        size = sum(i.tensor.numel() * i.tensor.element_size() for i in self._items)
        lines = [
            f"trace of {title(self.problem, self.schedule)}",
            f"{self.problem}",
            f"call {self.call} of {max(self.calls.values(), default=self.call + 1)}, {len(self)} items, {size:,} bytes",
        ]
        groups: dict[tuple[str, int, str], list[Item]] = {}
        for item in self.items:
            groups.setdefault((item.direction, item.step, item.kind), []).append(item)
        for direction in DIRECTIONS:
            shown = -1
            for step, kind in sorted((s, EVENTS.index(k)) for d, s, k in groups if d == direction):
                lines += [] if shown >= 0 else ["", direction]
                lines.append(_row(step, step != shown, groups[direction, step, EVENTS[kind]]))
                shown = step
        return "\n".join(lines)


def _row(step: int, first: bool, items: list[Item]) -> str:
    """A line of the table of contents."""
    kind = items[0].kind
    at = "the end" if kind in ("merged", "final") else f"step {step}"
    names = " ".join(dict.fromkeys(item.name for item in items))
    ranks = " ".join(map(str, sorted({item.rank for item in items})))
    return f"  {at if first else '':<8} {kind:<8}  {names:<20}  {len(items):>5} items  ranks {ranks}"
