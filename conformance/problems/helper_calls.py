"""Calls of THD helpers: their fields and rules, the values of memory that a helper must not touch, and the rows that
definitions name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from conformance.case import dtype_of
from conformance.problems.problem import LevelProblem

__all__ = [
    "Arguments",
    "Broken",
    "Built",
    "HelperCall",
    "HelperRecord",
    "Lengths",
    "any_bits",
    "by_head",
    "check_fits",
    "check_lse",
    "check_tail",
    "chunk_lengths",
    "chunk_unit",
    "half_rows",
    "halved",
    "lengths_of",
    "lse_index",
    "lse_sizes",
    "normal",
    "random_lse",
    "rank_rows",
    "require",
    "row_index",
    "token_shape",
]

Arguments = dict[str, Any]


@dataclass(frozen=True)
class HelperCall(LevelProblem):
    """One call of a helper. Which fields it depends on, its record's `build` says.

    `slots` are the padded lengths in units that the helper can divide, `real` the share of them, in eighths, that are
    valid tokens; both are repeated `repeat` times.
    """

    name: str = ""
    slots: tuple[int, ...] = ()
    real: tuple[int, ...] = ()
    repeat: int = 1
    tail: int = 0  # In units too.
    cp_size: int = 1
    rank: int = 0
    index_dtype: str = "int32"
    dtype: str = "float32"
    wide: bool = False  # Accumulate into float32 from another dtype.
    dims: tuple[int, ...] = ()  # Of a row.
    packed: bool = True  # LSEs are [h, t], and not [b, h, s]; tokens of a batch are [t], and not [1, t].
    choices: tuple[int, ...] = (0, 0)  # The half, the actions or the format: see the helper.
    spare: int = 0  # Room beyond what is needed.
    seed: int = 0


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
    rule: raises `Broken` for a call without an answer. None: the helper takes no lengths, so none can be spoiled.
    moves: whether the helper only moves data. Then the bits stay.
    """

    build: Callable[[HelperCall, str], Built]
    definition: Callable[..., Any]
    rule: Callable[[Arguments], None] | None = None
    moves: bool = True


# ---- values
#
# Arguments for THD helpers: lengths in tokens, and random values that reveal any extra read or write.


