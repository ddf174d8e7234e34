"""Pictures of a schedule: who computes which part of the score matrix, and when. `text_picture` is for a terminal.

>>> from cp_ref.schedules.planners.make_schedule import make_schedule
>>> from cp_ref.schedules.problem import Problem, Sequence
>>> problem = Problem(cp_size=2, sequences=(Sequence(8, 8, 8, 8),))
>>> print(text_picture(problem, make_schedule(problem)))
p2p, cp_size 2, bshd, dual_chunk, causal
8 queries x 8 keys; a cell is one query x one key
<BLANKLINE>
        key   0   1   2   3   4   5   6   7
      owner   0   0   1   1   1   1   0   0
query       ┌────────────────────────────────
    0     0 │0:0  .   .   .   .   .   .   .
    1     0 │0:0 0:0  .   .   .   .   .   .
    2     1 │1:1 1:1 1:0  .   .   .   .   .
    3     1 │1:1 1:1 1:0 1:0  .   .   .   .
    4     1 │1:1 1:1 1:0 1:0 1:0  .   .   .
    5     1 │1:1 1:1 1:0 1:0 1:0 1:0  .   .
    6     0 │0:0 0:0 0:1 0:1 0:1 0:1 0:0  .
    7     0 │0:0 0:0 0:1 0:1 0:1 0:1 0:0 0:0
<BLANKLINE>
R:S  computed by rank R at its step S, both from 0
.    computed by nobody (masked, or padding)
"""

from __future__ import annotations

from string import ascii_lowercase, digits
from textwrap import wrap
from typing import Literal

import numpy as np

from cp_ref.schedules.areas import Areas, pairs
from cp_ref.schedules.ownership import Fragments, Ownership, divisor
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule
from cp_ref.show.picture_plane import Block, Box, Owner, Plane, plane, title

__all__ = [
    "areas_picture",
    "ownership_picture",
    "text_picture",
]

_MOST_CELLS = 32  # down the page, however wide the terminal


