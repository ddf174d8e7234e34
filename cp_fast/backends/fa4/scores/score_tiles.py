"""Scores of one tile, as a thread of a kernel holds it: some rows and columns of scores in registers.

A value that all columns of a row share, such as the row's place or what it loads by its place, is computed once for
the row; likewise for columns. Python runs these loops while the kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from cp_fast.backends.fa4.scores.cute_operations import constant, operations, select
from cp_fast.backends.fa4.scores.cute_philox import philox4x32
from cp_fast.backends.fa4.scores.expressions import FLOAT, PAIR, ROW, Expression
from cp_fast.backends.fa4.scores.library_modules import library
from cp_fast.backends.fa4.scores.score_program import ScoreProgram

__all__ = ["Tile", "Values", "launch_tensors"]


class Tile:
    """The places of a tile's rows and columns, and the tensors of the launch.

    Args:
        rows: the query in its segment and the query head, of each row; Int32.
        columns: the key in its segment, of each column.
        batch_idx: the segment's number.
        aux_data: the library's record of tensors and numbers: `launch_tensors`, and the launch's first query head.
        rows_apart: whether rows lie as a tensor core's rows (n, n + 8), and columns as its columns (n, n + 1, n + 8,
            ...); otherwise the reverse.
    """

    def __init__(
        self,
        program: ScoreProgram,
        rows: Sequence[tuple[Any, Any]],
        columns: Sequence[Any],
        batch_idx: Any,
        seqlen: Any,
        aux_data: Any,
        *,
        rows_apart: bool,
    ) -> None:
        self._program, self._rows, self._columns = program, rows, columns
        self._batch, self._seqlen, self._rows_apart = batch_idx, seqlen, rows_apart
        self._tensors = dict(zip(launch_tensors(program), aux_data.tensors, strict=True))
        self._sizes = dict(program.traced.sizes)
        (self._first_head,) = aux_data.scalars
        self._leaves: dict[tuple[str, int], Any] = {}

    @property
    def order(self) -> list[tuple[int, int]]:
        """All pairs (row, column), neighbours along the shorter side."""
        n, m = range(len(self._rows)), range(len(self._columns))
        return [(r, c) for r in n for c in m] if len(n) > len(m) else [(r, c) for c in m for r in n]

    def leaf(self, name: str, row: int, column: int) -> Any:
        """The place of a row or of a column."""
        number = column if name == "kv_idx" else row
        if (name, number) not in self._leaves:
            self._leaves[name, number] = self._place(name, number)
        return self._leaves[name, number]

    def load(self, name: str, indices: Sequence[Any], kind: str, refused: list[Any]) -> Any:
        """An element of a captured tensor. Negative indices count from the end. One outside gives NaN, or for another
        kind than float adds its condition to `refused`.
        """
        int32 = library("cutlass").Int32
        tensor, later = self._tensors[name], self._sizes[name]
        inside, place = None, int32(0)
        for size, index in zip((tensor.shape[0] // prod(later), *later), indices, strict=True):
            size, index = int32(size), int32(index)
            index = select(index < 0, index + size, index)
            fits = (index >= 0) & (index < size)
            inside = fits if inside is None else inside & fits
            place = place * size + index
        value = tensor[place if inside is None else select(inside, place, int32(0))]
        value = operations()["convert"](kind, value)
        if inside is None:
            return value
        if kind == FLOAT:
            return select(inside, value, constant(float("nan"), FLOAT))
        refused.append(inside)
        return value

    def _place(self, name: str, number: int) -> Any:
        int32, smaller = library("cutlass").Int32, library("cutlass").min
        if name == "h":
            return self._rows[number][1] + int32(self._first_head)
        if self._program.places.by_segment:
            table, line = self._tensors["places"], {"b": 0, "q_idx": 1, "diagonal": 2, "kv_idx": 3}[name]
            first = int32(table[line * (table.shape[0] // 4) + self._batch])
            local = 0 if name == "b" else self._columns[number] if name == "kv_idx" else self._rows[number][0]
            return first + local
        if name == "kv_idx":  # Blocks reach past a segment's end.
            inside = smaller(self._columns[number], self._seqlen.seqlen_k - 1)
            return int32(self._tensors[name][self._seqlen.offset_k + inside])
        inside = smaller(self._rows[number][0], self._seqlen.seqlen_q - 1)
        return int32(self._tensors[name][self._seqlen.offset_q + inside])

    def kept(self) -> dict[tuple[int, int], Any]:
        """Which pairs dropout keeps: Boolean scalars."""
        uint32 = library("cutlass").Uint32
        seed = self._tensors["seed"]
        key = uint32(seed[0]), uint32(seed[1])
        least = uint32(round(self._program.dropout_p * 2**32))
        drawn: dict[tuple[int, int], tuple[Any, ...]] = {}
        kept: dict[tuple[int, int], Any] = {}
        for r, c in self.order:
            group, word = self._group(r, c)
            if group is None:
                kept[r, c] = self._word(r, c, key) >= least
                continue
            if group not in drawn:
                drawn[group] = philox4x32(self._counter(r, c), key)
            kept[r, c] = drawn[group][word] >= least
        return kept

    def _group(self, r: int, c: int) -> tuple[tuple[int, int] | None, int]:
        """The pairs of a thread that share a counter, where the compiler knows it, and the word's number. In a tensor
        core's tile rows are n, n + 8 and columns n, n + 1, n + 8, n + 9, ..., from a multiple of 16.
        """
        apart, along = (r, c) if self._rows_apart else (c, r)
        if not self._program.places.aligned or (len(self._columns if self._rows_apart else self._rows) % 4):
            return None, 0
        step = (apart % 2, along // 2 % 2) if self._rows_apart else (along // 2 % 2, apart % 2)
        return (apart // 2, along // 4 * 2 + along % 2), 2 * step[0] + step[1]

    def _counter(self, r: int, c: int) -> tuple[Any, Any, Any, Any]:
        uint32 = library("cutlass").Uint32
        b, h, i, j = (self.leaf(name, r, c) for name in ("b", "h", "q_idx", "kv_idx"))
        blocks = [(x >> 4) * 8 + (x & 7) for x in (j, i)]
        return tuple(uint32(x) for x in (*blocks, h, b))  # type: ignore[return-value]

    def _word(self, r: int, c: int, key: tuple[Any, Any]) -> Any:
        words = philox4x32(self._counter(r, c), key)
        i, j = self.leaf("q_idx", r, c), self.leaf("kv_idx", r, c)
        lower = select((j & 8) != 0, words[1], words[0])
        upper = select((j & 8) != 0, words[3], words[2])
        return select((i & 8) != 0, upper, lower)


class Values:
    """An expression's values in a tile."""

    def __init__(self, expression: Expression, tile: Tile) -> None:
        self._expression, self._tile, self._levels = expression, tile, expression.levels
        self._shared: dict[tuple[int, int, int], Any] = {}

    def at(self, row: int, column: int, **given: Any) -> Any:
        """The result for one pair; given: its score, and its gradient."""
        values = list[Any]()
        refused = list[Any]()
        for number, node in enumerate(self._expression.nodes):
            level = self._levels[number]
            key = (number, row if level & ROW else -1, column if level & (PAIR - ROW) else -1)
            if level != PAIR and key in self._shared:
                value, outside = self._shared[key]
            else:
                outside = list[Any]()
                inputs = [values[n] for n in node.inputs]
                if node.op == "leaf":
                    value = given[node.value] if node.value in given else self._tile.leaf(node.value, row, column)
                elif node.op == "constant":
                    value = constant(node.value, node.kind)
                elif node.op == "load":
                    value = self._tile.load(node.value, inputs, node.kind, outside)
                else:
                    value = operations()[node.op](node.kind, *inputs)
                if level != PAIR:
                    self._shared[key] = value, outside
            refused += outside
            values.append(value)
        result = values[self._expression.result]
        for inside in refused:
            result = select(inside, result, constant(float("nan"), FLOAT))
        return result


def launch_tensors(program: ScoreProgram) -> list[str]:
    """The names of the tensors that a launch passes to the library, in order."""
    places = ["places"] if program.places.by_segment else ["b", "q_idx", "diagonal", "kv_idx"]
    return [*places, *(["seed"] if program.dropout_p else []), *program.traced.captured]
