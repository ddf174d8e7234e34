"""Areas as the tensor that `attention(..., areas=...)` takes: rows of it, documents in one buffer, and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch

from cp_ref.schedules.areas import WindowRow, areas_of_windows
from cp_ref.schedules.values import check_data, kind_of, read_count
from cp_ref.show.text_pictures import areas_picture

__all__ = [
    "FULL",
    "MOST_ROWS",
    "Lengths",
    "causal",
    "listed",
    "numbers",
    "packed",
    "picture",
    "tensor",
    "upper",
]

FULL = (-1, -1)  # a window that hides nothing
MOST_ROWS = 2**18  # of a mask: planning takes 15 s for each 100,000 of them
Lengths = torch.Tensor | Sequence[int]


def causal(start: int, stop: int) -> WindowRow:
    """Rows that see each other up to themselves."""
    return (start, stop, start, stop, -1, 0)


def upper(start: int, stop: int) -> WindowRow:
    """The area that makes a causal square dense: for each row, the keys after it.

    >>> tensor([causal(0, 3), upper(0, 3)]).tolist()
    [[0, 3, 0, 3, -1, 0], [0, 2, 1, 3, 0, -1]]
    """
    return (start, stop - 1, start + 1, stop, 0, -1)


def tensor(rows: Iterable[WindowRow]) -> torch.Tensor:
    """The areas, int64 [n, 6], without those that have no row or no column.

    Raises:
        ValueError: there are more than `MOST_ROWS` rows, empty ones counted. No more are computed.
    """
    some = list(islice(rows, MOST_ROWS + 1))
    if len(some) > MOST_ROWS:
        raise ValueError(f"the arguments make areas of more than {MOST_ROWS} rows, the most that a mask can have")
    kept = [row for row in some if row[0] < row[1] and row[2] < row[3]]
    return torch.tensor(kept, dtype=torch.int64, device="cpu").reshape(-1, 6)


def listed(x: Any) -> Any:
    """A tensor as lists; anything else unchanged."""
    return x.tolist() if hasattr(x, "tolist") else x


def numbers(name: str, values: Any, at_least: int = 0) -> list[int]:
    """Integers from a list, a tuple or a tensor of one axis.

    Raises:
        TypeError, ValueError: naming the first that is wrong.
    """
    if isinstance(values, torch.Tensor):
        check_data(name, values)
    if not isinstance(values, list | tuple) and getattr(values, "ndim", 0) != 1:
        raise TypeError(f"{name} is {values!r}; it must be a list of integers, or a tensor")
    found: Sequence[Any] = listed(values)
    return [read_count(f"{name}[{n}]", value, at_least=at_least) for n, value in enumerate(found)]


def packed(masks: Sequence[torch.Tensor], starts_q: Lengths, starts_kv: Lengths | None = None) -> torch.Tensor:
    """Join masks into one, a mask for each document of a buffer.

    Args:
        masks: areas of each document, as if it began at row 0.
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
    """Draw the mask as text: each cell shows the number of its area, or "." for no area; cells are larger where the
    mask does not fit `width`. The 37th area is 0 again.

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
    return areas_picture(areas_of_windows(tuple(rows)), read_count("width", width, at_least=1))
