"""Bugs to practise on, as real implementations have had them: each spoils one place on one rank."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from cp_ref.contract.group import Parcel
from cp_ref.executor.rank_tensors import RankTensors
from cp_ref.schedules.schedule import Message
from cp_ref.schedules.values import check_choice

__all__ = ["PLANTS", "planted"]


@dataclass(frozen=True)
class Plant:
    """`spoil(rank, original)` is the wrong variant of attribute `name` of `owner`."""

    owner: Any
    name: str
    spoil: Callable[[int, Callable[..., Any]], Callable[..., Any]]


@contextmanager
def planted(bug: str, rank: int) -> Generator[None]:
    """The reference is wrong on one rank inside this block."""
    check_choice("--plant", bug, tuple(PLANTS))
    plant = PLANTS[bug]
    with mock.patch.object(plant.owner, plant.name, plant.spoil(rank, getattr(plant.owner, plant.name))):
        yield


def _lost_half(rank: int, unpack: Callable[..., None]) -> Callable[..., None]:
    """Keys and values are used before all of them have arrived: the second half of each message is still zero."""

    def wrong(held: RankTensors, message: Message, boxes: list[Parcel]) -> None:
        if held.rank == rank and message.kind == "kv":
            for box in boxes:
                box.tensor[box.tensor.numel() // 2 :] = 0.0
        unpack(held, message, boxes)

    return wrong


def _shifted_keys(rank: int, of_tile: Callable[..., Any]) -> Callable[..., Any]:
    """A tile reads its keys from one row too early, as with a wrong cumulative length."""

    def wrong(held: RankTensors, tile: Sequence[int], dtype: torch.dtype, *kinds: str) -> Any:
        area, q_start, q_stop, k_start, k_stop, *heads = tile
        early = int(held.rank == rank and k_start > 0)
        return of_tile(held, (area, q_start, q_stop, k_start - early, k_stop - early, *heads), dtype, *kinds)

    return wrong


def _unscaled_merge(rank: int, add: Callable[..., None]) -> Callable[..., None]:
    """Partial outputs are added up without the weights that their log-sum-exps give them."""

    def wrong(held: RankTensors, kind: str, rows: slice, heads: slice, *values: torch.Tensor) -> None:
        if held.rank == rank and kind == "out":
            total = held.tensors["out"][0][rows, heads] + values[0]
            add(held, kind, rows, heads, *values)
            held.tensors["out"][0][rows, heads] = total
        else:
            add(held, kind, rows, heads, *values)

    return wrong


def _gradient_twice(rank: int, unpack: Callable[..., None]) -> Callable[..., None]:
    """The gradients of keys and values that come from another rank are added twice."""

    def wrong(held: RankTensors, message: Message, boxes: list[Parcel]) -> None:
        for _ in range(2 if held.rank == rank and message.kind == "dkv" else 1):
            unpack(held, message, boxes)

    return wrong


PLANTS = {
    "lost-half": Plant(RankTensors, "unpack", _lost_half),
    "shifted-keys": Plant(RankTensors, "of_tile", _shifted_keys),
    "unscaled-merge": Plant(RankTensors, "accumulate", _unscaled_merge),
    "gradient-twice": Plant(RankTensors, "unpack", _gradient_twice),
}
