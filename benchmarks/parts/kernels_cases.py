"""The cases of `benchmarks/kernels.py`: kernels, each with its inputs, its check and its target.

A case makes one set of tensors for each launch in a row, so that no launch finds its data in a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from cp_fast.movers.mover_protocol import Movers, RowRule
from cp_ref.thd import thd_get_partitioned_indices

__all__ = ["Case", "Target", "Work", "cases"]


@dataclass(frozen=True)
class Target:
    """At most `most` microseconds, times another case's time, or times the copy's; or at least a share of the memory's
    limit.
    """

    text: str
    most_us: float = math.inf
    most_of_case: tuple[str, float] | None = None
    most_of_copy: float = math.inf
    least_share: float = 0.0


@dataclass(frozen=True)
class Work:
    """One set of tensors. `run` returns what it made; the tensors that it changes are its own."""

    run: Callable[[Movers], object]
    copy: Callable[[], object]  # the same bytes by torch.Tensor.copy_
    select: Callable[[], object]  # torch.index_select with a ready index: the same rows, else as many bytes
    check: Callable[[Movers], None]  # raises AssertionError; called first


@dataclass(frozen=True)
class Case:
    """`make(device)` makes one more set of tensors. `moved`: bytes read and written by one launch."""

    kernel: str
    name: str
    moved: int
    make: Callable[[str], Work]
    target: Target | None


@lru_cache(maxsize=4)
def lengths_of(tokens: int, sequences: int, divisor: int) -> torch.Tensor:
    """Cumulative lengths, int32: 16 sequences of one length, or many of any length, 0 included."""
    units = tokens // divisor
    if sequences <= 16:
        cuts = torch.arange(1, sequences) * (units // sequences)
    else:
        cuts = torch.randint(0, units + 1, (sequences - 1,), generator=torch.Generator().manual_seed(0)).sort().values
    return divisor * torch.cat([torch.tensor([0]), cuts, torch.tensor([units])]).to(torch.int32)


@lru_cache(maxsize=4)
def rank_order(tokens: int, sequences: int, cp_size: int) -> torch.Tensor:
    """The row of sequence order of every row of CP rank order, int64."""
    lengths = lengths_of(tokens, sequences, 2 * cp_size)
    return torch.cat([thd_get_partitioned_indices(lengths, tokens, cp_size, rank) for rank in range(cp_size)]).long()


def random(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Bit by bit; no NaN in either."""
    assert torch.equal(got, want), "the result is wrong"


