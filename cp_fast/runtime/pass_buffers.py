"""The buffers of one pass: their tensors and sizes, and functions that take or allocate them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

import torch

from cp_fast.compile.program import BufferSpec, Copy, Launch, Program, View, writes
from cp_fast.kernels.attention.backend_protocol import LaunchOptions
from cp_fast.movers.mover_protocol import Movers, Rows
from cp_ref.batches.tensors import wide_dtype
from cp_ref.calls.scores import ScoreTensors
from cp_ref.groups.group import Group, Pending
from cp_ref.schedules.problem import ScoreSpec

__all__ = [
    "MISSING",
    "Allocation",
    "Operation",
    "PassBuffers",
    "Shapes",
    "State",
    "Tensors",
    "columns_of",
    "count",
    "is_all",
    "is_mask",
    "put_columns",
]

# ---- rows and columns of tensors
#
# A selection of rows takes rows of tensors by row, and columns of tensors by column.


def is_all(rows: Rows, size: int) -> bool:
    """Whether these are all `size` rows, in their order.

    >>> is_all(slice(0, 3), 3), is_all(slice(1, 3), 3), is_all(torch.arange(3), 3)
    (True, False, False)
    """
    return isinstance(rows, slice) and (rows.start, rows.stop) == (0, size)


def count(rows: Rows) -> int:
    """The number of rows.

    >>> count(slice(2, 5)), count(torch.tensor([4, 0]))
    (3, 2)
    """
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def columns_of(tensors: Sequence[torch.Tensor], rows: Rows, heads: slice | None) -> list[torch.Tensor]:
    """Rows and heads of LSEs [h, t], with rows on the second axis; contiguous."""
    found: list[torch.Tensor] = []
    for x in tensors:
        if heads is not None:
            x = x[heads]
        found.append((x[:, rows] if isinstance(rows, slice) else x.index_select(1, rows)).contiguous())
    return found


def put_columns(
    into: torch.Tensor,
    x: torch.Tensor,
    rows: Rows,
    scatter: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Rows], None],
) -> None:
    """Write x [h, n] to rows of an LSE [h, t]. scatter: that of `Movers`, whose indices are int32."""
    if isinstance(rows, slice):
        into[:, rows] = x
    else:
        scatter([into.t()], [x.t()], rows)


def is_mask(rows: Rows) -> TypeGuard[torch.Tensor]:
    """Whether these are not row numbers but a mask of all rows, bool [t].

    >>> is_mask(torch.tensor([True, False])), is_mask(torch.tensor([0])), is_mask(slice(0, 1))
    (True, False, False)
    """
    return isinstance(rows, torch.Tensor) and rows.dtype == torch.bool


# ---- the tensors of a buffer
#
# The tensors of buffers: their shapes, their allocation, and views of their rows and heads.


class Tensors(NamedTuple):
    """The tensors of a buffer: by row [n, h, d] (stacked: [parts, n, h, d]), by column [h, n] (stacked: one a part)."""

    rows: Sequence[torch.Tensor]
    columns: Sequence[torch.Tensor]


_PLAIN = LaunchOptions(ScoreSpec(1.0))  # of a pass without launches


@dataclass(slots=True, eq=False)
class State:
    """One call of a pass: the tensors of its buffers, and the messages in flight.

    Attributes:
        buffers: their `Tensors`, or None before and after their use.
        group: of the messages.
        score_tensors: the call's, of scores that depend on the places of their rows and heads; else None.
        gathered: the last rows gathered from each own buffer.
        pending: the messages under way.
        arrived: columns to be filled once messages arrive.
        max_logit: of each launch the first head, and the logits.
    """

    buffers: list[Any]
    group: Group
    options: LaunchOptions = _PLAIN
    score_tensors: ScoreTensors | None = None
    gathered: dict[int, tuple[Any, Tensors]] = field(default_factory=dict)
    pending: Pending | None = None
    arrived: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    max_logit: list[tuple[int, torch.Tensor | None]] = field(default_factory=list)


Operation = Callable[[State], None]


@lru_cache
def _new_empty(dtype: torch.dtype, device: torch.device) -> Callable[[Sequence[int]], torch.Tensor]:
    """A function that allocates tensors of a shape, as `torch.empty` does, which reads a dtype and a device each time.

    >>> _new_empty(torch.float16, torch.device("cpu"))((2, 3)).shape
    torch.Size([2, 3])
    """
    return torch.empty(0, dtype=dtype, device=device).new_empty


class Allocation(NamedTuple):
    """The shapes and dtypes of a buffer's tensors. `dtypes`: one for each tensor by row."""

    rows: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    wide: torch.dtype
    device: torch.device

    def maker(self, dtypes: Sequence[torch.dtype] = ()) -> Callable[[], Tensors]:
        """A function that allocates tensors with any values. `dtypes`: other ones."""
        rows, columns, usual, wide, device = self
        by_row = [(_new_empty(dtype, device), shape) for shape, dtype in zip(rows, dtypes or usual, strict=True)]
        by_column = [(_new_empty(wide, device), shape) for shape in columns]
        if not by_column:
            return lambda: Tensors([new(shape) for new, shape in by_row], ())
        return lambda: Tensors([new(shape) for new, shape in by_row], [new(shape) for new, shape in by_column])

    def nothing(self, dtypes: Sequence[torch.dtype] = ()) -> Tensors:
        """The result of no pairs: zeros, and an lse of -inf. `dtypes`: other ones."""
        return Tensors(
            [
                torch.zeros(shape, dtype=dtype, device=self.device)
                for shape, dtype in zip(self.rows, dtypes or self.dtypes, strict=True)
            ],
            [torch.full(shape, float("-inf"), dtype=self.wide, device=self.device) for shape in self.columns],
        )


