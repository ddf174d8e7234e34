"""Wrong values for arguments: what one mistypes, mixes up, or gets from somewhere else."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

__all__ = ["KINDS", "legal"]


class Unfriendly:
    """Has no truth, no length, no equality and no text."""

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    __hash__ = None  # type: ignore[assignment]


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2, 2, 8), torch.zeros(3, 2, 8)])


KINDS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "1": lambda: 1,
    "2": lambda: 2,
    "-1": lambda: -1,
    "0.5": lambda: 0.5,
    "-0.5": lambda: -0.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "2**31": lambda: 2**31,
    "-2**63": lambda: -(2**63),
    "10**30": lambda: 10**30,
    "10**400": lambda: 10**400,
    "1e10": lambda: 1e10,
    "1j": lambda: 1j,
    "a fraction": lambda: Fraction(1, 3),
    "a decimal": lambda: Decimal("0.5"),
    "an empty text": lambda: "",
    "a text": lambda: "no",
    "bytes": lambda: b"causal",
    "an empty list": list,
    "a list": lambda: [0, 8, 16],
    "a pair": lambda: (3, 0),
    "a pair of floats": lambda: (3.0, 0.0),
    "a triple": lambda: (1, 2, 3),
    "a dictionary": lambda: {"a": 1},
    "a set": lambda: {1},
    "a slice": lambda: slice(0, 1),
    "an ellipsis": lambda: ...,
    "a class": lambda: int,
    "a function": lambda: len,
    "an object": object,
    "an unfriendly object": Unfriendly,
    "a NumPy integer": lambda: np.int64(2),
    "a NumPy float": lambda: np.float32(0.5),
    "a NumPy bool": lambda: np.bool_(True),
    "a NumPy array": lambda: np.array([0, 8, 16]),
    "a dtype": lambda: torch.int8,
    "a device": lambda: torch.device("cpu"),
    "a scalar tensor": lambda: torch.tensor(2),
    "a tensor of lengths": lambda: torch.tensor([0, 4, 16], dtype=torch.int32),
    "lengths that decrease": lambda: torch.tensor([0, 12, 8, 16]),
    "lengths from 1": lambda: torch.tensor([1, 8, 16]),
    "negative lengths": lambda: torch.tensor([0, -8, 16]),
    "lengths beyond 32 bits": lambda: torch.tensor([0, 2**33]),
    "lengths as floats": lambda: torch.tensor([0.0, 8.0, 16.0]),
    "no lengths": lambda: torch.empty(0, dtype=torch.int32),
    "a tensor of bools": lambda: torch.ones(16, dtype=torch.bool),
    "a tensor of other shape": lambda: torch.zeros(3, 5),
    "an empty tensor": lambda: torch.zeros(0),
    "a complex tensor": lambda: torch.zeros(1, 8, 2, 8, dtype=torch.complex64),
    "a tensor of uint16": lambda: torch.arange(16).to(torch.uint16)[None],
    "a tensor of uint64": lambda: torch.full((1, 16), 2**64 - 100, dtype=torch.uint64),
    "a tensor of float8": lambda: torch.zeros(1, 16, 2, 8).to(torch.float8_e4m3fn),
    "a list of texts": lambda: ["a", "b"],
    "a range": lambda: range(3),
    "a tensor on meta": lambda: torch.zeros(1, 8, 2, 8, device="meta"),
    "a sparse tensor": lambda: torch.zeros(1, 8, 2, 8).to_sparse(),
    "a nested tensor": _nested,
}

_TYPES: dict[str, Callable[[Any], bool]] = {
    "None": lambda x: x is None,
    "int": lambda x: isinstance(x, Integral) and not isinstance(x, bool),
    "float": lambda x: isinstance(x, Real) and not isinstance(x, bool),
    "bool": lambda x: isinstance(x, bool),
    "str": lambda x: isinstance(x, str),
    "torch.Tensor": lambda x: isinstance(x, torch.Tensor),
    "torch.dtype": lambda x: isinstance(x, torch.dtype),
    "torch.device": lambda x: isinstance(x, torch.device),
    "tuple[int, int]": lambda x: isinstance(x, tuple | list) and len(x) == 2 and all(map(_TYPES["int"], x)),
}


def legal(annotation: str, value: Any) -> bool:
    """Whether a value is of the type that a parameter's annotation names; unknown names are any type.

    >>> legal("int | None", None), legal("int", True), legal("float", "0.5")
    (True, False, False)
    """
    names = annotation.strip("'\"").split(" | ")
    return any(_TYPES.get(name, lambda x: True)(value) for name in names)
