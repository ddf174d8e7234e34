"""What the suite knows about one helper of `thd`: how a call of it is built, its definition, and which calls have an
answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from conformance.levels.helpers.helper_case import Helper

__all__ = ["Arguments", "Built", "HelperRecord"]

Arguments = dict[str, Any]


@dataclass
class Built:
    """A call: its keyword arguments; the argument changed in place, and the values of it that may change; the lengths
    that can be spoiled.
    """

    arguments: dict[str, Any]
    target: str = ""
    touched: torch.Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.bool))
    lengths: str = "cu_seqlens_padded"


@dataclass(frozen=True)
class HelperRecord:
    """One helper.

    build: a call of it, from a case.
    definition: the same result, by row numbers, for the same arguments. It changes a target in place too.
    rule: raises `Broken` where a call has no answer; None where the helper takes no lengths that could be spoiled.
    moves: whether it only moves data, so that the bits stay.
    """

    build: Callable[[Helper, str], Built]
    definition: Callable[..., Any]
    rule: Callable[[Arguments], None] | None = None
    moves: bool = True
