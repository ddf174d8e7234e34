"""Attention slices and ownership as text pictures; the picture of a schedule is in `text_pictures.py`."""

from __future__ import annotations

from string import ascii_lowercase, digits

import numpy as np

from cp_ref.spec.tables.attention_slices import AttentionSlices, pairs
from cp_ref.spec.tables.ownership import Fragments, Ownership

__all__ = ["areas_picture", "ownership_picture"]

_NAMES = digits + ascii_lowercase  # of attention slices and ranks, again from the first one after the last
_TITLES = "row of the global buffer", "rank", "row of the rank's buffer"


def areas_picture(areas: AttentionSlices, width: int = 80) -> str:
    """The score matrix: each cell shows the number of the attention slice that has most of its visible pairs, "." for
    none.

    A cell is one query x one key where that fits `width` (two characters a cell), else a square of them. The 37th
    attention slice is 0 again.

    >>> print(areas_picture(AttentionSlices.parse("area q[0:3] k[0:3] band *:0\\narea q[4:6] k[4:7] band *:*")))
    6 query rows x 7 key rows; a cell is 1 x 1
         k 0
    q    0 0 . . . . . .
         1 0 0 . . . . .
         2 0 0 0 . . . .
         3 . . . . . . .
         4 . . . . 1 1 1
         5 . . . . 1 1 1
    """
    rows, columns = int(areas.q_stop.max(initial=0)), int(areas.k_stop.max(initial=0))
    size = _cell_size(max(rows, columns), width - 7)
    q, k = np.arange(0, rows, size)[:, None], np.arange(0, columns, size)[None, :]
    most = np.zeros((q.size, k.size), dtype=np.int64)
    names = np.full(most.shape, ".", dtype="<U1")
    for number, (q0, q1, k0, k1, lo, hi) in enumerate(areas.rows()):
        edges = np.maximum(q, q0), np.minimum(q + size, q1), np.maximum(k, k0), np.minimum(k + size, k1)
        seen = pairs(*np.broadcast_arrays(*edges), *(np.full(most.shape, edge) for edge in (lo, hi)))
        names[seen > most] = _NAMES[number % len(_NAMES)]
        np.maximum(most, seen, out=most)
    lines = [f"{rows} query rows x {columns} key rows; a cell is {size} x {size}", "     k 0"]
    for n, cells in enumerate(names.tolist()):
        lines.append(f"{'' if n else 'q':1}{n * size:>5} {' '.join(cells)}")
    return "\n".join(lines)


def ownership_picture(ownership: Ownership, width: int = 80) -> str:
    """The owner of each row of the global buffers, "." for nobody (padding), and the place in its rank's buffer of the
    first of each run of rows. Rank 36 is 0 again.

    Where the rows do not fit `width` (two characters a row), a character covers several and shows the owner of most.

    >>> print(ownership_picture(Ownership.parse('''ownership cp_size 2
    ...     rank 0 q[0:2] row 0
    ...     rank 0 q[6:7] row 2
    ...     rank 1 q[2:6] row 0
    ...     rank 0 kv[0:1] row 0
    ...     rank 1 kv[1:2] row 0''')))
    q    row of the global buffer   0   2       6
         rank                       0 0 1 1 1 1 0
         row of the rank's buffer   0   0       2
    kv   row of the global buffer   0 1
         rank                       0 1
         row of the rank's buffer   0 0
    """
    lines: list[str] = []
    for side in ("q", "kv"):
        strip = _strip(ownership.side(side), width - 32)
        for name, title, text in zip((side, "", ""), _TITLES, strip, strict=True):
            lines.append(f"{name:<5}{title:<27}{text}".rstrip())
    return "\n".join(lines)


def _strip(fragments: Fragments, room: int) -> tuple[str, str, str]:
    """The picture of one side: global rows, ranks, rows of the ranks' buffers, two characters a cell."""
    rows = int(fragments.stop.max(initial=0))
    size = _cell_size(rows, room)
    starts = np.arange(0, rows, size)
    most, ranks = np.zeros(len(starts), dtype=np.int64), ["."] * len(starts)
    heads, tails = ([""] * len(starts) for _ in range(2))
    for rank, start, stop, row in fragments.sorted().rows():
        share = np.minimum(stop, starts + size) - np.maximum(start, starts)
        for n in np.flatnonzero(share > most).tolist():
            ranks[n] = _NAMES[rank % len(_NAMES)]
        np.maximum(most, share, out=most)
        if not heads[start // size]:
            heads[start // size], tails[start // size] = str(start), str(row)
    return _spread(heads), " ".join(ranks), _spread(tails)


def _spread(labels: list[str]) -> str:
    """Labels at their cells, two characters a cell; one that would touch the one before it is left out.

    >>> _spread(["0", "", "12", "14", "16"])
    '0   12  16'
    """
    text = ""
    for n, label in enumerate(labels):
        if label and len(text) < 2 * n + (not n):
            text = f"{text:<{2 * n}}{label}"
    return text


def _cell_size(length: int, room: int) -> int:
    """The smallest size of a cell for which `length` fits: 1, 2 or 5 times a power of ten."""
    sizes = (digit * 10**power for power in range(20) for digit in (1, 2, 5))
    return next(size for size in sizes if 2 * -(-length // size) <= max(room, 20))
