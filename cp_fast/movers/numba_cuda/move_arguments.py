"""From tensors to arguments of `move_kernels`: consecutive axes become one; words are as wide as possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from cp_fast.movers.numba_cuda.move_kernels import FIELDS, THREADS

__all__ = ["Folded", "Move", "fold", "log_lanes", "moves_of", "rows_per_block", "table_of", "word_size"]

BLOCK_BYTES = 32768  # About the bytes that a block moves.


class Folded(NamedTuple):
    """The rows of two tensors: `heads` pieces of `dim` contiguous elements; strides and offsets in elements."""

    heads: int
    head_strides: tuple[int, int]
    dim: int
    offsets: list[tuple[int, int]]  # Of the indices of further axes.


def fold(a: torch.Tensor, b: torch.Tensor) -> Folded:
    """Fold the axes after the first, which have the same sizes in both.

    >>> fold(torch.zeros(9, 4, 8), torch.zeros(9, 8, 8)[:, ::2])
    Folded(heads=4, head_strides=(8, 16), dim=8, offsets=[(0, 0)])
    >>> fold(torch.zeros(9, 4, 8), torch.zeros(5, 4, 8))
    Folded(heads=1, head_strides=(0, 0), dim=32, offsets=[(0, 0)])
    """
    dim, axes = 1, list[tuple[int, int, int]]()
    for size, left, right in zip(
        reversed(a.shape[1:]), reversed(a.stride()[1:]), reversed(b.stride()[1:]), strict=True
    ):
        if size == 1:
            continue
        if not axes and left == right == dim:
            dim *= size
        elif axes and (left, right) == (axes[-1][0] * axes[-1][1], axes[-1][0] * axes[-1][2]):
            axes[-1] = (axes[-1][0] * size, *axes[-1][1:])
        else:
            axes.append((size, left, right))
    heads, *strides = axes[0] if axes else (1, 0, 0)
    offsets = [(0, 0)]
    for size, left, right in axes[1:]:
        offsets = [(x + i * left, y + i * right) for i in range(size) for x, y in offsets]
    return Folded(heads, (strides[0], strides[1]), dim, offsets)


class Move(NamedTuple):
    """Addresses, and strides in bytes: see `move_kernels`."""

    source: int
    target: int
    source_row: int
    target_row: int
    heads: int
    source_head: int
    target_head: int
    piece: int


def moves_of(source: torch.Tensor, target: torch.Tensor) -> Iterator[Move]:
    """The moves from the rows of one tensor to those of another of the same dtype."""
    folded, item = fold(source, target), source.element_size()
    for x, y in folded.offsets:
        yield Move(
            source.data_ptr() + x * item,
            target.data_ptr() + y * item,
            source.stride(0) * item,
            target.stride(0) * item,
            folded.heads,
            folded.head_strides[0] * item,
            folded.head_strides[1] * item,
            folded.dim * item,
        )


def word_size(moves: Sequence[Move]) -> int:
    """The widest word, of up to 16 bytes, that divides every address, stride and size."""
    every = 16
    for move in moves:
        for number in (*move[:4], *move[5:]):
            every |= number
    return every & -every


def table_of(moves: Sequence[Move], size: int) -> tuple[int, ...]:
    """The kernel's table, for words of `size` bytes."""
    table: list[int] = []
    for move in moves:
        words = move.piece // size
        table += [*move[:7], words, log_lanes(words), 0]
    assert len(table) == FIELDS * len(moves)
    return tuple(table)


def log_lanes(words: int) -> int:
    """The logarithm of the number of threads that share a piece: 4 words each, but a warp if there are enough words."""
    lanes = 1
    while lanes < THREADS and (lanes * 4 < words or (lanes < 32 and lanes < words)):
        lanes *= 2
    return lanes.bit_length() - 1


def rows_per_block(row: int) -> int:
    """Enough rows of `row` bytes for a block to have work, and at most one for each of its threads to look up."""
    return min(max(BLOCK_BYTES // row, 1), THREADS)
