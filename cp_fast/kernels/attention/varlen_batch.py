"""A batch of diagonal band tiles: what one launch of a varlen kernel computes.

Every tile of every schedule is, after cropping, a rectangle of query rows and key columns crossed by a diagonal band.
One `VarlenBatch` is a batch of such rectangles that share a diagonal band, packed one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, overload

import numpy as np
import torch

__all__ = ["Cumulative", "SegmentStarts", "VarlenBatch", "longest"]


@dataclass(frozen=True, slots=True)
class VarlenBatch:
    """Rectangles packed one after the other: segment s is q rows `cu_q[s]:cu_q[s+1]` by kv rows `cu_kv[s]:cu_kv[s+1]`.

    With lq and lk the segment's two lengths, row i sees column j (both from 0 inside the segment) iff

        (left is None or j >= i + lk - lq - left) and (right is None or j <= i + lk - lq + right)

    which is the bottom-right aligned window of the flash-attention family, with None for unbounded. No segment is
    empty, and every row sees at least one column. So right >= lq - lk, negative only if no row sees the last column.
    And left >= 0, since the last row's diagonal ends in the last column. Rows lie side by side, cu from 0 to the
    tensors' lengths: a kernel may read a neighbour's rows and multiply them by zero, so no row may hold a NaN that does
    not belong to the problem.

    With `starts`, the segments do not lie side by side: cu_q and cu_kv then have their lengths alone.

    A plan updated in place (`Plan.update`) has wider rules. Segments of length zero come last. Tensors have more
    rows after cu[-1]: they are finite if there is any segment, and their results are not read. `max_q` and `max_kv` are
    upper bounds. The lengths on the host are those of the current batch. A CUDA graph captured with them is replayed
    with others, so a GPU kernel reads lengths from the device only.
    """

    cu_q: Sequence[int]  # A tuple, or a lazy one: `Cumulative`.
    cu_kv: Sequence[int]
    left: int | None
    right: int | None
    device_cu_q: torch.Tensor  # int32 [segments + 1], on the tiles' device.
    device_cu_kv: torch.Tensor  # int32 [segments + 1].
    starts: SegmentStarts | None = None  # For a forward launch of a backend that has `shared_keys_tile`.
    max_q: int = field(init=False)  # The longest segment's query rows.
    max_kv: int = field(init=False)  # The longest segment's key columns.

    @property
    def first_rows(self) -> tuple[Sequence[int], Sequence[int]]:
        """The first row of each segment, of q and of kv.

        >>> VarlenBatch.pack([2, 3], [4, 3], None, 0).first_rows
        ((0, 2), (0, 4))
        """
        return (self.cu_q[:-1], self.cu_kv[:-1]) if self.starts is None else self.starts[:2]

    @property
    def updated_in_place(self) -> bool:
        """Whether the device's lengths may be replaced; those on the host are of one batch only."""
        return isinstance(self.cu_q, Cumulative) and self.cu_q.bound is not None

    def __post_init__(self) -> None:
        """Find the longest segments once: every layer's launches ask for them."""
        object.__setattr__(self, "max_q", longest(self.cu_q))
        object.__setattr__(self, "max_kv", longest(self.cu_kv))

    @staticmethod
    def pack(
        lengths_q: Sequence[int],
        lengths_kv: Sequence[int],
        left: int | None,
        right: int | None,
        device: torch.device | str = "cpu",
    ) -> VarlenBatch:
        """Segments of these lengths, one after the other from row 0 and column 0.

        >>> VarlenBatch.pack([2, 3], [4, 3], None, 0).cu_q
        (0, 2, 5)
        """
        cu_q, cu_kv = tuple(accumulate(lengths_q, initial=0)), tuple(accumulate(lengths_kv, initial=0))
        on_device_q = torch.tensor(cu_q, dtype=torch.int32, device=device)
        return VarlenBatch(cu_q, cu_kv, left, right, on_device_q, torch.tensor(cu_kv, dtype=torch.int32, device=device))

    def alone(self, s: int) -> VarlenBatch:
        """Segment s as a separate launch, its rows and columns counted from 0.

        >>> VarlenBatch.pack([2, 3], [4, 3], None, 0).alone(1).device_cu_q
        tensor([0, 3], dtype=torch.int32)
        """
        cu_q, cu_kv = self.cu_q[s : s + 2], self.cu_kv[s : s + 2]
        on_device_q, on_device_kv = self.device_cu_q[s : s + 2], self.device_cu_kv[s : s + 2]
        return VarlenBatch(
            (0, cu_q[1] - cu_q[0]),
            (0, cu_kv[1] - cu_kv[0]),
            self.left,
            self.right,
            on_device_q - on_device_q[:1],
            on_device_kv - on_device_kv[:1],
        )


class SegmentStarts(NamedTuple):
    """Where the segments of a batch lie, in any order: the first row of each, and on the device its number of rows too.
    Segments have no common rows of q, but may have common rows of k and v. Rows of q between them may be padding: what
    they hold, and what their results are, does not matter. Rows of k and v between them are tokens.
    """

    q: Sequence[int]  # [segments].
    kv: Sequence[int]  # [segments].
    device_q: torch.Tensor  # int32 [segments + 1]; the last number is not used.
    device_rows: torch.Tensor  # int32 [segments].
    device_kv: torch.Tensor  # int32 [segments + 1]; the last number is not used.
    device_columns: torch.Tensor  # int32 [segments].


# ---- lengths on the host
#
# Cumulative lengths of a launch on the host: a tuple in use, stored as the array that planning made.


class Cumulative(Sequence[int]):
    """Cumulative lengths [n + 1]. The Python numbers are made when a backend first needs all of them. Most never do,
    and a plan has hundreds of launches of thousands of sequences.

    `bound`: the upper bound of all lengths, if they will be replaced by others; it then counts as the longest.

    >>> cu = Cumulative(np.array([0, 3, 5]))
    >>> cu == (0, 3, 5), cu[-1], cu[0:2], len(cu), cu.longest, Cumulative(np.array([0, 3, 5]), bound=8).longest
    (True, 5, (0, 3), 3, 3, 8)
    """

    def __init__(self, values: np.ndarray, bound: int | None = None) -> None:
        self.values = values
        self.bound = bound

    @cached_property
    def longest(self) -> int:
        """The largest difference of neighbours, 0 without any; or the bound."""
        return int(np.diff(self.values).max(initial=0)) if self.bound is None else self.bound

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        return tuple(self.values.tolist())

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return tuple(self.values[index].tolist()) if isinstance(index, slice) else int(self.values[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __eq__(self, other: object) -> bool:
        return self._numbers == (other._numbers if isinstance(other, Cumulative) else other)

    def __hash__(self) -> int:
        return hash(self._numbers)  # equal to a tuple, so its hash too

    def __repr__(self) -> str:
        return repr(self._numbers)


def longest(cumulative: Sequence[int]) -> int:
    """The longest of the lengths.

    >>> longest((0, 3, 5))
    3
    """
    if isinstance(cumulative, Cumulative):
        return cumulative.longest
    return max((b - a for a, b in pairwise(cumulative)), default=0)
