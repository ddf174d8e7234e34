"""The buffers of one pass in calls of one shape: their sizes, and functions that take or allocate their tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cp_fast.compile.program import BufferSpec, Copy, Program, View, writes
from cp_fast.movers.mover_protocol import Movers, Rows
from cp_fast.runtime.row_selection import columns_of, count, is_all, rows_of
from cp_fast.runtime.tensors import Shapes, State, Tensors

__all__ = ["MISSING", "PassBuffers"]

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
    kernels: Movers
    written_once: frozenset[int]
    zeroed: frozenset[int]

    @staticmethod
    def of(program: Program[Rows], shapes: Shapes, kernels: Movers) -> PassBuffers:
        """The buffers of a program."""
        times = Counter(number for one in program.instructions for number in writes(one))
        once = frozenset(number for number, n in times.items() if n == 1)
        return PassBuffers(program.buffers, shapes, kernels, once, _zeroed(program, shapes))

    def rows(self, view: View[Rows]) -> Rows:
        """The rows of a view."""
        return slice(0, self.shapes.rows(self.specs[view.buffer])) if view.rows is None else view.rows

    def is_whole(self, view: View[Rows]) -> bool:
        """Whether a view has all rows and heads of its buffer."""
        all_rows = view.rows is None or is_all(view.rows, self.shapes.rows(self.specs[view.buffer]))
        return all_rows and view.heads == self.specs[view.buffer].all_heads

    def taker(self, view: View[Rows]) -> Callable[[State], Tensors]:
        """Rows and heads of a buffer, contiguous. The last rows gathered from an own buffer are kept: a ring needs the
        same ones at every step.
        """
        number, rows, heads, gather = view.buffer, self.rows(view), view.heads, self.kernels.gather
        if self.is_whole(view):

            def whole(state: State) -> Tensors:
                found = state.buffers[number]
                assert found is not None, MISSING
                return found

            return whole
        own = self.specs[number].role == "own"
        sliced = isinstance(rows, slice) and heads == self.specs[number].all_heads
        key = (rows.start, rows.stop, heads) if isinstance(rows, slice) else (id(rows), heads)

        def part(state: State) -> Tensors:
            held = state.buffers[number]
            assert held is not None, MISSING
            if own and (last := state.gathered.get(number)) is not None and last[0] == key:
                return last[1]
            found = [x[rows] for x in held.rows] if sliced else rows_of(held.rows, rows, heads, gather)
            columns = columns_of(held.columns, rows, heads) if held.columns else ()
            taken = Tensors([x.contiguous() for x in found], columns)
            if own:
                state.gathered[number] = key, taken
            return taken

        return part

    def maker(self, number: int) -> Callable[[State], Tensors]:
        """A function that allocates a buffer."""
        allocation = self.shapes.allocation(self.specs[number])
        allocate = allocation.nothing if number in self.zeroed else allocation.empty

        def new(state: State) -> Tensors:
            made = state.buffers[number] = allocate()
            return made

        return new


def _zeroed(program: Program[Rows], shapes: Shapes) -> frozenset[int]:
    """Results and joined sums with cells that no copy writes: they begin with zeros."""
    heads: dict[int, int] = {}
    for copy in program.of(Copy):
        number, spec = copy.target.buffer, program.buffers[copy.target.buffer]
        if spec.role in ("result", "sum") and not shapes.spare_rows:
            of_each = program.buffers[copy.source.buffer].heads
            all_rows = copy.target.rows is None or count(copy.target.rows) == shapes.rows(spec)
            size = (of_each[1] - of_each[0]) * max(len(copy.first_heads), 1)
            heads[number] = heads.get(number, 0) + size * all_rows
    return frozenset(
        number
        for number, spec in enumerate(program.buffers)
        if spec.role in ("result", "sum") and heads.get(number, 0) < spec.all_heads[1]
    )
