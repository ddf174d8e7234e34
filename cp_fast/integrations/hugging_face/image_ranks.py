"""The pictures of a batch shared out over the ranks: each rank runs the functions of images on some of them.

The pieces are whole images, and single frames of videos where `prepare` saw that a frame does not see another. They
stay in their order. Each rank has some that follow each other, so that the costs of all ranks are nearly equal. The
rows go from the rank that made them straight to the one whose tokens take them, and their gradients go back. A rank
without a piece runs the first one and sends none of its rows: its weights have gradients of 0, and it takes part in
whatever a wrapper does at each module.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.hugging_face.image_models import Modality
from cp_fast.integrations.hugging_face.image_rows import rows_in, with_rows
from cp_ref.batches.tensors import differentiable_once
from cp_ref.groups.agreement import merged
from cp_ref.groups.collectives import all_to_all
from cp_ref.groups.group import Group, PairGroup, Parcel

__all__ = ["Pieces", "cut_by_cost", "pieces_of", "rows_of_ranks"]

_LINEAR = 1024  # patches whose attention to all patches of a picture costs as much as all else of them does


@dataclass(frozen=True)
class Pieces:
    """The pictures of a function's arguments, one by one.

    Attributes:
        given: the arguments that are cut: in each, how many rows belong to which piece.
        costs: of each piece, in numbers that compare.
    """

    given: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]]
    costs: tuple[int, ...]

    def part(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """The arguments for the pieces from `start` to before `stop`."""
        found: dict[str, torch.Tensor] = {}
        for name, (x, lengths) in self.given.items():
            ends = [0, *accumulate(lengths)]
            found[name] = x[ends[start] : ends[stop]]
        return found


def pieces_of(modality: Modality, given: Mapping[str, Any], frames: bool) -> Pieces | str:
    """The pictures of a function's arguments, by their names. A text: why they cannot be told apart.

    Args:
        frames: whether the frames of a video are pieces of their own.

    >>> modality = Modality("image", "get_image_features", ("pixel_values", "image_grid_thw"), 7)
    >>> given = {"pixel_values": torch.zeros(12, 5), "image_grid_thw": torch.tensor([[2, 2, 2], [1, 2, 2]])}
    >>> found = pieces_of(modality, given, frames=True)
    >>> [{name: list(x.shape) for name, x in found.part(n, n + 1).items()} for n in range(3)][0]
    {'pixel_values': [4, 5], 'image_grid_thw': [1, 3]}
    """
    tensors = {name: given[name] for name in modality.entries if isinstance(given.get(name), torch.Tensor)}
    pixels = tensors.get(modality.entries[0])
    if pixels is None:
        return f"{modality.entries[0]} is no tensor"
    grid = next((name for name in tensors if "grid_thw" in name or "grid_hw" in name), None)
    if grid is None:
        count = len(pixels)
        odd = [name for name, x in tensors.items() if len(x) != count]
        if odd:
            return f"{odd[0]} has {len(tensors[odd[0]])} rows, and {modality.entries[0]} {count}"
        return Pieces({name: (x, (1,) * count) for name, x in tensors.items()}, (1,) * count)
    others = [name for name in tensors if name not in (modality.entries[0], grid)]
    axes = tensors[grid].tolist()
    if odd := [name for name in others if len(tensors[name]) != len(axes)]:
        return f"{odd[0]} has {len(tensors[odd[0]])} rows, and {grid} {len(axes)}"
    if frames and all(len(one) == 3 for one in axes):
        times = torch.tensor([one[0] for one in axes], device=tensors[grid].device)
        single = tensors[grid].clone()
        single[:, 0] = 1
        tensors |= {name: tensors[name].repeat_interleave(times.to(tensors[name].device), 0) for name in others}
        tensors[grid] = single.repeat_interleave(times, 0)
        axes = tensors[grid].tolist()
    patches = [int(np.prod(one)) for one in axes]
    if sum(patches) != len(pixels):
        return f"{grid} says {sum(patches)} patches, and {modality.entries[0]} has {len(pixels)}"
    found = {name: (x, (1,) * len(axes)) for name, x in tensors.items()}
    found[modality.entries[0]] = pixels, tuple(patches)
    in_frame = [patch // (one[0] if len(one) == 3 else 1) for patch, one in zip(patches, axes, strict=True)]
    costs = tuple(patch * (_LINEAR + frame) for patch, frame in zip(patches, in_frame, strict=True))
    return Pieces(found, costs)


def cut_by_cost(costs: Sequence[int], ranks: int) -> list[tuple[int, int]]:
    """Neighbouring pieces for each rank, first and one behind the last, so that the largest cost of a rank is small.
    Ranks have none only where there are fewer pieces than ranks.

    >>> cut_by_cost([4, 1, 1, 1, 1], 2), cut_by_cost([5], 2), cut_by_cost([1, 1, 8], 3)
    ([(0, 1), (1, 5)], [(0, 1), (1, 1)], [(0, 1), (1, 2), (2, 3)])
    """
    ends = [0, *accumulate(costs)]
    low, high = max(costs, default=0), ends[-1]
    while low < high:
        middle = (low + high) // 2
        if len(_greedy(ends, middle)) <= ranks:
            high = middle
        else:
            low = middle + 1
    parts = _greedy(ends, high)
    while (
        len(parts) < ranks and (wide := max(parts, key=lambda part: part[1] - part[0], default=(0, 0)))[1] - wide[0] > 1
    ):
        at, middle = parts.index(wide), (wide[0] + wide[1]) // 2
        parts[at : at + 1] = [(wide[0], middle), (middle, wide[1])]
    return parts + [(len(costs), len(costs))] * (ranks - len(parts))


def _greedy(ends: Sequence[int], most: int) -> list[tuple[int, int]]:
    """As few parts as have no more than `most` each."""
    parts, start = list[tuple[int, int]](), 0
    while start < len(ends) - 1:
        stop = max(bisect_right(ends, ends[start] + most) - 1, start + 1)
        parts.append((start, stop))
        start = stop
    return parts


def rows_of_ranks(
    holder: Any, modality: Modality, cp: ContextParallel, bound: dict[str, Any], mine: torch.Tensor, count: int
) -> Any:
    """The outputs of a function of images, of pictures that the ranks share out, with this rank's rows. Collective,
    forward and backward.

    Args:
        bound: the function's arguments, by name; the same on all ranks.
        mine: int64, the numbers of the rows that this rank's tokens take.
        count: how many rows all tokens take.

    Raises:
        NotImplementedError: the pictures cannot be told apart. ValueError: they have another number of rows. On all
        ranks.
    """
    name = type(holder).__name__
    pieces = pieces_of(modality, bound, modality.frames)
    if isinstance(pieces, str):
        raise NotImplementedError(
            f"{name} is given {modality.name}s whose pieces cannot be told apart: {pieces}; call prepare(model, cp, "
            'images="whole")'
        )
    start, stop = cut_by_cost(pieces.costs, cp.size)[cp.rank]
    idle = start == stop
    part = pieces.part(0, 1) if idle else pieces.part(start, stop)
    made: list[Any] = []

    def read() -> list[tuple[int, bytes]]:
        made.append(getattr(type(holder), modality.function)(holder, **{**bound, **part}))
        rows = 0 if idle else rows_in(made[0], modality.fields)
        return [(rows, mine.cpu().numpy().astype(np.int64).tobytes())]

    everyone = merged(cp, f"{modality.function} over ranks", read, lambda each: [one for some in each for one in some])
    ends = [0, *accumulate(rows for rows, _ in everyone)]
    if ends[-1] != count:
        raise ValueError(f"{name}'s {modality.name}s have {ends[-1]} rows, and the batch has {count} tokens for them")
    wanted = [torch.from_numpy(np.frombuffer(numbers, np.int64).copy()) for _, numbers in everyone]
    ranges = list(pairwise(ends))
    of = [[((numbers >= a) & (numbers < b)).nonzero()[:, 0] for a, b in ranges] for numbers in wanted]
    sends = [numbers[each[cp.rank]] - ends[cp.rank] for numbers, each in zip(wanted, of, strict=True)]
    route = _Route(cp.comm, sends, of[cp.rank], max(len(x) for each in of for x in each))
    every: list[torch.Tensor] = []
    with_rows(made[0], local := rows_in(made[0], modality.fields), lambda x: every.append(x) or x, modality.fields)
    swapped = cast(Any, _Swap).apply(torch.cat(every, -1), route)
    found = iter(swapped.split([rows.shape[-1] for rows in every], -1))
    return with_rows(made[0], local, lambda _: next(found), modality.fields)


@dataclass(frozen=True, eq=False)
class _Route:
    """Which rows go where.

    Attributes:
        sends: the numbers of this rank's rows that each rank gets.
        takes: the places of the rows that each rank sends here.
        most: the most rows that any rank sends to another.
    """

    group: Group
    sends: list[torch.Tensor]
    takes: list[torch.Tensor]
    most: int

    def back(self) -> _Route:
        """The way back."""
        return _Route(self.group, self.takes, self.sends, self.most)


class _Swap(torch.autograd.Function):
    """Rows from the ranks that have them to those that take them; their gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, route: _Route) -> torch.Tensor:
        ctx.route, ctx.count = route, len(rows)
        return _swap(rows, route, sum(map(len, route.takes)))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _swap(grad, ctx.route.back(), ctx.count), None


def _swap(rows: torch.Tensor, route: _Route, count: int) -> torch.Tensor:
    """Send rows to their ranks; return `count` rows, those that come in their places, and 0 elsewhere."""
    group, takes = route.group, route.takes
    parts = [rows[numbers.to(rows.device)].contiguous() for numbers in route.sends]
    if isinstance(group, PairGroup):  # whose messages go along a row and a column, in one size
        padded = [torch.cat([part, part.new_zeros(route.most - len(part), *part.shape[1:])]) for part in parts]
        came = all_to_all(group, padded) if route.most else padded
        got = [part[: len(numbers)] for part, numbers in zip(came, takes, strict=True)]
    else:
        got = [rows.new_empty(len(numbers), *rows.shape[1:]) for numbers in takes]
        got[group.rank] = parts[group.rank]
        peers = [r for r in range(group.size) if r != group.rank]
        out = [Parcel(r, 0, parts[r]) for r in peers if len(parts[r])]
        group.exchange(out, [Parcel(r, 0, got[r]) for r in peers if len(got[r])]).wait()
    found = rows.new_zeros(count, *rows.shape[1:])
    for part, numbers in zip(got, takes, strict=True):
        found[numbers.to(rows.device)] = part
    return found