@dataclass(frozen=True)
class Shapes:
    """The sizes shared by all calls of one shape.

    Attributes:
        sizes: by kind, how many rows the rank's own tensors have.
        axes: by kind, the sizes of a row's axes in each tensor by row; -1 for the heads of the buffer.
        dtypes: by kind, the dtypes of the tensors by row.
        spare_rows: see `Programs`.
        with_column: the kinds that have a tensor by column besides.
    """

    sizes: Mapping[str, int]
    axes: Mapping[str, Sequence[Sequence[int]]]
    dtypes: Mapping[str, tuple[torch.dtype, ...]]
    device: torch.device
    spare_rows: int = 0
    with_column: frozenset[str] = frozenset()

    def rows(self, spec: BufferSpec) -> int:
        """The rows of a buffer, spare ones included."""
        written = spec.role in ("operand", "sum", "result") and not spec.parts
        rows = self.own_rows(spec) if spec.rows is None else spec.rows
        return rows + written * self.spare_rows

    def own_rows(self, spec: BufferSpec) -> int:
        """The rows of the rank's own tensors of this kind."""
        return self.sizes[spec.kind]

    def allocation(self, spec: BufferSpec, rows: int | None = None, *, stacked: bool = True) -> Allocation:
        """The allocation of a buffer, or of a message with this many of its rows, of one part if it is stacked."""
        n, heads = self.rows(spec) if rows is None else rows, spec.all_heads[1]
        parts = (spec.parts,) if spec.parts and stacked else ()
        by_row = tuple((*parts, n, *(heads if d < 0 else d for d in axes)) for axes in self.axes[spec.kind])
        has_column = spec.kind in self.with_column
        dtypes = self.dtypes[spec.kind]
        wide = wide_dtype(*dtypes)
        dtypes = (wide,) * len(dtypes) if spec.dtype == "wide" else dtypes
        return Allocation(by_row, ((heads, n),) * (has_column * (parts or (1,))[0]), dtypes, wide, self.device)


# ---- the buffers of a pass


MISSING = "a buffer is read before it was filled, or after it was freed"


