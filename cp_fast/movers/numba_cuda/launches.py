"""`Movers` over the Numba kernels: addresses, strides and grids of tensors, and launches on PyTorch's stream."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from numba import cuda

from cp_fast.movers.mover_protocol import RowRule, Rows
from cp_fast.movers.numba_cuda.kernels import (
    FIELDS,
    PIECES,
    THREADS,
    indices_kernel,
    move_kernel,
    pairs_kernel,
    weigh_kernel,
)
from cp_fast.movers.numba_cuda.memory import SIMULATED

__all__ = [
    "Folded",
    "KernelRowMap",
    "Move",
    "NumbaMovers",
    "fold",
    "kernel_row_map",
    "launch",
    "log_lanes",
    "move",
    "moves_of",
    "pairs_",
    "quiet",
    "rows_per_block",
    "table_of",
    "weigh_",
    "word_size",
]

# ---- launches


def launch(kernel: Any, device: torch.device, blocks: int, *arguments: Any, layers: int = 1) -> None:
    """A grid [blocks, layers] of `THREADS` threads each. Nothing waits."""
    if SIMULATED:
        kernel[(blocks, layers), THREADS](*arguments)
        return
    with _on(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        kernel[(blocks, layers), THREADS, _stream(stream) if stream else 0](*arguments)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device current in Numba, which keeps a separate current device."""
    return nullcontext() if torch.cuda.device_count() == 1 else cuda.gpus[device.index]


@lru_cache(maxsize=64)
def _stream(handle: int) -> Any:
    return cuda.external_stream(handle)


def quiet() -> None:
    """Silence warnings about small launches, which are intended."""
    from numba.core.errors import NumbaPerformanceWarning

    warnings.filterwarnings("ignore", message="Grid size", category=NumbaPerformanceWarning)


# ---- arguments of moves
#
# From tensors to arguments of `move_kernel`: consecutive axes become one; words are as wide as possible.


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
    """Addresses, and strides in bytes: see `kernels`."""

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


# ---- row maps
#
# The arguments of a mover's launch: the target of each row (see `row_rules`), and the tensors to move.


MOST_MOVES = 16  # In one launch: arguments are 4 KB at most.


class KernelRowMap(NamedTuple):
    """A row map as kernels take it: `kind` for the compiler, 8 `numbers` for the launch (see `row_rules`)."""

    helper: str
    kind: str
    count: int  # rows of the part
    numbers: tuple[int, ...]


def kernel_row_map(helper: str, rows: Rows | RowRule, tokens: int, tail: bool = False) -> KernelRowMap:
    """`rows` of a tensor of `tokens` rows; whether its tail goes along. `helper`: the name for rows that are given."""
    if isinstance(rows, slice):
        start, stop, _ = rows.indices(tokens)
        return KernelRowMap(helper, "span", max(stop - start, 0), (0, 0, 0, 0, 0, tokens, start, 0))
    if isinstance(rows, torch.Tensor):
        return KernelRowMap(helper, "index", len(rows), (*_array(rows), 0, 0, 0, tokens, 0, 0))
    real = (0, 0) if rows.real is None else _array(rows.real)
    b = int(tail) if rows.kind == "half" else rows.b
    numbers = *_array(rows.lengths), len(rows.lengths) - 1, *real, tokens, rows.a, b
    return KernelRowMap(rows.helper, rows.kind, rows.count(tokens), numbers)


def _array(x: torch.Tensor) -> tuple[int, int]:
    """The address of integers, and 1 if they have 64 bits."""
    assert x.is_contiguous(), "lengths and row numbers are dense"
    return x.data_ptr(), int(x.dtype == torch.int64)