def by_copy(moved: int, device: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """A copy, and a selection of rows of 2 KiB (of 4 bytes, if there are few), that read and write `moved` bytes."""
    row = 1024 if moved >= 1 << 20 else 2
    rows = max(moved // 2 // (2 * row), 1)
    x = random(device, rows, row)
    y = torch.empty_like(x)
    index = torch.arange(rows, device=device).view(2, -1).flip(0).flatten() if rows % 2 == 0 else None
    index = torch.arange(rows, device=device) if index is None else index
    return lambda: y.copy_(x), lambda: torch.index_select(x, 0, index, out=y)


def reorder(
    tokens: int, heads: int, dim: int, sequences: int, cp_size: int, forward: bool, tensors: int, target: Target
) -> Case:
    direction = "to rank order" if forward else "to sequence order"
    both = ", K and V" if tensors == 2 else ""
    name = f"{tokens} x {heads} x {dim}, {sequences} sequences, cp {cp_size}, {direction}{both}"
    moved = 2 * tensors * tokens * heads * dim * 2

    def make(device: str) -> Work:
        lengths = lengths_of(tokens, sequences, 2 * cp_size).to(device)
        xs = [random(device, tokens, heads, dim) for _ in range(tensors)]
        rows = rank_order(tokens, sequences, cp_size)
        rows, results = (rows if forward else rows.argsort()).to(device), [torch.empty_like(x) for x in xs]
        copy, _ = by_copy(moved, device)

        order_of = RowRule("reorder", "rank_order" if forward else "sequence_order", lengths, a=cp_size)

        def select() -> None:
            for x, result in zip(xs, results, strict=True):
                torch.index_select(x, 0, rows, out=result)

        def check(k: Movers) -> None:
            order = rank_order(tokens, sequences, cp_size).to(device)
            for got, x in zip(k.gather(xs, order_of), xs, strict=True):
                same(got if forward else got.index_select(0, order), x.index_select(0, order) if forward else x)

        return Work(lambda k: k.gather(xs, order_of), copy, select, check)

    return Case("reorder", name, moved, make, target)


def valid(tokens: int, heads: int, dim: int, sequences: int, target: Target) -> Case:
    """Three of four slots are valid."""
    lengths = lengths_of(tokens, sequences, 4)
    real = torch.cat([torch.zeros(1, dtype=torch.int32), (lengths.diff() // 4 * 3).cumsum(0).to(torch.int32)])
    moved = 2 * int(real[-1]) * heads * dim * 2

    def make(device: str) -> Work:
        slots, tokens_of = lengths.to(device), real.to(device)
        out, x = (random(device, tokens, heads, dim) for _ in range(2))
        copy, select = by_copy(moved, device)
        rows = RowRule("copy_valid_", "valid", slots, tokens_of)

        def check(k: Movers) -> None:
            mask = torch.zeros(tokens, dtype=torch.bool)
            for start, count in zip(lengths.tolist(), real.diff().tolist(), strict=False):
                mask[start : start + count] = True
            want = torch.where(mask.to(device)[:, None, None], x, out)
            k.scatter_([out], [x], rows)
            same(out, want)

        return Work(lambda k: k.scatter_([out], [x], rows), copy, select, check)

    return Case("copy_valid_", f"{tokens} x {heads} x {dim}, {sequences} sequences, 3/4 valid", moved, make, target)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    error = float((got.double() - want).norm() / want.norm())
    assert error < 1e-6, f"relative error {error:.1e}"


def merge(tokens: int, heads: int, dim: int, target: Target) -> Case:
    moved = tokens * heads * (dim * (4 + 4 + 2) + 3 * 4)

    def make(device: str) -> Work:
        out, step = random(device, tokens, heads, dim, dtype=torch.float32), random(device, tokens, heads, dim)
        lse, step_lse = (random(device, heads, tokens, dtype=torch.float32) for _ in range(2))
        copy, select = by_copy(moved, device)

        def check(k: Movers) -> None:
            parts = ((lse.double(), out.double()), (step_lse.double(), step.double()))
            new = torch.logaddexp(parts[0][0], parts[1][0])
            want = sum((torch.exp(x - new).t()[..., None] * y for x, y in parts), torch.zeros_like(parts[0][1]))
            k.merge_(out, lse, step, step_lse, slice(0, tokens))
            close(out, want)
            close(lse, new)

        return Work(lambda k: k.merge_(out, lse, step, step_lse, slice(0, tokens)), copy, select, check)

    return Case("merge_", f"{tokens} x {heads} x {dim}, bfloat16 into float32", moved, make, target)


def exchange(tokens: int, heads: int, dim: int, cp_size: int, to_front: bool, target: Target) -> Case:
    """An all-to-all's send buffer out of rows in another order, or its inverse."""
    moved, part = 2 * tokens * heads * dim * 2, heads // cp_size
    firsts = [part * n for n in range(cp_size)]

    def make(device: str) -> Work:
        rows = rank_order(tokens, 16, cp_size).to(device)
        whole, parts = random(device, tokens, heads, dim), random(device, cp_size, tokens, part, dim)
        copy, _ = by_copy(moved, device)
        # the same pieces, all of one part's heads, as rows of two axes
        number = torch.arange(cp_size, device=device)
        pieces = rows * cp_size + number[:, None] if to_front else rows.argsort()[:, None] + number * tokens
        pieces, result = pieces.flatten(), torch.empty(cp_size * tokens, part * dim, device=device, dtype=whole.dtype)
        source = (whole if to_front else parts).view_as(result)

        def run(k: Movers) -> object:
            if to_front:
                return k.gather_heads([whole], rows, firsts, [part])[0]
            return k.scatter_heads_([whole], [parts], rows, firsts)

        def check(k: Movers) -> None:
            got = run(k)
            moved_parts = whole.index_select(0, rows).view(tokens, cp_size, part, dim).transpose(0, 1)
            if to_front:
                assert isinstance(got, torch.Tensor)
                same(got, moved_parts)
            else:
                same(moved_parts, parts)

        return Work(run, copy, lambda: torch.index_select(source, 0, pieces, out=result), check)

    kernel = "heads_to_front" if to_front else "heads_to_back_"
    return Case(kernel, f"{tokens} x {heads} x {dim}, cp {cp_size}, reordered", moved, make, target)


def indices(tokens: int, sequences: int, cp_size: int, target: Target) -> Case:
    share = tokens // cp_size
    moved = 4 * (share + sequences + 1)

    def make(device: str) -> Work:
        lengths = lengths_of(tokens, sequences, 2 * cp_size).to(device)
        copy, _ = by_copy(8 * share, device)
        x, index = (
            torch.arange(tokens, device=device, dtype=torch.int32),
            rank_order(tokens, sequences, cp_size)[:share],
        )
        index, result = index.to(device), torch.empty(share, dtype=torch.int32, device=device)

        own = RowRule("partition_indices", "slice", lengths, a=cp_size)

        def check(k: Movers) -> None:
            same(k.row_indices(own, tokens).long(), index)

        return Work(
            lambda k: k.row_indices(own, tokens),
            copy,
            lambda: torch.index_select(x, 0, index, out=result),
            check,
        )

    return Case("partition_indices", f"{tokens} tokens, {sequences} sequences, cp {cp_size}", moved, make, target)


def add(tokens: int, heads: int, dim: int) -> Case:
    """dK and dV of a ring step into float32, in one launch; no target."""
    moved = 2 * tokens * heads * dim * (4 + 4 + 2)

    def make(device: str) -> Work:
        outs = [random(device, tokens, heads, dim, dtype=torch.float32) for _ in range(2)]
        xs = [random(device, tokens, heads, dim) for _ in range(2)]
        copy, select = by_copy(moved, device)

        def check(k: Movers) -> None:
            wants = [out + x for out, x in zip(outs, xs, strict=True)]
            k.scatter_(outs, xs, slice(0, tokens), add=True)
            for out, want in zip(outs, wants, strict=True):
                same(out, want)

        return Work(lambda k: k.scatter_(outs, xs, slice(0, tokens), add=True), copy, select, check)

    return Case("add_rows_", f"{tokens} x {heads} x {dim}, dK and dV, bfloat16 into float32", moved, make, None)


def cases(scale: int = 1) -> Sequence[Case]:
    """The table of DESIGN's targets, every size divided by `scale`."""
    long, short, million = 65536 // scale, 16384 // scale, 1_000_000 // scale
    many, most = 10_000 // scale, Target("at most 68 us", most_us=68.0)
    found = []
    for cp_size in (2, 4, 8):
        for forward in (True, False):
            even = reorder(long, 16, 64, 16, cp_size, forward, 1, most)
            near = Target("within 5 % of 16 sequences x 16 heads", most_of_case=(even.name, 1.05))
            found += [
                even,
                reorder(long, 16, 64, many, cp_size, forward, 1, near),
                reorder(long, 8, 128, 16, cp_size, forward, 1, near),
                reorder(
                    long, 16, 64, 16, cp_size, forward, 2, Target("at most 1.9 x one", most_of_case=(even.name, 1.9))
                ),
            ]
    copied, share = Target("at most 1.25 x copy", most_of_copy=1.25), Target("85 % of the limit", least_share=0.85)
    found += [valid(n // scale, 16, 64, 16, copied) for n in (4096, 8192, 16384, 32768, 65536)]
    found += [merge(short, 32, 128, share)]
    found += [exchange(short, 32, 128, 8, to_front, share) for to_front in (True, False)]
    found += [indices(million // 16 * 16, many, n, Target("at most 15 us", most_us=15.0)) for n in (2, 4, 8)]
    return [*found, add(short, 8, 128)]
