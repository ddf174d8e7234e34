"""Scores of one tile, as a thread of a kernel holds it: some rows and columns of scores in registers.

A value that all columns of a row share, such as the row's place or what it loads by its place, is computed once for
the row; likewise for columns. Python runs these loops while the kernel is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from math import prod
from typing import Any

from cp_fast.kernels.attention.fa4.scores.expressions import BOOL, FLOAT, INT, LONG, PAIR, ROW, Expression
from cp_fast.kernels.attention.fa4.scores.launch_program import ScoreProgram

__all__ = [
    "ScoreTile",
    "Values",
    "constant",
    "launch_tensors",
    "library",
    "operations",
    "philox4x32",
    "select",
]

# ---- the library's modules
#
# The library's modules, imported on first use: the import takes seconds, and most machines have no such library.


@cache
def library(name: str) -> Any:
    """A module of FlashAttention 4, or of what it is written with (`cutlass`, `quack`).

    >>> library("math").sqrt(4.0)
    2.0
    """
    return import_module(name)


# ---- expressions in CuTe
#
# Expressions in CuTe: the value of each node is a scalar of the library's language.
#
# Kinds are Float32, Int32, Int64 and Boolean. Whole numbers are divided as in PyTorch: `//` rounds down, and `%` has
# the divisor's sign. tanh and sigmoid are made of exp2 and a reciprocal, to float32's accuracy.


_LOG2_E, _LN_2 = math.log2(math.e), math.log(2.0)


def _types() -> dict[str, Any]:
    cutlass = library("cutlass")
    return {FLOAT: cutlass.Float32, INT: cutlass.Int32, LONG: cutlass.Int64, BOOL: cutlass.Boolean}


def constant(value: float, kind: str) -> Any:
    """A number as a scalar."""
    return _types()[kind](value)


def select(condition: Any, this: Any, other: Any) -> Any:
    """One of two scalars of one type."""
    kind = type(this)
    values = (one.ir_value() for one in (_types()[BOOL](condition), this, kind(other)))
    chosen = library("cutlass._mlir.dialects.arith").select(*values)
    return kind(chosen)


@cache
def operations() -> Mapping[str, Callable[..., Any]]:
    """Op -> function of the node's kind and of its inputs."""
    types, maths = _types(), library("cutlass.cute").math

    def convert(kind: str, x: Any) -> Any:
        if kind == BOOL:
            return x != 0
        if type(x) is types[BOOL]:
            return select(x, types[kind](1), types[kind](0))
        return types[kind](x)

    def floor_div(kind: str, a: Any, b: Any) -> Any:
        if kind == FLOAT:
            return maths.floor(a / b)
        quotient = _toward_zero(a, b)
        return quotient - _one_if((a - quotient * b != 0) & ((a < 0) != (b < 0)), types[kind])

    def mod(kind: str, a: Any, b: Any) -> Any:
        if kind == FLOAT:
            return a - b * maths.floor(a / b)
        rest = a - _toward_zero(a, b) * b
        return rest + select((rest != 0) & ((rest < 0) != (b < 0)), b, types[kind](0))

    def exp2(_: str, x: Any) -> Any:
        return maths.exp2(x, fastmath=True)

    def exp(kind: str, x: Any) -> Any:
        return exp2(kind, x * _LOG2_E)

    def log2(_: str, x: Any) -> Any:
        return maths.log2(x, fastmath=True)

    def reciprocal(x: Any) -> Any:
        return types[FLOAT](1.0) / x

    def tanh(kind: str, x: Any) -> Any:
        return 1.0 - 2.0 * reciprocal(1.0 + exp2(kind, x * (2 * _LOG2_E)))

    def smaller(_: str, a: Any, b: Any) -> Any:  # NaN stays, as in PyTorch.
        return select((a < b) | (a != a), a, b)

    def larger(_: str, a: Any, b: Any) -> Any:
        return select((a > b) | (a != a), a, b)

    def negated(kind: str, x: Any) -> Any:
        return ~x if kind != BOOL else select(x, types[BOOL](False), types[BOOL](True))

    return {
        "convert": convert,
        "add": lambda _, a, b: a + b,
        "sub": lambda _, a, b: a - b,
        "mul": lambda _, a, b: a * b,
        "div": lambda _, a, b: a / b,
        "floor_div": floor_div,
        "mod": mod,
        "neg": lambda kind, x: types[kind](0) - x if kind != FLOAT else x * -1.0,
        "abs": lambda _, x: select(x < 0, x * -1, x),
        "minimum": smaller,
        "maximum": larger,
        "where": lambda _, condition, a, b: select(condition, a, b),
        "eq": lambda _, a, b: a == b,
        "ne": lambda _, a, b: a != b,
        "lt": lambda _, a, b: a < b,
        "le": lambda _, a, b: a <= b,
        "gt": lambda _, a, b: a > b,
        "ge": lambda _, a, b: a >= b,
        "and": lambda _, a, b: a & b,
        "or": lambda _, a, b: a | b,
        "xor": lambda _, a, b: a ^ b,
        "not": negated,
        "exp": exp,
        "exp2": exp2,
        "log": lambda kind, x: log2(kind, x) * _LN_2,
        "log2": log2,
        "sqrt": lambda _, x: maths.sqrt(x),
        "rsqrt": lambda _, x: maths.rsqrt(x),
        "sin": lambda _, x: maths.sin(x),
        "cos": lambda _, x: maths.cos(x),
        "tanh": tanh,
        "sigmoid": lambda kind, x: reciprocal(1.0 + exp(kind, x * -1.0)),
    }


def _one_if(condition: Any, kind: Any) -> Any:
    return select(condition, kind(1), kind(0))


def _toward_zero(a: Any, b: Any) -> Any:
    """The quotient of whole numbers, rounded toward zero."""
    return type(a)(library("cutlass._mlir.dialects.arith").divsi(a.ir_value(), b.ir_value()))


# ---- the random words of dropout
#
# The random words of dropout in CuTe: `cp_ref.calls.scores` on 32-bit registers.
#
# Counters that a tile's rows or columns share need no thought here: the compiler computes equal products once.


_ROUNDS = 7
_FACTORS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """The four words of a counter under a key: Uint32 scalars, as their inputs."""
    uint32 = library("cutlass").Uint32
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for number in range(_ROUNDS):
        high0, low0 = _product(c0, _FACTORS[0])
        high1, low1 = _product(c2, _FACTORS[1])
        now0, now1 = (k + uint32(weyl * number & 0xFFFFFFFF) for k, weyl in zip((k0, k1), _WEYL, strict=True))
        c0, c1, c2, c3 = high1 ^ c1 ^ now0, low1, high0 ^ c3 ^ now1, low0
    return c0, c1, c2, c3


def _product(a: Any, factor: int) -> tuple[Any, Any]:
    """The high and the low 32 bits."""
    uint32, uint64 = library("cutlass").Uint32, library("cutlass").Uint64
    product = uint64(a) * uint64(factor)
    return uint32(product >> uint64(32)), uint32(product)


# ---- one tile


class ScoreTile:
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

    def kept_by_dropout(self) -> dict[tuple[int, int], Any]:
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

    def __init__(self, expression: Expression, tile: ScoreTile) -> None:
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
