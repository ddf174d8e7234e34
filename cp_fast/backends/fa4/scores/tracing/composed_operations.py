"""Operators that become several nodes of an expression."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2
from typing import Any

from cp_fast.backends.fa4.scores.expressions import BOOL, FLOAT, NoExpression
from cp_fast.backends.fa4.scores.tracing.traced_values import TracedValues

__all__ = ["COMPOSED"]

_POWERS = 8  # The largest exponent, in whole numbers; halves too.

Composed = Callable[[TracedValues, str, Sequence[Any]], int]


def _power(values: TracedValues, kind: str, args: Sequence[Any]) -> int:
    """x ** n for a constant n, or c ** x for a constant c > 0."""
    writer, (base, exponent) = values.writer, args[:2]
    if not hasattr(exponent, "op"):
        x, (whole, half) = values.number_of(base, kind), divmod(abs(exponent), 1)
        if half not in (0, 0.5) or whole > _POWERS or ((half or exponent < 0) and kind != FLOAT):
            raise NoExpression(f"the power {exponent}")
        factors = [x] * int(whole) + ([writer.write("sqrt", [x], kind)] if half else [])
        result = factors[0] if factors else writer.constant(1, kind)
        for factor in factors[1:]:
            result = writer.write("mul", [result, factor], kind)
        return result if exponent >= 0 else writer.write("div", [writer.constant(1, kind), result], kind)
    if hasattr(base, "op") or base <= 0 or kind != FLOAT:
        raise NoExpression(f"a power of {base if not hasattr(base, 'op') else 'one tensor by another'}")
    by = writer.constant(log2(base), FLOAT)
    return writer.write("exp2", [writer.write("mul", [values.number_of(exponent, FLOAT), by], FLOAT)], FLOAT)


def _clamp(values: TracedValues, kind: str, args: Sequence[Any]) -> int:
    low, high = args[1] if len(args) > 1 else None, args[2] if len(args) > 2 else None
    x = values.number_of(args[0], kind)
    if low is not None:
        x = values.writer.write("maximum", [x, values.number_of(low, kind)], kind)
    if high is not None:
        x = values.writer.write("minimum", [x, values.number_of(high, kind)], kind)
    return x


def _sign(values: TracedValues, kind: str, args: Sequence[Any]) -> int:
    writer, x = values.writer, values.number_of(args[0], kind)
    zero, one = writer.constant(0, kind), writer.constant(1, kind)
    below = writer.write("where", [writer.write("lt", [x, zero], BOOL), writer.constant(-1, kind), zero], kind)
    return writer.write("where", [writer.write("gt", [x, zero], BOOL), one, below], kind)


def _scaled(first: str | None, factor: float, last: str | None, shift: float = 0.0, before: float = 0.0) -> Composed:
    """last(first(x + before) * factor) + shift."""

    def written(values: TracedValues, kind: str, args: Sequence[Any]) -> int:
        writer, x = values.writer, values.number_of(args[0], kind)
        if before:
            x = writer.write("add", [x, writer.constant(before, kind)], kind)
        x = x if first is None else writer.write(first, [x], kind)
        x = x if factor == 1 else writer.write("mul", [x, writer.constant(factor, kind)], kind)
        x = x if last is None else writer.write(last, [x], kind)
        return writer.write("add", [x, writer.constant(shift, kind)], kind) if shift else x

    return written


def _reversed_sub(values: TracedValues, kind: str, args: Sequence[Any]) -> int:
    return values.writer.write("sub", [values.number_of(x, kind) for x in reversed(args[:2])], kind)


def _reciprocal(values: TracedValues, kind: str, args: Sequence[Any]) -> int:
    one = values.writer.constant(1, kind)
    return values.writer.write("div", [one, values.number_of(args[0], kind)], kind)


def _relu(values: TracedValues, kind: str, args: Sequence[Any]) -> int:
    zero = values.writer.constant(0, kind)
    return values.writer.write("maximum", [values.number_of(args[0], kind), zero], kind)


def _masked_fill(values: TracedValues, kind: str, args: Sequence[Any]) -> int:
    inputs = [values.truth(args[1]), values.number_of(args[2], kind), values.number_of(args[0], kind)]
    return values.writer.write("where", inputs, kind)


COMPOSED: dict[str, Composed] = {
    "pow": _power,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda values, kind, args: _clamp(values, kind, (args[0], None, args[1])),
    "sign": _sign,
    "sgn": _sign,
    "rsub": _reversed_sub,
    "reciprocal": _reciprocal,
    "relu": _relu,
    "masked_fill": _masked_fill,
    "log10": _scaled("log", 0.4342944819032518, None),
    "log1p": _scaled("log", 1.0, None, before=1.0),
    "expm1": _scaled("exp", 1.0, None, shift=-1.0),
}
