"""Documents, each on its own; several masks in one buffer; and pictures of masks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from cp_ref.common.masks.area_rows import Lengths, listed, numbers, tensor
from cp_ref.spec import areas_of_rows, check_data, kind_of, read_count
from cp_ref.spec.arguments.single_values import read_window
from cp_ref.spec.pictures.table_pictures import areas_picture

__all__ = ["documents", "packed", "picture"]


def documents(
    cu_seqlens_q: Lengths,
    cu_seqlens_kv: Lengths | None = None,
    *,
    cu_seqlens_q_padded: Lengths | None = None,
    cu_seqlens_kv_padded: Lengths | None = None,
    window_size: tuple[int, int] = (-1, 0),
) -> torch.Tensor:
    """Each document sees itself through a window: the same as `cu_seqlens_*` and a bottom-right mask without attention
    slices.

    Args:
        cu_seqlens_q ... cu_seqlens_kv_padded: as in `attention`, [b + 1].
        window_size: (left, right), -1 for unbounded, aligned to each document's last query and key; causal by default.

    Returns:
        int64 [n, 6]: an attention slice for each document that sees anything.

    >>> print(picture(documents([0, 3, 5])))
    5 query rows x 5 key rows; a cell is 1 x 1
         k 0
    q    0 0 . . . .
         1 0 0 . . .
         2 0 0 0 . .
         3 . . . 1 .
         4 . . . 1 1
    >>> documents([0, 3, 5]).tolist()
    [[0, 3, 0, 3, -1, 0], [3, 5, 3, 5, -1, 0]]
    """
    left, right = read_window(window_size)
    q = numbers("cu_seqlens_q", cu_seqlens_q)
    slots_q = q if cu_seqlens_q_padded is None else numbers("cu_seqlens_q_padded", cu_seqlens_q_padded)
    k = q if cu_seqlens_kv is None else numbers("cu_seqlens_kv", cu_seqlens_kv)
    slots_k = slots_q if cu_seqlens_kv is None else k
    if cu_seqlens_kv_padded is not None:
        slots_k = numbers("cu_seqlens_kv_padded", cu_seqlens_kv_padded)
    if len({len(x) for x in (q, k, slots_q, slots_k)}) > 1:
        raise ValueError("cu_seqlens_q, cu_seqlens_kv and those with padding must have the same number of entries")
    lengths = ([b - a for a, b in pairwise(x)] for x in (q, k))
    placed = zip(slots_q, slots_k, *lengths, strict=False)
    return tensor((i, i + len_q, j, j + len_k, left, right) for i, j, len_q, len_k in placed)


def packed(masks: Sequence[torch.Tensor], starts_q: Lengths, starts_kv: Lengths | None = None) -> torch.Tensor:
    """One mask for each document of a buffer.

    Args:
        masks: attention slices of each document, as if it began at row 0.
        starts_q: the row of the buffer at which each begins, such as `cu_seqlens_q_padded`; entries behind the last
            document's are not looked at.
        starts_kv: the same for keys; defaults to starts_q.

    >>> from cp_ref.masks import prefix_lm
    >>> print(picture(packed([prefix_lm(2, 3), prefix_lm(3, 4)], [0, 3])))
    7 query rows x 7 key rows; a cell is 1 x 1
         k 0
    q    0 0 1 . . . . .
         1 0 0 . . . . .
         2 0 0 0 . . . .
         3 . . . 2 3 3 .
         4 . . . 2 2 3 .
         5 . . . 2 2 2 .
         6 . . . 2 2 2 2
    """
    tables: Any = masks
    if not isinstance(tables, list | tuple) or {type(mask) for mask in masks} - {torch.Tensor}:
        raise TypeError(f"masks is {masks!r}; it must be a list of tables of areas")
    q = numbers("starts_q", starts_q)
    k = q if starts_kv is None else numbers("starts_kv", starts_kv)
    for name, starts in (("starts_q", q), ("starts_kv", k)):
        if len(starts) < len(masks):
            raise ValueError(f"{name} has {len(starts)} entries for {len(masks)} masks; each needs its first row")
    moved = [mask + mask.new_tensor([i, i, j, j, 0, 0]) for mask, i, j in zip(masks, q, k, strict=False)]
    return torch.cat(moved) if moved else tensor(())


def picture(areas: torch.Tensor | Sequence[Sequence[int]], width: int = 80) -> str:
    """The mask as text: each cell shows the number of its attention slice, or "." for no attention slice; cells are
    larger where the mask does not fit `width`. The 37th attention slice is 0 again.

    >>> print(picture(torch.tensor([[0, 3, 0, 4, -1, 0], [3, 4, 1, 3, -1, -1]])))
    4 query rows x 4 key rows; a cell is 1 x 1
         k 0
    q    0 0 0 . .
         1 0 0 0 .
         2 0 0 0 0
         3 . 1 1 .
    """
    given: Any = areas
    if not isinstance(given, list | tuple | torch.Tensor) or (isinstance(given, torch.Tensor) and given.ndim != 2):
        raise TypeError(f"areas is {kind_of(given)}; it must be a tensor [n, 6]")
    if isinstance(given, torch.Tensor):
        check_data("areas", given)
    rows: list[Any] = [tuple(numbers(f"areas[{n}]", row, at_least=-(2**62))) for n, row in enumerate(listed(given))]
    if any(len(row) != 6 for row in rows):
        raise ValueError(f"areas has rows of {', '.join(sorted({str(len(row)) for row in rows}))} numbers; each has 6")
    return areas_picture(areas_of_rows(tuple(rows)), read_count("width", width, at_least=1))
