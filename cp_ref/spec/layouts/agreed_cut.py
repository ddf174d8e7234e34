"""The arguments of `unshard` and `roll`, which the ranks compare before slices travel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from cp_ref.spec.arguments.single_values import MOST, read_count
from cp_ref.spec.groups.group import read_together
from cp_ref.spec.layouts.cuts import Cut, read_cut

__all__ = ["agreed_cut", "bounds_of", "read_fill"]


@dataclass(frozen=True)
class Gathering:
    """The arguments that all ranks must have in common, in the form that `agree` takes."""

    x: tuple[tuple[int, ...], str]
    qkv_format: str
    layout: object  # a name, or a table
    seqlen: int | None
    cu_seqlens_padded: tuple[int, ...] | None
    problem: str | None  # the plan's
    roll: tuple[int, float] | None  # shifts and fill_value
    requires_grad: bool  # whether there is a backward pass, which is collective too

    @property
    def fingerprint(self) -> bytes:
        """32 bytes of the text."""
        return blake2b(str(self).encode()).digest()[:32]


def agreed_cut(
    cp: Any,
    plan: Any,
    x: Any,
    qkv_format: str,
    cu_seqlens_padded: Any,
    seqlen: Any,
    roll: tuple[Any, Any] | None = None,
    *,
    with_grad: bool = False,
) -> Cut:
    """How the tensor was cut of which every rank has a slice. Collective: all ranks get it, or all raise.

    Args:
        cp: a ContextParallel. roll: shifts and fill_value of `roll`. with_grad: whether PyTorch records what needs
            gradients. The others: as in `unshard`.

    Raises:
        ValueError, TypeError: an argument is wrong, here or on another rank, or not the same on all of them.
    """

    def read() -> tuple[Cut, Gathering]:
        cut = read_cut(cp, plan, x, qkv_format, cu_seqlens_padded, whole=False, seqlen=seqlen)
        lengths = None if cu_seqlens_padded is None else tuple(cu_seqlens_padded.tolist())
        shifted = None if roll is None else _read_roll(x, *roll)
        of_plan = None if plan is None else plan.problem.fingerprint.hex()
        shape = tuple(x.shape), str(x.dtype)
        needs_grad = with_grad and x.requires_grad
        return cut, Gathering(shape, cut.qkv_format, cp.layout, seqlen, lengths, of_plan, shifted, needs_grad)

    return read_together(cp.comm, read, lambda found: found[1])[0]


def _read_roll(x: Any, shifts: Any, fill_value: Any) -> tuple[int, float]:
    return read_count("shifts", shifts, at_least=-MOST), read_fill(x, fill_value)


def read_fill(x: Any, fill_value: Any) -> float:
    """The value of rows without a token in a slice of x.

    Raises:
        TypeError, ValueError: it is no number of x's dtype.
    """
    if isinstance(fill_value, bool) or not isinstance(fill_value, int | float):
        raise TypeError(f"fill_value is {fill_value!r}; it must be a number")
    if isinstance(fill_value, float) and not x.dtype.is_floating_point:
        raise ValueError(f"fill_value is {fill_value}, but x has dtype {x.dtype}; it must be an integer")
    least, most = bounds_of(x.dtype)
    if isinstance(fill_value, int) and not least <= fill_value <= most:
        raise ValueError(f"fill_value is {fill_value}; of dtype {x.dtype} it must be from {least} to {most}")
    return fill_value


def bounds_of(dtype: Any) -> tuple[int, int]:
    """The least and the largest integer of a dtype, by its name; of floats those of int64.

    >>> bounds_of("torch.uint8"), bounds_of("torch.bool")
    ((0, 255), (0, 1))
    """
    sign, bits = (re.findall(r"torch\.(u?)int(\d+)", str(dtype)) or [("", 64)])[0]
    sign, bits = ("u", 1) if str(dtype) == "torch.bool" else (sign, int(bits))
    most = 2 ** (bits - (not sign)) - 1
    return 0 if sign else -most - 1, most
