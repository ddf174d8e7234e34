"""Tokens that see each other both ways inside causal masks, such as those of an image in Gemma 3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_ref.batches.area_rows import tensor, upper
from cp_ref.schedules.areas import WindowRow

__all__ = ["BothWays"]

Run = tuple[int, int, int]


class BothWays:
    """The runs of tokens of a batch that see each other both ways.

    Areas are of packed buffers. There the rows of a batch lie one after the other. A rank's slice of them is the same
    in another shape.

    Args:
        cp: of the batch.
        runs: sequence, first token, and the one behind the last.
        cu_seqlens: global, of the tokens: int32 or int64 [b + 1], on the CPU.
        cu_seqlens_padded: of a packed batch. None: the sequences are rows of `slot` tokens, padding included.
    """

    def __init__(
        self,
        cp: ContextParallel,
        runs: tuple[Run, ...],
        cu_seqlens: torch.Tensor,
        cu_seqlens_padded: torch.Tensor | None,
        slot: int,
    ) -> None:
        if cu_seqlens_padded is None:
            cu_seqlens_padded = slot * torch.arange(len(cu_seqlens), device="cpu", dtype=cu_seqlens.dtype)
            if cp.layout == "contiguous":  # which cuts each row, but a packed buffer as a whole
                mine, rows = slot // cp.size, range(len(cu_seqlens) - 1)
                cp = cp.holding([(r, row, r * mine, (r + 1) * mine) for r in range(cp.size) for row in rows])
        self.cp, self.runs = cp, runs
        self.lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_q_padded": cu_seqlens_padded}
        self._areas: dict[int, torch.Tensor] = {}

    def arguments(self, left: int) -> dict[str, Any]:
        """The arguments of `attention` after q, k, v [t/cp, h, d], in layers with a window.

        Args:
            left: the side of the window to the left, -1 for none. It hides keys of a run too.
        """
        if left not in self._areas:
            self._areas[left] = tensor(self._slices(left))
        return {"cp": self.cp, "qkv_format": "thd", "areas": self._areas[left], **self.lengths}

    def _slices(self, left: int) -> Iterator[WindowRow]:
        """Each sequence sees itself up to each token, and each token of a run what is behind it in the run.

        >>> from cp_ref.groups.group import PaperGroup
        >>> one = BothWays(ContextParallel(PaperGroup(1)), ((0, 1, 3),), torch.tensor([0, 4]), None, 4)
        >>> from cp_ref.batches.area_rows import picture
        >>> print(picture(one.arguments(-1)["areas"]))
        4 query rows x 4 key rows; a cell is 1 x 1
             k 0
        q    0 0 . . .
             1 0 0 1 .
             2 0 0 0 .
             3 0 0 0 0
        """
        starts = self.lengths["cu_seqlens_q_padded"].tolist()
        lengths = self.lengths["cu_seqlens_q"].diff().tolist()
        for start, length in zip(starts, lengths, strict=False):
            yield (start, start + length, start, start + length, left, 0)
        for sequence, first, stop in self.runs:
            yield upper(starts[sequence] + first, starts[sequence] + stop)
