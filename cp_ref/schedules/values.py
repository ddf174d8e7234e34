"""Single values of a call's arguments: a word, a count, a number, a window, a flag, a tensor, cumulative lengths; and
the texts of users that hold such values: a call, a TOML file.

Each check raises ValueError (TypeError for a wrong type) with the argument, its value and the rule. Integers may be of
any integer type (numpy's too), except bool.
"""

from __future__ import annotations

import ast
import math
import tomllib
from collections.abc import Sequence as Seq
from itertools import pairwise
from numbers import Integral, Real
from operator import sub
from typing import Any, cast

__all__ = [
    "check_choice",
    "check_data",
    "check_dtype",
    "check_flag",
    "check_lengths",
    "check_one_device",
    "check_tensor",
    "differences",
    "dtype_of",
    "is_dtensor",
    "kind_of",
    "parse_call",
    "parse_toml",
    "read_choice",
    "read_count",
    "read_dropout",
    "read_lengths",
    "read_number",
    "read_several",
    "read_window",
    "refuse_dtensor",
    "shown",
]

MOST = 2**31 - 1  # Heads, dims, sequences, positions: 32 bits.
FURTHEST = 2**62 - 1  # Cumulative lengths and window sides: two of them add up in 64 bits.
MOST_RANKS = 2**12  # Of commands and files: these have the steps of all ranks, which grow with the square of the ranks.
_TOO_DEEP = "it is nested too deeply"
FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # The least and the largest normal number.


def kind_of(value: object) -> str:
    """The kind of a wrong value, in words for an error.

    >>> from fractions import Fraction
    >>> kind_of(None), kind_of(3), kind_of(Fraction(1, 2))
    ('None', 'of type int', 'of type fractions.Fraction')
    """
    kind = type(value)
    return "None" if value is None else f"of type {f'{kind.__module__}.{kind.__qualname__}'.removeprefix('builtins.')}"


def shown(value: Any) -> str:
    """A value in an error; of an integer with hundreds of digits, which Python may refuse to print, its size.

    >>> shown(0.5), shown(-10), shown(10**6000)
    ('0.5', '-10', 'an integer of 19932 bits')
    """
    bits: int = value.bit_length() if isinstance(value, int) else 0
    if bits > 512:
        return f"an integer of {bits} bits"
    try:
        return repr(value)
    except Exception:  # of a class of the user's, or of such an integer inside
        return kind_of(value)


def check_choice(name: str, value: object, choices: Seq[str]) -> None:
    """Raise unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {shown(value)}; it must be one of {', '.join(map(repr, choices))}")


def read_choice(name: str, value: Any, choices: Seq[str]) -> str:
    """One of `choices`."""
    check_choice(name, value, choices)
    return value


def check_flag(name: str, value: object) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)}; it must be True or False")


def check_data(name: str, x: Any) -> None:
    """Raise unless a tensor's values lie in memory at strides: nested, sparse and meta tensors have no such values, and
    a DTensor's lie on several ranks.
    """
    if getattr(x, "is_nested", False) or str(getattr(x, "layout", "torch.strided")) != "torch.strided":
        raise TypeError(f"{name} is a nested or sparse tensor; it must be a strided one")
    if getattr(x, "is_meta", False):
        raise ValueError(f"{name} is on meta; it must be on a device where tensors have values")
    refuse_dtensor(name, x)


def is_dtensor(x: object) -> bool:
    """Whether x is a DTensor, a tensor that PyTorch itself spreads over a mesh."""
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def refuse_dtensor(name: str, x: object) -> None:
    """Raise TypeError for a DTensor: its shape is that of no rank."""
    if is_dtensor(x):
        raise TypeError(
            f"{name} is a DTensor; it must be a plain tensor: {name}.to_local() where a rank's part is asked for, "
            f"{name}.full_tensor() where the whole is"
        )


def dtype_of(x: Any) -> str:
    """The dtype of a tensor, without "torch."; "" for anything else."""
    kind = str(getattr(x, "dtype", ""))
    return kind.removeprefix("torch.") if kind.startswith("torch.") else ""


def check_tensor(name: str, x: Any, what: str = "a tensor") -> None:
    """Raise unless x is a tensor whose values lie in memory. what: it must be.

    >>> check_tensor("q", [1.0], "a tensor [t, h, d]")
    Traceback (most recent call last):
        ...
    TypeError: q is of type list; it must be a tensor [t, h, d]
    """
    if not dtype_of(x):
        raise TypeError(f"{name} is {kind_of(x)}; it must be {what}")
    check_data(name, x)


def check_dtype(name: str, x: Any, *allowed: str, why: str = "") -> None:
    """Raise unless a tensor has one of these dtypes, named without "torch.". why: ends the error."""
    if dtype_of(x) not in allowed:
        *others, last = dict.fromkeys(allowed)
        words = f"{', '.join(others)} or {last}" if others else last
        raise TypeError(f"{name} has dtype {x.dtype}; it must be {words}{why}")


def check_one_device(name: str, x: Any, first: str, like: Any) -> None:
    """Raise unless two tensors are on one device. first: the name of the other one."""
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device} and {first} is on {like.device}; they must be on one device")


def read_count(name: str, value: Any, *, at_least: int, at_most: int = MOST) -> int:
    """An integer within bounds.

    >>> read_count("heads_q", True, at_least=1)
    Traceback (most recent call last):
        ...
    TypeError: heads_q is True; it must be an integer
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {shown(value)}; it must be an integer")
    count = int(value)
    if count < at_least:
        raise ValueError(f"{name} is {shown(count)}; it must be at least {at_least}")
    if count > at_most:
        raise ValueError(f"{name} is {shown(count)}; it must be at most {at_most}")
    return count


