"""MagiAttention's masks: pairs of ranges, each with one of four types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cp_ref.common.masks.area_rows import listed, numbers, tensor
from cp_ref.spec import AttentionSliceRow, check_data
from cp_ref.spec.arguments.single_values import read_several

__all__ = ["from_magi"]

# Type, as MagiAttention's number and as the name of its AttnMaskType: (keys after the diagonal of the last row and key
# are hidden, keys before the diagonal of the first row and key are hidden).
_TYPES = {
    **dict.fromkeys((0, "full"), (False, False)),
    **dict.fromkeys((1, "causal"), (True, False)),
    **dict.fromkeys((2, "inv_causal"), (False, True)),
    **dict.fromkeys((3, "bi_causal"), (True, True)),
}


def from_magi(q_ranges: Any, k_ranges: Any, types: Sequence[int | str]) -> torch.Tensor:
    """A mask as MagiAttention has it.

    Args:
        q_ranges, k_ranges: (start, stop) of rows, [n, 2]: lists, or a tensor. For its `AttnRanges` call
            `.to_naive_ranges()`.
        types: for each pair of ranges 0 or "full", 1 or "causal" (aligned to the last row and key), 2 or "inv_causal"
            (aligned to the first ones), 3 or "bi_causal" (both).

    Raises:
        ValueError: naming a type that there is not.

    >>> from cp_ref.masks import picture
    >>> print(picture(from_magi([[0, 2], [2, 4], [4, 6]], [[0, 4], [0, 4], [4, 6]], ["bi_causal", "causal", 2])))
    6 query rows x 6 key rows; a cell is 1 x 1
         k 0
    q    0 0 0 0 . . .
         1 . 0 0 0 . .
         2 1 1 1 . . .
         3 1 1 1 1 . .
         4 . . . . 2 2
         5 . . . . . 2
    """
    q, k = _spans("q_ranges", q_ranges), _spans("k_ranges", k_ranges)
    if not isinstance(types, list | tuple) or not len(q) == len(k) == len(types):
        raise ValueError(f"types is {types!r}; it must be a list as long as q_ranges ({len(q)}), k_ranges ({len(k)})")
    rows: list[AttentionSliceRow] = []
    for n, ((q_start, q_stop), (k_start, k_stop), kind) in enumerate(zip(q, k, types, strict=True)):
        if kind not in list(_TYPES):
            raise ValueError(f"types[{n}] is {kind!r}; it must be one of {', '.join(map(repr, _TYPES))}")
        hides_behind, hides_before = _TYPES[kind]
        more_keys = (k_stop - k_start) - (q_stop - q_start)
        if hides_before and more_keys < 0:  # Rows below the diagonal of the first row and key see nothing.
            if hides_behind:
                continue
            q_stop, more_keys = q_stop + more_keys, 0
        rows.append((q_start, q_stop, k_start, k_stop, more_keys if hides_before else -1, 0 if hides_behind else -1))
    return tensor(rows)


def _spans(name: str, ranges: Any) -> list[tuple[int, int]]:
    """(start, stop) of rows.

    Raises:
        TypeError, ValueError: it is no list of pairs of integers.
    """
    if isinstance(ranges, torch.Tensor):
        check_data(name, ranges)
    rows = read_several(name, listed(ranges))
    found = [numbers(f"{name}[{n}]", row) for n, row in enumerate(rows)]
    for n, row in enumerate(found):
        if len(row) != 2:
            raise ValueError(f"{name}[{n}] is {row}; it must be (start, stop)")
    return [(row[0], row[1]) for row in found]
