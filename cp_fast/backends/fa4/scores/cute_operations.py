"""Expressions in CuTe: the value of each node is a scalar of the library's language.

Kinds are Float32, Int32, Int64 and Boolean. Whole numbers are divided as in PyTorch: `//` rounds down, and `%` has the
divisor's sign. tanh and sigmoid are made of exp2 and a reciprocal, to float32's accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from cp_fast.backends.fa4.scores.expressions import BOOL, FLOAT, INT, LONG
from cp_fast.backends.fa4.scores.library_modules import library

__all__ = ["constant", "operations", "select"]

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
