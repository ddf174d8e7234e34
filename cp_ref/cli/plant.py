"""Bugs to practise on, as real implementations have had them: each spoils one place on one rank."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from cp_ref.contract.group import Parcel
from cp_ref.executor import play_schedule as execute
from cp_ref.executor.rank_tensors import World
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

    def wrong(world: World, message: Message, boxes: list[Parcel]) -> None:
        if world.rank == rank and message.kind == "kv":
            for box in boxes:
                box.tensor[box.tensor.numel() // 2 :] = 0.0
        unpack(world, message, boxes)

    return wrong


def _shifted_keys(rank: int, slices: Callable[..., Any]) -> Callable[..., Any]:
    """A tile reads its keys from one row too early, as with a wrong cumulative length."""

    def wrong(world: World, tile: Sequence[int]) -> Any:
        rows, columns, heads, kv_heads = slices(world, tile)
        if world.rank == rank and columns.start > 0:
            columns = slice(columns.start - 1, columns.stop - 1)
        return rows, columns, heads, kv_heads

    return wrong


def _unscaled_merge(rank: int, add: Callable[..., None]) -> Callable[..., None]:
    """Partial outputs are added up without the weights that their log-sum-exps give them."""

    def wrong(world: World, kind: str, rows: slice, heads: slice, *values: torch.Tensor) -> None:
        if world.rank == rank and kind == "out":
            total = world.tensors["out"][0][rows, heads] + values[0]
            add(world, kind, rows, heads, *values)
            world.tensors["out"][0][rows, heads] = total
        else:
            add(world, kind, rows, heads, *values)

    return wrong


def _gradient_twice(rank: int, unpack: Callable[..., None]) -> Callable[..., None]:
    """The gradients of keys and values that come from another rank are added twice."""

    def wrong(world: World, message: Message, boxes: list[Parcel]) -> None:
        for _ in range(2 if world.rank == rank and message.kind == "dkv" else 1):
            unpack(world, message, boxes)

    return wrong


PLANTS = {
    "lost-half": Plant(World, "unpack", _lost_half),
    "shifted-keys": Plant(execute, "_slices", _shifted_keys),
    "unscaled-merge": Plant(World, "add", _unscaled_merge),
    "gradient-twice": Plant(World, "unpack", _gradient_twice),
}