def move(row_map: KernelRowMap, scatter: bool, moves: Sequence[Move], device: torch.device) -> None:
    """Move the rows of every tensor."""
    if not moves or not row_map.count:
        return
    size = word_size(moves)
    kernel: Callable[..., Any] = move_kernel(row_map.helper, row_map.kind, scatter, size)
    for at in range(0, len(moves), MOST_MOVES):
        some = moves[at : at + MOST_MOVES]
        rows = rows_per_block(max(one.heads * one.piece for one in some))
        arguments = table_of(some, size), row_map.numbers, row_map.count, rows
        launch(kernel, device, -(-row_map.count // rows), *arguments, layers=len(some))


# ---- arguments of additions and merges
#
# From tensors to arguments of `pairs_kernel` and `weigh_kernel`.


DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}


def _wide(*dtypes: str) -> str:
    return "f64" if "f64" in dtypes else "f32"


def _width(ends: Sequence[tuple[int, torch.dtype]], elements: Sequence[int]) -> int:
    """4 if addresses allow to read and write 4 numbers at once, else 1. `elements`: sizes and strides."""
    dense = all(number % 4 == 0 for number in elements)
    return 4 if dense and all(where % min(4 * dtype.itemsize, 16) == 0 for where, dtype in ends) else 1


class PairMove(NamedTuple):
    """Addresses, and strides in bytes, of a target and a source: see `pairs_kernel`."""

    target: int
    source: int
    target_row: int
    source_row: int
    heads: int
    target_head: int
    source_head: int
    dim: int  # in elements


def pairs_(row_map: KernelRowMap, add: bool, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Each (target, source): one launch for all of the same dtypes."""
    groups: dict[tuple[str, str], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in pairs:
        if target.numel() and source.numel() and row_map.count:
            groups.setdefault((DTYPES[target.dtype], DTYPES[source.dtype]), []).append((target, source))
    for dtypes, group in groups.items():
        rows: list[PairMove] = []
        ends: list[tuple[int, torch.dtype]] = []
        elements: list[int] = []
        for target, source in group:
            folded, size, step_size = fold(target, source), target.element_size(), source.element_size()
            (row, step_row), (head, step_head) = (target.stride(0), source.stride(0)), folded.head_strides
            elements += [folded.dim, row, step_row, head, step_head]
            for x, y in folded.offsets:
                to, of = target.data_ptr() + x * size, source.data_ptr() + y * step_size
                ends += [(to, target.dtype), (of, source.dtype)]
                strides = row * size, step_row * step_size, folded.heads, head * size, step_head * step_size
                rows.append(PairMove(to, of, *strides, folded.dim))
        width = _width(ends, elements)
        kernel = pairs_kernel(row_map.helper, row_map.kind, add, *dtypes, _wide(*dtypes), width)
        table = [number for row in rows for number in (*row, log_lanes(-(-row.dim // width)), 0)]
        assert len(table) == FIELDS * len(rows)
        block = rows_per_block(max(row.heads * row.dim for row in rows) * group[0][0].element_size())
        arguments = tuple(table), row_map.numbers, row_map.count, block
        launch(kernel, group[0][0].device, -(-row_map.count // block), *arguments, layers=len(rows))


def weigh_(
    row_map: KernelRowMap, final: bool, out: torch.Tensor, step: torch.Tensor, lse: torch.Tensor, lse_step: torch.Tensor
) -> None:
    """`weigh_kernel`; out and step [t, h, d], d 0 for LSEs alone."""
    heads = lse.shape[-2]
    if not row_map.count or not heads or not lse.numel():
        return
    dtypes, width, dim = ("f32", "f32"), 4, 0
    target = source = (0, 0, 0)
    if out.numel():
        dim, dtypes = out.shape[2], (DTYPES[out.dtype], DTYPES[step.dtype])
        elements = [dim, *out.stride()[:2], *step.stride()[:2]]
        width = _width([(out.data_ptr(), out.dtype), (step.data_ptr(), step.dtype)], elements)
        target, source = (
            (x.data_ptr(), x.stride(0) * x.element_size(), x.stride(1) * x.element_size()) for x in (out, step)
        )
    kernel = weigh_kernel(
        row_map.helper, row_map.kind, final, *dtypes, DTYPES[lse.dtype], DTYPES[lse_step.dtype], width
    )
    blocks = -(-row_map.count * heads // PIECES)
    target = (*target, heads, dim, log_lanes(-(-dim // width)))
    ends = target, source, _lse_end(lse), _lse_end(lse_step)
    launch(kernel, lse.device, blocks, row_map.numbers, row_map.count, *ends)


def _lse_end(lse: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Address, strides of sequences, heads and rows in bytes, and the columns of a padded one."""
    size = lse.element_size()
    sequence, columns = (0, 0) if lse.ndim == 2 else (lse.stride(0) * size, lse.shape[-1])
    return lse.data_ptr(), sequence, lse.stride(-2) * size, lse.stride(-1) * size, columns


# ---- the protocol
#
# `cp_fast.movers.mover_protocol.Movers` over the Numba kernels.


class NumbaMovers:
    """`cp_fast.movers.mover_protocol.Movers`, which says what each method does."""

    name = "numba"

    def row_indices(self, rows: RowRule, tokens: int) -> torch.Tensor:
        row_map = kernel_row_map(rows.helper, rows, tokens, tail=True)
        out = rows.lengths.new_empty(row_map.count)
        if row_map.count:
            kernel = indices_kernel(row_map.helper, row_map.kind, out.element_size())
            launch(kernel, out.device, -(-row_map.count // THREADS), out.data_ptr(), row_map.numbers, row_map.count)
        return out

    def gather(self, xs: Sequence[torch.Tensor], rows: Rows | RowRule) -> list[torch.Tensor]:
        if isinstance(rows, slice):
            return [x[rows] for x in xs]
        row_map = kernel_row_map("gather", rows, xs[0].shape[0], tail=True)
        outs = [x.new_empty(row_map.count, *x.shape[1:]) for x in xs]
        moves = [m for x, out in zip(xs, outs, strict=True) if out.numel() for m in moves_of(x, out)]
        move(row_map, False, moves, xs[0].device)
        return outs

    def scatter_(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows | RowRule, add: bool = False
    ) -> None:
        if not outs:
            return
        row_map, pairs = kernel_row_map("scatter_", rows, outs[0].shape[0]), list(zip(outs, xs, strict=True))
        same = [] if add else [(out, x) for out, x in pairs if out.dtype == x.dtype]
        move(row_map, True, [m for out, x in same if x.numel() for m in moves_of(x, out)], outs[0].device)
        pairs_(row_map, add, pairs if add else [(out, x) for out, x in pairs if out.dtype != x.dtype])

    def gather_heads(
        self, xs: Sequence[torch.Tensor], rows: Rows, first_heads: Sequence[int], heads: Sequence[int]
    ) -> list[torch.Tensor]:
        row_map, parts = kernel_row_map("gather_heads", rows, xs[0].shape[0]), len(first_heads) // len(xs)
        outs = [x.new_empty(parts, row_map.count, n, *x.shape[2:]) for x, n in zip(xs, heads, strict=True)]
        moves = [m for x, out, n in _heads(xs, outs, first_heads) for m in moves_of(x[:, n : n + out.shape[1]], out)]
        move(row_map, False, moves, xs[0].device)
        return outs

    def scatter_heads_(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], rows: Rows, first_heads: Sequence[int]
    ) -> None:
        row_map = kernel_row_map("scatter_heads_", rows, outs[0].shape[0])
        moves = [m for out, x, n in _heads(outs, xs, first_heads) for m in moves_of(x, out[:, n : n + x.shape[1]])]
        move(row_map, True, moves, outs[0].device)

    def merge_(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        out_step: torch.Tensor,
        lse_step: torch.Tensor,
        rows: Rows | RowRule,
        final: bool = False,
    ) -> None:
        weigh_(kernel_row_map("merge_", rows, out.shape[0]), final, out, out_step, lse, lse_step)


def _heads(
    wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], first_heads: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Each part of each tensor that is not empty: its whole, itself, its first head."""
    firsts = iter(first_heads)
    for whole, some in zip(wholes, parts, strict=True):
        for part in some:
            first = next(firsts)
            if part.numel():
                yield whole, part, first
