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
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, NamedTuple

import torch

from cp_ref.spec import Problem, Schedule, check_choice
from cp_ref.spec.pictures.problem_title import title
from cp_ref.tracing.trace_files import DIRECTIONS, KINDS, OF_KEYS, read_content

__all__ = ["DIRECTIONS", "KINDS", "OF_KEYS", "WHOLE", "Item", "Piece", "Trace"]

# the places of a call's inputs and results
WHOLE = {
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
        return DIRECTIONS.index(self.direction), self.step, self.rank, KINDS.index(self.kind)

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
        items, lengths, on_kv = self.select(direction, kind=kind, name=name), self.problem.lengths, name in OF_KEYS
        starts, counts = (self.problem.starts_kv, lengths.len_kv) if on_kv else (self.problem.starts_q, lengths.len_q)
        shape, dtype = (items[0].tensor.shape[1:], items[0].tensor.dtype) if items else ((), torch.float32)
        x = torch.full((starts[-1], *shape), float("nan"), dtype=dtype)
        for item in items:
            if item.piece is not None:
                x[item.piece.start : item.piece.stop] = item.tensor
        return [x[start : start + count] for start, count in zip(starts, counts, strict=False)]

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a file, for `Trace.load`."""
        content: dict[str, Any] = {
            "call": self.call,
            "problem": str(self.problem or ""),
            "schedule": str(self.schedule or ""),
            "calls": self.calls,
            "items": [_pack(item) for item in self.items],
        }
        with open(path, "wb") as file:
            torch.save(content, file)

    @staticmethod
    def load(*paths: str | PathLike[str]) -> Trace:
        """Read a saved trace, or several that belong together: one a process, brought together as by `merge`.

        A path may be a pattern: `Trace.load("run-*.pt")`.

        Raises:
            OSError: there is no such file. ValueError: a file holds no trace, or they do not belong together.
        """
        files = [file for path in paths for file in (sorted(glob.glob(str(path))) or [str(path)])]
        return Trace.merge(*(_read(file) for file in files))

    @staticmethod
    def merge(*traces: Trace) -> Trace:
        """One trace of several ranks' traces of the same call.

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
            for step, kind in sorted((s, KINDS.index(k)) for d, s, k in groups if d == direction):
                lines += [] if shown >= 0 else ["", direction]
                lines.append(_row(step, step != shown, groups[direction, step, KINDS[kind]]))
                shown = step
        return "\n".join(lines)


def _row(step: int, first: bool, items: list[Item]) -> str:
    """A line of the table of contents."""
    kind = items[0].kind
    at = "the end" if kind in ("merged", "final") else f"step {step}"
    names = " ".join(dict.fromkeys(item.name for item in items))
    ranks = " ".join(map(str, sorted({item.rank for item in items})))
    return f"  {at if first else '':<8} {kind:<8}  {names:<20}  {len(items):>5} items  ranks {ranks}"


def _pack(item: Item) -> dict[str, Any]:
    """An item as plain values, which `torch.load` reads without running any code."""
    piece = item.piece and tuple(item.piece)
    values = {name: getattr(item, name) for name in ("direction", "step", "rank", "kind", "source", "name", "tensor")}
    return values | {"piece": piece}


def _read(path: str) -> Trace:
    content = read_content(path)
    items: list[Item] = []
    for values in content.items:
        fields: dict[str, Any] = {**values, "piece": None if values["piece"] is None else Piece(*values["piece"])}
        items.append(Item(**fields))
    return Trace(content.call, content.problem, content.schedule, content.calls, items)
