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

import torch

from cp_ref.spec import Problem, Schedule, check_choice, side_of
from cp_ref.spec.pictures.problem_title import title
from cp_ref.tracing.trace_files import Content, read_content, write_content
from cp_ref.tracing.trace_items import DIRECTIONS, KINDS, WHOLE, Item

__all__ = ["Trace"]


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
