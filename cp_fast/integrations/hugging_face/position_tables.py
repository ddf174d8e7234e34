"""Decoders that take no position_ids, as BART's: their tables of positions are given those of a slice.

Such a model counts the tokens of its call, and looks the numbers up in a table that its class has. The table's forward
does take position_ids. So a call's positions stay at the model's door, and its tables read them there.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cp_fast.integrations.hugging_face.module_states import hook_once, known_state, put_state

__all__ = ["give_tables", "has_tables", "takes_positions"]

_POSITIONS = "position_ids"


@dataclass(eq=False)
class _Positions:
    """Of a table: the positions of the call that runs, [b, s/cp]; None: it counts the call's tokens."""

    given: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Tables:
    """Of a model: its tables of positions."""

    modules: list[nn.Module]


def takes_positions(model: nn.Module) -> bool:
    """Whether a model's calls have an argument `position_ids`."""
    return _POSITIONS in inspect.signature(model.forward).parameters


def has_tables(model: nn.Module) -> bool:
    """Whether a model has tables that take positions."""
    return any(map(_is_table, model.modules()))


def give_tables(model: nn.Module) -> None:
    """Have the model, and each model in it, give the positions of a call with `cp_batch` to its tables, where it takes
    none itself.
    """
    for module in model.modules():
        if not hasattr(module, "set_attn_implementation") or takes_positions(module):
            continue
        tables = [inner for inner in module.modules() if _is_table(inner)]
        if tables:
            put_state(module, _Tables(tables))
            hook_once(module, _say, _unsay, always=True)
        for table in tables:
            put_state(table, _Positions())
            hook_once(table, _in_one_row, _in_rows, named=False)


def _is_table(module: nn.Module) -> bool:
    kind = type(module)
    return isinstance(module, nn.Embedding) and _POSITIONS in inspect.signature(kind.forward).parameters


def _say(model: nn.Module, by_place: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if named.get("cp_batch") is None or named.get(_POSITIONS) is None:
        return None
    for table in known_state(model, _Tables).modules:
        known_state(table, _Positions).given = named[_POSITIONS]
    return by_place, {name: x for name, x in named.items() if name != _POSITIONS}


def _unsay(model: nn.Module, _: Any, named: dict[str, Any], __: Any) -> None:
    if named.get("cp_batch") is None:
        return
    for table in known_state(model, _Tables).modules:
        known_state(table, _Positions).given = None


def _in_one_row(table: Any, by_place: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """All positions as one row: tables take one for all rows of a batch."""
    given = known_state(table, _Positions).given
    return None if given is None else (by_place, {**named, _POSITIONS: given.flatten()})


def _in_rows(table: Any, _: Any, out: torch.Tensor) -> torch.Tensor | None:
    """[b * s/cp, d], or the same in one row -> [b, s/cp, d]."""
    given = known_state(table, _Positions).given
    return None if given is None else out.reshape(*given.shape, out.shape[-1])