class Lengths:
    """The lengths of a case in tokens, for units of `unit` tokens."""

    def __init__(self, case: HelperCall, unit: int, device: str) -> None:
        self.slots = [n * unit for n in case.slots] * case.repeat
        self.real = [n * share // 8 for n, share in zip(self.slots, list(case.real) * case.repeat, strict=True)]
        self.starts = [0, *accumulate(self.slots)]
        self.tail = case.tail * unit
        self.tokens = self.starts[-1] + self.tail
        self._dtype, self._device = dtype_of(case.index_dtype), device

    def cumulative(self, lengths: list[int]) -> torch.Tensor:
        """cu_seqlens of some lengths."""
        return torch.tensor([0, *accumulate(lengths)], dtype=self._dtype, device=self._device)

    @property
    def padded(self) -> torch.Tensor:
        """cu_seqlens_padded."""
        return self.cumulative(self.slots)

    def rows(self, halves: tuple[int, ...] = (0, 1)) -> torch.Tensor:
        """Which rows of a buffer belong to these halves of the sequences: bool [t]."""
        mask = torch.zeros(self.tokens, dtype=torch.bool, device=self._device)
        for start, slots in zip(self.starts, self.slots, strict=False):
            for half in halves:
                mask[start + half * slots // 2 : start + (half + 1) * slots // 2] = True
        return mask

    def lse_values(self, heads: int, room: int, packed: bool, halves: tuple[int, ...] = (0, 1)) -> torch.Tensor:
        """The same for an LSE, [h, t] or [b, h, s]."""
        if packed:
            return self.rows(halves).expand(heads, -1)
        mask = torch.zeros(len(self.slots), heads, room, dtype=torch.bool, device=self._device)
        for number, slots in enumerate(self.slots):
            for half in halves:
                mask[number, :, half * slots // 2 : (half + 1) * slots // 2] = True
        return mask


def chunk_unit(case: HelperCall) -> int:
    """The unit of helpers that know ranks: all chunks of layout dual_chunk; on one rank sequences have any length."""
    return 1 if case.cp_size == 1 else 2 * case.cp_size


def any_bits(
    case: HelperCall, shape: tuple[int, ...], device: str, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Values of any bits, NaN among them: what is moved must not be looked at."""
    dtype, generator = dtype_of(case.dtype), generator or case.generator()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool().to(device)
    flat = torch.randint(0, 256, (torch.Size(shape).numel() * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape).to(device)


def normal(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Normally distributed values, equal in every dtype up to rounding."""
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def random_lse(
    shape: tuple[int, ...], known: torch.Tensor, generator: torch.Generator, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """LSEs, some of them -inf (a row that saw nothing); NaN where nobody may read."""
    lse = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    lse = lse.masked_fill(torch.rand(shape, generator=generator) < 0.2, -torch.inf)
    return lse.to(device, dtype).masked_fill(~known, torch.nan)


def halved(case: HelperCall, lengths: Lengths, device: str) -> Lengths:
    """Sequences of half the slots."""
    other = Lengths(case, 1, device)
    assert [2 * n for n in other.slots] == lengths.slots
    return other


def lse_sizes(case: HelperCall, lengths: Lengths, half: bool = False) -> tuple[tuple[int, ...], int]:
    """The shape of an LSE of whole sequences or of halves, and how many positions a padded one has."""
    heads = case.dims[0] if case.dims else 1
    room = max(lengths.slots, default=0) // (2 if half else 1) + case.spare
    if case.packed:
        return (heads, lengths.tokens // (2 if half else 1)), room
    return (len(lengths.slots), heads, room), room


def token_shape(case: HelperCall, tokens: int) -> tuple[int, ...]:
    """[t], [t, d], [t, h, d] or, if `packed` is not set, [2, t, h, d]."""
    shape = (tokens, *case.dims)
    return (2, *shape) if len(case.dims) == 2 and not case.packed else shape


# ---- rows
#
# The rows that a helper's definition reads and writes, sequence by sequence.
#
# rows of a buffer     cu_seqlens_padded = [0, 8, 12], 14 rows: sequence 0 has rows 0-7, sequence 1 rows 8-11, the
#                      tail rows 12-13
# chunk c of a sequence of n rows at cp_size p      rows c * n / (2p) up to (c + 1) * n / (2p)
# rank r of layout dual_chunk      chunks r and 2p - 1 - r of every sequence, then part r of the tail; for p 1, all rows


def rank_rows(lengths: list[int], tokens: int, cp_size: int, rank: int) -> list[int]:
    """The global rows of one rank's slice, layout dual_chunk.

    >>> rank_rows([0, 8, 12], 14, 2, 1)
    [2, 3, 4, 5, 9, 10, 13]
    """
    if cp_size == 1:
        return list(range(tokens))
    rows: list[int] = []
    for start, stop in pairwise(lengths):
        chunk = (stop - start) // (2 * cp_size)
        for number in (rank, 2 * cp_size - 1 - rank):
            rows += range(start + number * chunk, start + (number + 1) * chunk)
    part = (tokens - lengths[-1]) // cp_size
    return rows + list(range(lengths[-1] + rank * part, lengths[-1] + (rank + 1) * part))


def row_index(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)


def half_rows(lengths: Tensor, half: int) -> tuple[list[int], list[int]]:
    """The rows of one half of every sequence, and the same rows in a buffer of halves alone."""
    rows, rows_of_half = [], []
    for start, stop in pairwise(lengths.tolist()):
        size = (stop - start) // 2
        rows += range(start + half * size, start + (half + 1) * size)
        rows_of_half += range(start // 2, start // 2 + size)
    return rows, rows_of_half


def lse_index(lse: Tensor, lengths: Tensor, lse_packed: bool, part: str) -> tuple[Tensor, ...]:
    """Where an LSE [h, t], or [b, h, s] seen as [h, b, s], holds some rows of every sequence.

    part: "second": the second half, in an LSE of whole sequences; "halves": all of an LSE of halves; "whole": all.
    """
    sequences, positions, rows = [], [], []
    for number, (start, stop) in enumerate(pairwise(lengths.tolist())):
        size = stop - start if part == "whole" else (stop - start) // 2
        first = size if part == "second" else 0
        begin = start // 2 if part == "halves" else start
        sequences += [number] * size
        positions += range(first, first + size)
        rows += range(begin + first, begin + first + size)
    return (row_index(rows, lse),) if lse_packed else (row_index(sequences, lse), row_index(positions, lse))


def by_head(lse: Tensor, lse_packed: bool) -> Tensor:
    """A view [h, t] or [h, b, s]."""
    return lse if lse_packed else lse.transpose(0, 1)


# ---- rules
#
# Which calls of a THD helper have an answer: the rules for lengths, and for buffers that must have room for them.


class Broken(Exception):
    """A rule that a call breaks."""


def require(right: bool, rule: str) -> None:
    if not right:
        raise Broken(rule)


def lengths_of(arguments: Arguments, name: str, divisor: int = 1, first: int | None = 0) -> list[int]:
    """The lengths that a cumulative tensor gives; first: what it begins with, None for anything from 0 on."""
    x = arguments[name]
    require(x.dtype in (torch.int32, torch.int64), f"{name} must be int32 or int64: {x.dtype}")
    require(x.ndim == 1 and len(x) > 0, f"{name} must be [b + 1]: {list(x.shape)}")
    values = x.tolist()
    require(values[0] == first if first is not None else values[0] >= 0, f"{name} must begin at 0: {values[:3]}")
    sizes = [b - a for a, b in pairwise(values)]
    require(min(sizes, default=0) >= 0, f"{name} must not decrease: {values[-3:]}")
    wrong = [n for n in sizes if n % divisor]
    require(not wrong, f"every length of {name} must be a multiple of {divisor}: {wrong[:3]}")
    return sizes


def check_tail(arguments: Arguments, tokens: int, divisor: int, name: str = "cu_seqlens_padded") -> None:
    """The tail behind the last sequence has its share for everyone."""
    tail = tokens - int(arguments[name][-1])
    require(tail >= 0, f"{name} ends {-tail} rows behind the buffer of {tokens}")
    require(tail % divisor == 0, f"the tail must be a multiple of {divisor}: {tail}")


def check_fits(real: list[int], slots: list[int]) -> None:
    require(len(real) == len(slots), f"there are {len(real)} real lengths and {len(slots)} padded ones")
    require(all(a <= b for a, b in zip(real, slots, strict=True)), "a sequence has more tokens than slots")


def check_lse(lse: torch.Tensor, packed: bool, sizes: list[int], tokens: int | None = None) -> None:
    """An LSE has room for every sequence: [h, t] (of `tokens` rows, if given), or [b, h, s]."""
    if not packed:
        right = lse.ndim == 3 and len(lse) == len(sizes) and lse.shape[2] >= max(sizes, default=0)
    else:
        right = lse.ndim == 2 and (lse.shape[1] >= sum(sizes) if tokens is None else lse.shape[1] == tokens)
    require(right, f"an LSE of shape {list(lse.shape)} has no room for the lengths {sizes[:8]}")


def chunk_lengths(a: Arguments) -> list[int]:
    """The lengths of sequences that ranks share; one rank holds sequences of any length."""
    return lengths_of(a, "cu_seqlens_padded", 1 if a["cp_size"] == 1 else 2 * a["cp_size"])
