"""Causal masks of a batch that are no window: chunks, as in Llama 4, and tokens that see each other both ways, such as
those of an image in Gemma 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_ref.batches.area_rows import tensor, upper
from cp_ref.schedules.areas import WindowRow

__all__ = ["Block", "BothWays", "MaskAreas"]

Block = tuple[int, tuple[tuple[int, int], ...]]  # a sequence, and of each run in it the first token and the one behind


@dataclass(frozen=True)
class BothWays:
    """Tokens of a batch that see each other both ways.

    Args:
        blocks: whose tokens do. A block has one run of neighbours, or several.
        windowed: a layer's window hides keys of a block too. False: it does not.
    """

    blocks: tuple[Block, ...]
    windowed: bool = True


class MaskAreas:
    """The areas of a batch, for each kind of its layers.

    Areas are of packed buffers. There the rows of a batch lie one after the other. A rank's slice of them is the same
    in another shape.

    Args:
        cp: of the batch.
        cu_seqlens: global, of the tokens: int32 or int64 [b + 1], on the CPU.
        cu_seqlens_padded: of a packed batch. None: the sequences are rows of `slot` tokens, padding included.
        both_ways: tokens that see each other both ways; None: there are none.

    Attributes:
        longest: how many tokens the longest sequence has.
    """

    def __init__(
        self,
        cp: ContextParallel,
        cu_seqlens: torch.Tensor,
        cu_seqlens_padded: torch.Tensor | None,
        slot: int,
        both_ways: BothWays | None = None,
    ) -> None:
        if cu_seqlens_padded is None:
            cu_seqlens_padded = slot * torch.arange(len(cu_seqlens), device="cpu", dtype=cu_seqlens.dtype)
            if cp.layout == "contiguous":  # which cuts each row, but a packed buffer as a whole
                mine, rows = slot // cp.size, range(len(cu_seqlens) - 1)
                cp = cp.holding([(r, row, r * mine, (r + 1) * mine) for r in range(cp.size) for row in rows])
        self.cp, self.both_ways = cp, both_ways
        self.lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_q_padded": cu_seqlens_padded}
        self.longest = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
        self._areas: dict[tuple[int, int], torch.Tensor] = {}

    def arguments(self, left: int, chunk: int = 0) -> dict[str, Any]:
        """The arguments of `attention` after q, k, v [t/cp, h, d], in layers of one kind.

        Args:
            left: the side of their window to the left, -1 for none.
            chunk: the tokens of a chunk; 0: a sequence is one.

        Raises:
            NotImplementedError: chunks in a batch with tokens that see each other both ways.
        """
        if chunk and self.both_ways is not None:
            raise NotImplementedError(
                f"a layer has chunks of {chunk} tokens, and tokens of images see each other both ways; cp_fast has one "
                "of the two in a batch"
            )
        if (left, chunk) not in self._areas:
            self._areas[left, chunk] = tensor(self._rows(left, chunk))
        return {"cp": self.cp, "qkv_format": "thd", "areas": self._areas[left, chunk], **self.lengths}

    def _rows(self, left: int, chunk: int) -> Iterator[WindowRow]:
        """Each chunk of a sequence sees itself up to each token, and each token of a block what is behind it there.

        >>> from cp_ref.batches.area_rows import picture
        >>> from cp_ref.groups.group import PaperGroup
        >>> one = MaskAreas(ContextParallel(PaperGroup(1)), torch.tensor([0, 4]), None, 4, BothWays(((0, ((1, 3),)),)))
        >>> print(picture(one.arguments(-1)["areas"]))
        4 query rows x 4 key rows; a cell is 1 x 1
             k 0
        q    0 0 . . .
             1 0 0 1 .
             2 0 0 0 .
             3 0 0 0 0
        >>> one = MaskAreas(ContextParallel(PaperGroup(1)), torch.tensor([0, 4]), None, 4)
        >>> print(picture(one.arguments(-1, chunk=3)["areas"]))
        4 query rows x 4 key rows; a cell is 1 x 1
             k 0
        q    0 0 . . .
             1 0 0 . .
             2 0 0 0 .
             3 . . . 1
        """
        starts = self.lengths["cu_seqlens_q_padded"].tolist()
        lengths = self.lengths["cu_seqlens_q"].diff().tolist()
        for start, length in zip(starts, lengths, strict=False):
            for first in range(0, length, chunk or max(length, 1)):
                begin, end = start + first, start + min(first + (chunk or length), length)
                yield begin, end, begin, end, left, 0
        for sequence, runs in () if self.both_ways is None else self.both_ways.blocks:
            spans = [(starts[sequence] + first, starts[sequence] + stop) for first, stop in runs]
            for number, (first, stop) in enumerate(spans):
                yield upper(first, stop)
                yield from ((first, stop, *later, -1, -1) for later in spans[number + 1 :])
                if left >= 0 and self.both_ways is not None and not self.both_ways.windowed:
                    yield from (_before_window(first, stop, *keys, left) for keys in spans[: number + 1])


def _before_window(q_first: int, q_stop: int, k_first: int, k_stop: int, left: int) -> WindowRow:
    """The keys that are further to the left of a query than its window.

    >>> from cp_ref.batches.area_rows import picture
    >>> print(picture([_before_window(0, 4, 0, 4, 1)]))
    4 query rows x 2 key rows; a cell is 1 x 1
         k 0
    q    0 . .
         1 . .
         2 0 .
         3 0 0
    """
    stop = min(k_stop, q_stop - left - 1)
    return (max(q_first, k_first + left + 1), q_stop, k_first, stop, -1, q_stop - left - 1 - stop)