def read_several(name: str, value: Any) -> list[Any]:
    """The elements of an iterable.

    >>> read_several("layouts", 3)
    Traceback (most recent call last):
        ...
    TypeError: layouts is 3; it must be a list
    """
    if hasattr(value, "layout"):  # a tensor
        check_data(name, value)
    try:
        return list(value)
    except TypeError:
        raise TypeError(f"{name} is {shown(value)}; it must be a list") from None


def read_number(name: str, value: Any, *, positive: bool) -> float:
    """A finite number that is at least 0 (or positive), and not lost in float32, in which scores are computed.

    >>> read_number("factor", 1e-300, positive=False)
    Traceback (most recent call last):
        ...
    ValueError: factor is 1e-300; it must be finite and at least 0, within the range of float32
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {shown(value)}; it must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    least, largest = FLOAT32
    if not ((number == 0 and not positive) or least <= number <= largest):
        sign = "positive" if positive else "at least 0"
        raise ValueError(f"{name} is {shown(value)}; it must be finite and {sign}, within the range of float32")
    return number


def read_dropout(name: str, value: Any) -> float:
    """A probability that a draw of 32 bits can have.

    >>> read_dropout("dropout_p", 0.1)
    0.1
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {shown(value)}; it must be a number")
    number = float(value) if 0 <= cast(float, value) < 1 else math.inf  # float() fails for integers of 400 digits
    if not (number == 0 or 2.0**-32 <= number <= 1 - 2.0**-32):
        raise ValueError(f"{name} is {shown(value)}; it must be 0, or at least 2**-32 and at most 1 - 2**-32")
    return abs(number)


def read_window(window_size: Any) -> tuple[int, int]:
    """The two sides, integers.

    >>> read_window((4, 0)), read_window([-1, -1])
    ((4, 0), (-1, -1))
    """
    sides = cast("Seq[Any]", window_size) if isinstance(window_size, tuple | list) else ()
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, Integral) for side in sides):
        raise TypeError(f"window_size is {shown(window_size)}; it must be a pair of integers (left, right)")
    left, right = (int(side) for side in sides)
    if min(left, right) < -1 or max(left, right) > FURTHEST:
        raise ValueError(
            f"window_size is {shown(window_size)}; each side must be -1 (unbounded) or from 0 to {FURTHEST}"
        )
    return left, right


def read_lengths(name: str, cu_seqlens: Any) -> list[int] | None:
    """A cumulative length tensor as a list; None stays None."""
    if cu_seqlens is None:
        return None
    check_lengths(name, cu_seqlens)
    values: list[int] = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"{name}[0] is {values[0]}; it must be 0")
    if sorted(values) != values:  # the fastest check if they are already sorted
        n = next(n for n, (a, b) in enumerate(pairwise(values)) if b < a)
        raise ValueError(
            f"{name}[{n + 1}] is {values[n + 1]}, less than {name}[{n}] = {values[n]}; cumulative lengths must not "
            "decrease"
        )
    if values[-1] > FURTHEST:
        raise ValueError(f"{name}[-1] is {values[-1]}; it must be at most {FURTHEST}")
    return values


def check_lengths(name: str, cu_seqlens: Any) -> None:
    """Raise unless it is a tensor of cumulative lengths, of which no value is looked at."""
    check_tensor(name, cu_seqlens, "an int32 or int64 tensor [b + 1]")
    check_dtype(name, cu_seqlens, "int32", "int64")
    if len(cu_seqlens.shape) != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name} has shape {list(cu_seqlens.shape)}; it must be [b + 1]")


def differences(cumulative: list[int]) -> list[int]:
    """The length of each sequence.

    >>> differences([0, 8, 8, 12])
    [8, 0, 4]
    """
    return list(map(sub, cumulative[1:], cumulative))


def parse_call(text: str, names: Seq[str]) -> tuple[str, list[Any], dict[str, Any]]:
    """The text of a call of one of `names`: the name, its arguments, its keywords. Arguments are literals. One that is
    itself a call stays text.

    Raises:
        ValueError: it is no such call.

    >>> parse_call("Case(Problem(cp_size=2), seed=[1, 2])", ["Case"])
    ('Case', ['Problem(cp_size=2)'], {'seed': [1, 2]})
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in names):
            raise ValueError(f"it must be a call of {', '.join(names)}")
        arguments = [ast.unparse(x) if isinstance(x, ast.Call) else _literal(x) for x in call.args]
        return call.func.id, arguments, {str(word.arg): _literal(word.value) for word in call.keywords}
    except SyntaxError as error:
        raise ValueError(str(error)) from error
    except (RecursionError, MemoryError):
        raise ValueError(_TOO_DEEP) from None


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        said = ast.unparse(node)
        raise ValueError(f"{said if len(said) < 40 else said[:40] + '...'} is no number, text or list") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
        ValueError: it is no TOML, or no reader can hold it.

    >>> parse_toml("[a]\\nb = [1, 2]")
    {'a': {'b': [1, 2]}}
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