def text_picture(
    problem: Problem,
    schedule: Schedule,
    sequence: int | Literal["all"] | None = None,
    width: int = 80,
    head: int = 0,
) -> str:
    """The forward pass as rows of characters: a cell is a square of the score matrix and shows "rank:step".

    A cell that several tiles share shows the one that has most of its pairs.

    Args:
        sequence: a sequence's number; None for the longest; "all" for all of them, side by side on the diagonal. With
            areas always the whole buffer.
        width: the most characters of a line. If it is too small for one chunk per cell, cells hold more.
        head: the query head that is looked at, where a schedule spreads the heads over the ranks.
    """
    everything = range(len(problem.sequences))
    if problem.areas is not None:
        chosen = []
    elif sequence is None:
        chosen = [max(everything, key=lambda s: _size(problem, s))] if everything else []
    elif sequence == "all":
        chosen = list(everything)
    elif sequence in everything:
        chosen = [sequence]
    else:
        raise ValueError(f"sequence is {sequence!r}; the problem has sequences 0 to {len(everything) - 1}")
    view = plane(problem, schedule, chosen, head)
    longest = max((len(rank_schedule) for rank_schedule in schedule.forward), default=1)
    cell_width = len(f"{problem.cp_size - 1}:{longest - 1}")
    labels = max(len(str(max(view.rows, view.columns))), len("query")), max(len(str(problem.cp_size - 1)), len("owner"))
    room = max((width - sum(labels) - 4) // (cell_width + 1), 4)
    size = _cell_size(view, _chunk(problem, view), room)
    lines = [
        *wrap(title(problem, schedule), width),
        *wrap(_what(problem, view, chosen, size), width),
        "",
        *_matrix(view, size, cell_width, labels),
        "",
        *wrap("R:S  computed by rank R at its step S, both from 0", width),
        *wrap(".    computed by nobody (masked, or padding)", width),
    ]
    if view.some_heads:
        lines += wrap(f"The heads are spread over the ranks; this is query head {head}.", width)
    return "\n".join(line.rstrip() for line in lines)


def _size(problem: Problem, number: int) -> int:
    return problem.sequences[number].len_q * problem.sequences[number].len_kv


def _what(problem: Problem, view: Plane, chosen: list[int], size: int) -> str:
    """The second line: the part of the score matrix and its scale."""
    cell = "one query x one key" if size == 1 else f"{size} queries x {size} keys"
    if problem.areas is not None:
        return f"{view.rows} query rows x {view.columns} key rows of the packed buffer; a cell is {cell}"
    if len(chosen) != 1:
        slots = f"{view.rows} query slots x {view.columns} key slots"
        return f"{len(chosen)} sequences on the diagonal, {slots}; a cell is {cell}"
    s = problem.sequences[chosen[0]]
    which = ""
    if len(problem.sequences) > 1:
        which = f"sequence {chosen[0]} of {len(problem.sequences)} (numbered from 0): "
    padded = f" in {s.slots_q} x {s.slots_kv} slots" if (s.len_q, s.len_kv) != (s.slots_q, s.slots_kv) else ""
    return f"{which}{s.len_q} queries x {s.len_kv} keys{padded}; a cell is {cell}"


def _chunk(problem: Problem, view: Plane) -> int:
    """The length at which ownership changes, where it is the same all along; else 1."""
    alike = problem.layout == "dual_chunk" or (problem.layout == "contiguous" and problem.qkv_format != "thd")
    if len(view.blocks) != 1 or not alike or (len(problem.sequences) > 1 and problem.areas is not None):
        return 1
    chunk, rest = divmod(view.blocks[0].sequence.slots_q, divisor(problem.layout, problem.cp_size))
    return 1 if rest else max(chunk, 1)


def _cell_size(view: Plane, chunk: int, room: int) -> int:
    """The smallest size of a cell for which the picture fits; rather one that divides the chunks or holds whole ones.

    >>> _cell_size(Plane(64, 64, (), (), (), ()), 16, 12), _cell_size(Plane(64, 64, (), (), (), ()), 1, 12)
    (8, 6)
    """
    least = max(-(-view.columns // room), -(-view.rows // min(room, _MOST_CELLS)), 1)
    neat = (size for size in range(least, 2 * least + 1) if chunk % size == 0 or size % chunk == 0)
    return next(neat, least)


def _matrix(view: Plane, size: int, cell_width: int, labels: tuple[int, int]) -> list[str]:
    rows, columns = -(-view.rows // size), -(-view.columns // size)
    cells = _cells(view, size, rows, columns)
    margin = " " * (sum(labels) + 2)
    keys = _axis([str(c * size) for c in range(columns)], cell_width)
    owners = _axis([_owner(view.owners_kv, c * size, size) for c in range(columns)], cell_width)
    lines = [
        f"{'key':>{labels[0] + labels[1] + 1}} {keys}",
        f"{'owner':>{labels[0] + labels[1] + 1}} {owners}",
        f"{'query':>{labels[0]}}{margin[labels[0] :]}┌{'─' * (columns * (cell_width + 1))}",
    ]
    for r in range(rows):
        texts = [f"{text:^{cell_width}}" for text in cells[r]]
        lines.append(f"{r * size:>{labels[0]}} {_owner(view.owners_q, r * size, size):>{labels[1]}} │{' '.join(texts)}")
    return lines


def _cells(view: Plane, size: int, rows: int, columns: int) -> list[list[str]]:
    """The text of every cell: the tile that has most of its pairs, "." inside a sequence's block, nothing outside."""
    texts = [[""] * columns for _ in range(rows)]
    for block in view.blocks:
        for r, c in _touched(_block_box(block), size):
            texts[r][c] = "."
    most = [[0] * columns for _ in range(rows)]
    for part in view.parts:
        for r, c in _touched(part.box, size):
            pairs = part.box.within(r * size, (r + 1) * size, c * size, (c + 1) * size).pairs
            if pairs > most[r][c]:
                most[r][c], texts[r][c] = pairs, f"{part.rank}:{part.step}"
    return texts


def _block_box(block: Block) -> Box:
    return Box(block.y, block.y + block.sequence.slots_q, block.x, block.x + block.sequence.slots_kv)


def _touched(box: Box, size: int) -> list[tuple[int, int]]:
    """The cells that a box has a part in."""
    if box.size == 0:
        return []
    rows = range(box.q0 // size, -(-box.q1 // size))
    columns = range(box.k0 // size, -(-box.k1 // size))
    return [(r, c) for r in rows for c in columns]


def _owner(owners: tuple[Owner, ...], slot: int, size: int) -> str:
    """The owner of most of a cell's slots."""
    shares: dict[int, int] = {}
    for o in owners:
        if (count := min(o.stop, slot + size) - max(o.start, slot)) > 0:
            shares[o.rank] = shares.get(o.rank, 0) + count
    return str(max(shares, key=lambda rank: shares[rank])) if shares else ""


def _axis(labels: list[str], cell_width: int) -> str:
    """Labels over their cells, each n-th only where they would touch."""
    longest = max((len(label) for label in labels), default=1)
    stride = -(-(longest + 1) // (cell_width + 1))
    wide = stride * (cell_width + 1) - 1
    texts = [f"{label:^{cell_width}}" if len(label) <= cell_width else label for label in labels[::stride]]
    return " " + " ".join(f"{text:<{wide}}" for text in texts)


_NAMES = digits + ascii_lowercase  # of areas and ranks, again from the first one after the last
_TITLES = "row of the global buffer", "rank", "row of the rank's buffer"


def areas_picture(areas: Areas, width: int = 80) -> str:
    """The score matrix: each cell shows the number of the area that has most of its visible pairs, "." for none.

    A cell is one query x one key where that fits `width` (two characters a cell), else a square of them. The 37th area
    is 0 again.

    >>> print(areas_picture(Areas.parse("area q[0:3] k[0:3] band *:0\\narea q[4:6] k[4:7] band *:*")))
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
    size = _round_cell_size(max(rows, columns), width - 7)
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
        for name, what, text in zip((side, "", ""), _TITLES, strip, strict=True):
            lines.append(f"{name:<5}{what:<27}{text}".rstrip())
    return "\n".join(lines)


def _strip(fragments: Fragments, room: int) -> tuple[str, str, str]:
    """The picture of one side: global rows, ranks, rows of the ranks' buffers, two characters a cell."""
    rows = int(fragments.stop.max(initial=0))
    size = _round_cell_size(rows, room)
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


def _round_cell_size(length: int, room: int) -> int:
    """The smallest size of a cell for which `length` fits: 1, 2 or 5 times a power of ten."""
    sizes = (digit * 10**power for power in range(20) for digit in (1, 2, 5))
    return next(size for size in sizes if 2 * -(-length // size) <= max(room, 20))
