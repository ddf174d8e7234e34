"""Arguments for THD helpers: lengths in tokens, and random values that reveal any extra read or write."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from conformance.dtypes import dtype_of

if TYPE_CHECKING:
    from conformance.levels.helpers.helper_case import Helper

__all__ = [
    "Lengths",
    "any_bits",
    "chunk_unit",
    "generator_of",
    "halved",
    "lse_sizes",
    "normal",
    "random_lse",
    "token_shape",
]


class Lengths:
    """The lengths of a case in tokens, for units of `unit` tokens."""

    def __init__(self, case: Helper, unit: int, device: str) -> None:
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


def chunk_unit(case: Helper) -> int:
    """The unit of helpers that know ranks: all chunks of layout dual_chunk; on one rank sequences have any length."""
    return 1 if case.cp_size == 1 else 2 * case.cp_size


def generator_of(case: Helper) -> torch.Generator:
    """The generator of a case's random values, at its beginning."""
    return torch.Generator().manual_seed(case.seed)


def any_bits(
    case: Helper, shape: tuple[int, ...], device: str, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Values of any bits, NaN among them: what is moved must not be looked at."""
    dtype, generator = dtype_of(case.dtype), generator or generator_of(case)
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


def halved(case: Helper, lengths: Lengths, device: str) -> Lengths:
    """Sequences of half the slots."""
    other = Lengths(case, 1, device)
    assert [2 * n for n in other.slots] == lengths.slots
    return other


def lse_sizes(case: Helper, lengths: Lengths, half: bool = False) -> tuple[tuple[int, ...], int]:
    """The shape of an LSE of whole sequences or of halves, and how many positions a padded one has."""
    heads = case.dims[0] if case.dims else 1
    room = max(lengths.slots, default=0) // (2 if half else 1) + case.spare
    if case.packed:
        return (heads, lengths.tokens // (2 if half else 1)), room
    return (len(lengths.slots), heads, room), room


def token_shape(case: Helper, tokens: int) -> tuple[int, ...]:
    """[t], [t, d], [t, h, d] or, if `packed` is not set, [2, t, h, d]."""
    shape = (tokens, *case.dims)
    return (2, *shape) if len(case.dims) == 2 and not case.packed else shape