@dataclass(frozen=True)
class PassBuffers:
    """The buffers of one pass.

    Attributes:
        specs: the specifications, by number.
        written_once: buffers written by only one instruction.
        zeroed: buffers with cells that are never written.
    """

    specs: Sequence[BufferSpec]
    shapes: Shapes
    movers: Movers
    written_once: frozenset[int]
    zeroed: frozenset[int]

    @staticmethod
    def of(program: Program[Rows], shapes: Shapes, movers: Movers) -> PassBuffers:
        """The buffers of a program."""
        times = Counter(number for one in program.instructions for number in writes(one))
        once = frozenset(number for number, n in times.items() if n == 1)
        return PassBuffers(program.buffers, shapes, movers, once, _zeroed(program, shapes))

    def rows(self, view: View[Rows]) -> Rows:
        """The rows of a view."""
        return slice(0, self.shapes.rows(self.specs[view.buffer])) if view.rows is None else view.rows

    def heads(self, view: View[Rows]) -> slice | None:
        """The heads of a view; None for all of its buffer."""
        return None if view.heads == self.specs[view.buffer].all_heads else slice(*view.heads)

    def is_whole(self, view: View[Rows]) -> bool:
        """Whether a view has all rows and heads of its buffer."""
        all_rows = view.rows is None or is_all(view.rows, self.shapes.rows(self.specs[view.buffer]))
        return all_rows and view.heads == self.specs[view.buffer].all_heads

    def part(self, view: View[Rows]) -> Callable[[Tensors], Tensors]:
        """A function that takes rows and heads of a buffer's tensors: of those by row views if possible."""
        rows, heads, gather = self.rows(view), self.heads(view), self.movers.gather
        index = None if isinstance(rows, slice) else rows
        cut = rows if isinstance(rows, slice) and not is_all(rows, self.shapes.rows(self.specs[view.buffer])) else None
        if heads is not None:
            cut = cut or slice(None), heads

        def part(held: Tensors) -> Tensors:
            found = held.rows if cut is None else [x[cut] for x in held.rows]
            if index is not None:
                found = gather(found, index)
            return Tensors(found, columns_of(held.columns, rows, heads) if held.columns else ())

        return part

    def taker(self, view: View[Rows], *, strided: bool = False) -> Callable[[State], Tensors]:
        """Rows and heads of a buffer; contiguous, or where a slice of the buffer may be `strided`. The last rows
        gathered from an own buffer are kept: a ring needs the same ones at every step.
        """
        number, rows, part = view.buffer, self.rows(view), self.part(view)
        is_whole, own, is_cut = self.is_whole(view), self.specs[number].role == "own", isinstance(rows, slice)
        key = (rows.start, rows.stop, view.heads) if isinstance(rows, slice) else (id(rows), view.heads)

        def take(state: State) -> Tensors:
            held = state.buffers[number]
            assert held is not None, MISSING
            if is_whole:
                return held
            if is_cut and strided:
                return part(held)
            if own and (last := state.gathered.get(number)) is not None and last[0] == key:
                return last[1]
            taken = part(held)
            if is_cut:
                taken = Tensors([x.contiguous() for x in taken.rows], taken.columns)
            if own:
                state.gathered[number] = key, taken
            return taken

        return take

    def maker(self, number: int) -> Callable[[State], Tensors]:
        """A function that allocates a buffer."""
        allocation = self.shapes.allocation(self.specs[number])
        allocate = allocation.nothing if number in self.zeroed else allocation.maker()

        def new(state: State) -> Tensors:
            made = state.buffers[number] = allocate()
            return made

        return new


def _zeroed(program: Program[Rows], shapes: Shapes) -> frozenset[int]:
    """Results and joined sums with cells that no copy and no launch writes: they begin with zeros."""
    heads: dict[int, int] = {}
    for copy in program.of(Copy):
        number, spec = copy.target.buffer, program.buffers[copy.target.buffer]
        if spec.role in ("result", "sum") and not shapes.spare_rows:
            of_each = program.buffers[copy.source.buffer].heads
            all_rows = copy.target.rows is None or count(copy.target.rows) == shapes.rows(spec)
            size = (of_each[1] - of_each[0]) * max(len(copy.first_heads), 1)
            heads[number] = heads.get(number, 0) + size * all_rows
    heads |= _launched(program, shapes)
    return frozenset(
        number
        for number, spec in enumerate(program.buffers)
        if spec.role in ("result", "sum") and heads.get(number, 0) < spec.all_heads[1]
    )


def _launched(program: Program[Rows], shapes: Shapes) -> dict[int, int]:
    """Results that launches write in place, by number: how many of their heads have all rows."""
    cells: dict[int, int] = {}
    for one in program.of(Launch):
        if one.into is not None:
            size = one.into.heads[1] - one.into.heads[0]
            cells[one.into.buffer] = cells.get(one.into.buffer, 0) + one.batch.cu_q[-1] * size
    return {number: n // max(shapes.rows(program.buffers[number]), 1) for number, n in cells.items()}
