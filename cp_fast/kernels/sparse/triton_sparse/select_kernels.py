# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
"""The best keys of each row, and the rows of keys that indices name, in Triton: `select` and `rows_of` of
`SparseKernels`.

`select` takes some query rows at a time. `scores_kernel` writes their scores for all keys that they may see to a
workspace of at most `WORKSPACE` bytes, as unsigned numbers of the same order, 0 for a hidden key. `best_kernel` has a
program for each row of it. By histograms of 256 bins, each of one bin of that before, it finds a range of numbers with
the last of the top_k best. It ends when a sort has room for all numbers in the range and above it, and gathers those.
`order_kernel` sorts it: the higher score first, then the lower position. Each sum has one order, fixed by constants:
the bits of a score depend on its query row and its key alone.

legend   n = query rows, m = gathered keys, R = rows of the workspace, S = intervals of a row (see `Visible`)
         BR, BN = query rows and keys of a tile of scores, HP = heads of the indexer, as a power of two
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cp_fast.kernels.sparse.triton_sparse.tiles import columns, launch_device, precision

__all__ = [
    "WORKSPACE",
    "Best",
    "ScoresTiling",
    "best",
    "best_kernel",
    "order_kernel",
    "rows_kernel",
    "rows_of",
    "scores",
    "scores_kernel",
    "select",
]

WORKSPACE = 256 << 20  # bytes
MOST_KEYS = 256  # of a tile of scores


class ScoresTiling(NamedTuple):
    """Constants of `scores_kernel`: heads of a tile at most (rows times heads of the indexer), keys of a tile, tiles of
    a program, warps, stages.
    """

    heads: int = 256
    keys: int = 64
    tiles: int = 64
    warps: int = 4
    stages: int = 3


class Best(NamedTuple):
    """Constants of `best_kernel` and `order_kernel`: keys at a time, the room of the sort as a multiple of LANES, warps
    of each.
    """

    keys: int = 1024
    room: int = 2
    warps: int = 4
    sort_warps: int = 16


# ---- kernels


@triton.jit
def _hull(row, keep, starts, stops, S: tl.constexpr):
    """The first row of keys that query rows may see, and the one behind the last."""
    first, last = 2147483647, 0
    for i in range(S):
        start = tl.load(starts + row * S + i, mask=keep, other=0)
        stop = tl.load(stops + row * S + i, mask=keep, other=0)
        first = tl.minimum(first, tl.min(tl.where(start < stop, start, 2147483647)))
        last = tl.maximum(last, tl.max(tl.where(start < stop, stop, 0)))
    return tl.minimum(first, last), last


@triton.jit
def _ordered(x):
    """float32 as unsigned numbers in the same order, of which none is 0. -0 is 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit(do_not_specialize=["first", "n", "m"])
def scores_kernel(
    q, k, weights, starts, stops, found, first, n, m, places, scale, q_row, q_head, k_row, w_row,
    S: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of BR query rows for the keys of TILES tiles, as far as one of these rows may see one."""
    o_c = tl.arange(0, BR * HP)
    slot, head = tl.program_id(0) * BR + o_c // HP, o_c % HP
    row = (first + slot).to(tl.int64)
    own = (row < n) & (head < H)
    q_tile = columns(q + row * q_row + head * q_head, own, 0, DP, D, True)
    weight = tl.load(weights + row * w_row + head, mask=own, other=0.0)
    slots = tl.program_id(0) * BR + tl.arange(0, BR)
    rows = (first + slots).to(tl.int64)
    begin, end = _hull(rows, rows < n, starts, stops, S)
    here = tl.program_id(1) * TILES * BN
    end = tl.minimum(end, here + TILES * BN)
    begin = tl.maximum(begin // BN * BN, here)
    if S == 1:
        start = tl.load(starts + rows, mask=rows < n, other=0)
        stop = tl.load(stops + rows, mask=rows < n, other=0)
    for j in range(begin, end, BN):
        at = j + tl.arange(0, BN)
        k_tile = columns(k + at.to(tl.int64) * k_row, at < m, 0, DP, D, True)
        dots = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        terms = tl.maximum(dots * scale, 0.0) * weight[None]
        sums = tl.sum(tl.reshape(terms, [BN, BR, HP]), 2)
        if S == 1:
            visible = (at[:, None] >= start[None]) & (at[:, None] < stop[None])
        else:
            visible = (at[:, None] < 0) & (slots < 0)[None]
            for i in range(S):
                low = tl.load(starts + rows * S + i, mask=rows < n, other=0)
                high = tl.load(stops + rows * S + i, mask=rows < n, other=0)
                visible |= (at[:, None] >= low[None]) & (at[:, None] < high[None])
        numbers = tl.where(visible, _ordered(sums), 0).to(tl.int32, bitcast=True)
        place = found + slots.to(tl.int64)[:, None] * places + at[None]
        tl.store(place, tl.trans(numbers), mask=(rows < n)[:, None])


@triton.jit
def _numbers(scores, at, begin, end):
    """Numbers of keys; 0 for those that are not in [begin, end), which nobody wrote."""
    return tl.where((at >= begin) & (at < end), tl.load(scores + at).to(tl.uint32, bitcast=True), 0)


@triton.jit(do_not_specialize=["first", "top_k"])
def best_kernel(
    scores, starts, stops, gathered, counts_of, first, places, top_k,
    S: tl.constexpr, LANES: tl.constexpr, ROOM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The top_k best keys of one query row and at most ROOM in all, and how many: numbers of 64 bits, of which the
    first half is a score's number, and the other is larger for a lower key. LANES: a power of two, at least top_k.
    """
    slot = tl.program_id(0).to(tl.int64)
    row = first + slot
    scores += slot * places
    gathered += slot * ROOM
    begin, end = _hull(row + tl.arange(0, 1), tl.arange(0, 1) < 1, starts, stops, S)
    # The largest number of each lane: LANES keys, at least top_k, have the least of these or more.
    largest = tl.full([LANES], 0, tl.uint32)
    visible = 0
    for j in range(begin // LANES * LANES, end, LANES):
        x = _numbers(scores, j + tl.arange(0, LANES), begin, end)
        largest = tl.maximum(largest, x)
        visible += tl.sum((x != 0).to(tl.int32))
    low, high = tl.maximum(tl.min(largest), 1), tl.maximum(tl.max(largest), 1)
    above, inside = 0, visible
    if visible <= ROOM:
        low = tl.minimum(low, 1)
    while (above + inside > ROOM) & (low < high):
        shift = 0
        while ((high - low) >> shift) > 255:
            shift += 1
        counts = tl.zeros([256], tl.int32)
        for j in range(begin // BN * BN, end, BN):
            x = _numbers(scores, j + tl.arange(0, BN), begin, end)
            between = (x >= low) & (x <= high)
            bins = tl.where(between, (x - low) >> shift, 0).to(tl.int32)
            counts += tl.histogram(bins, 256, mask=between)
        reach = above + tl.cumsum(counts, 0, reverse=True)
        o_b = tl.arange(0, 256)
        chosen = tl.max(tl.where(reach >= top_k, o_b, 0))
        above += tl.sum(tl.where(o_b > chosen, counts, 0))
        inside = tl.sum(tl.where(o_b == chosen, counts, 0))
        low += chosen.to(tl.uint32) << shift
        high = tl.minimum(high, low + ((chosen * 0 + 1).to(tl.uint32) << shift) - 1)
    # Above the range all keys; in it all, or if they are equal those of the lowest positions.
    room = ROOM - above
    if low == high:
        room = tl.minimum(tl.maximum(top_k - above, 0), room)
    over, within = 0, 0
    for j in range(begin // BN * BN, end, BN):
        at = j + tl.arange(0, BN)
        x = _numbers(scores, at, begin, end)
        more = (x > high).to(tl.int32)
        between = ((x >= low) & (x <= high)).to(tl.int32)
        before = tl.cumsum(more * 65536 + between, 0)
        place = tl.where(more != 0, over + (before >> 16) - 1, above + within + (before & 65535) - 1)
        taken = (more != 0) | ((between != 0) & (within + (before & 65535) <= room))
        number = (x.to(tl.int64) - 2147483648) * 4294967296 + (2147483647 - at).to(tl.int64)
        tl.store(gathered + place, number, mask=taken)
        over += tl.sum(more)
        within += tl.sum(between)
    tl.store(counts_of + slot, above + tl.minimum(within, room))


@triton.jit(do_not_specialize=["first", "top_k"])
def order_kernel(
    gathered, counts_of, starts, stops, positions, found, first, top_k, S: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The positions of one row's best keys, best first."""
    slot = tl.program_id(0).to(tl.int64)
    row = first + slot
    gathered += slot * ROOM
    count = tl.load(counts_of + slot)
    o_r = tl.arange(0, ROOM)
    held = tl.load(gathered + o_r, mask=o_r < count, other=-9223372036854775807)
    held = tl.sort(held, descending=True)
    at = 2147483647 - (held & 4294967295).to(tl.int32)
    position = tl.full([ROOM], -1, tl.int32)
    for i in range(S):
        start, stop = tl.load(starts + row * S + i), tl.load(stops + row * S + i)
        inside_it = (at >= start) & (at < stop) & (o_r < count)
        position = tl.where(inside_it, at - start + tl.load(positions + row * S + i), position)
    tl.store(found + row * top_k + o_r, position, mask=o_r < top_k)


@triton.jit(do_not_specialize=["sets", "top_k"])
def rows_kernel(
    indices, starts, stops, positions, found, sets, top_k, i_row, i_set, S: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The rows of keys that one set of indices names, ascending, and -1 for the others and for one named before."""
    program = tl.program_id(0)
    row, which = (program // sets).to(tl.int64), program % sets
    o_k = tl.arange(0, LANES)
    index = tl.load(indices + row * i_row + which * i_set + o_k, mask=o_k < top_k, other=-1)
    at = tl.full([LANES], 2147483647, tl.int32)
    for i in range(S):
        start, stop = tl.load(starts + row * S + i), tl.load(stops + row * S + i)
        position = tl.load(positions + row * S + i)
        inside = (index >= position) & (index - position < stop - start)
        at = tl.where(inside, index - position + start, at)
    at = tl.sort(at)
    found += program.to(tl.int64) * top_k
    tl.store(found + o_k, at, mask=o_k < top_k)
    tl.debug_barrier()
    before = tl.load(found + o_k - 1, mask=(o_k > 0) & (o_k < top_k), other=-1)
    at = tl.where((at == before) | (at == 2147483647), -1, at)
    tl.debug_barrier()
    tl.store(found + o_k, at, mask=o_k < top_k)


# ---- launches


def scores(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, visible: Any, scale: float, first: int,
    found: torch.Tensor, constants: ScoresTiling | None = None,
) -> None:  # fmt: skip
    """Write the numbers of the scores of R query rows from `first` on, or of fewer where these end, to found, int32
    [R, m or more].
    """
    (n, heads, d), m, held = q.shape, len(k), triton.next_power_of_2(q.shape[1])
    n = min(n, first + len(found))  # the last tile of rows may reach behind those of `found`
    on = constants or scores_constants(q)
    block = max(1, min(16, on.heads // held))
    grid = triton.cdiv(n - first, block), triton.cdiv(m, on.keys * on.tiles)
    scores_kernel[grid](
        q, k, weights, visible.starts, visible.stops, found, first, n, m, found.shape[1], scale,
        q.stride(0), q.stride(1), k.stride(0), weights.stride(0), visible.starts.shape[1], heads, held,
        d, max(16, triton.next_power_of_2(d)), block, on.keys, on.tiles, precision(q.dtype),
        num_warps=on.warps, num_stages=on.stages,
    )  # fmt: skip


def _lanes(top_k: int) -> int:
    return max(128, triton.next_power_of_2(top_k))


def scores_constants(q: torch.Tensor) -> ScoresTiling:
    """Those of `scores_kernel` for these heads."""
    if q.dtype == torch.float32:
        return ScoresTiling(heads=64, keys=32, tiles=16, warps=4, stages=1)
    return ScoresTiling() if q.shape[2] <= 128 else ScoresTiling(stages=2)


def best(
    numbers: torch.Tensor, visible: Any, first: int, rows: int, found: torch.Tensor, gathered: torch.Tensor,
    constants: Best,
) -> None:  # fmt: skip
    """Write the positions of the best keys of some rows to found, int32 [n, top_k], from their numbers."""
    top_k, intervals = found.shape[1], visible.starts.shape[1]
    lanes = _lanes(top_k)
    counts = torch.empty(rows, dtype=torch.int32, device=found.device)
    best_kernel[(rows,)](
        numbers, visible.starts, visible.stops, gathered, counts, first, numbers.shape[1], top_k, intervals, lanes,
        lanes * constants.room, constants.keys, num_warps=constants.warps,
    )  # fmt: skip
    order_kernel[(rows,)](
        gathered, counts, *visible, found, first, top_k, intervals, lanes * constants.room,
        num_warps=constants.sort_warps,
    )  # fmt: skip


def select(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, visible: Any, top_k: int, scale: float,
    *, constants: tuple[ScoresTiling | None, Best] = (None, Best()), workspace: int = WORKSPACE,
) -> torch.Tensor:  # fmt: skip
    """See `SparseKernels`."""
    n, m = len(q_index), len(k_index)
    found = torch.full((n, top_k), -1, dtype=torch.int32, device=q_index.device)
    if not n or not m:
        return found
    lanes, whole = _lanes(top_k), max(_lanes(top_k), constants[1].keys, MOST_KEYS)
    places = triton.cdiv(m, whole) * whole
    rows = max(1, min(n, workspace // (4 * places + 8 * lanes * constants[1].room)))
    numbers = torch.empty(rows, places, dtype=torch.int32, device=q_index.device)
    gathered = torch.empty(rows, lanes * constants[1].room, dtype=torch.int64, device=q_index.device)
    with launch_device(q_index):
        for first in range(0, n, rows):
            scores(q_index, k_index, weights, visible, scale, first, numbers, constants[0])
            best(numbers, visible, first, min(rows, n - first), found, gathered, constants[1])
    return found


def rows_of(indices: torch.Tensor, visible: Any) -> torch.Tensor:
    """See `SparseKernels`."""
    n, sets, top_k = indices.shape
    found = torch.empty(n, sets, top_k, dtype=torch.int32, device=indices.device)
    if n * sets:
        lanes = max(2, triton.next_power_of_2(top_k))
        with launch_device(indices):
            rows_kernel[(n * sets,)](
                indices, *visible, found, sets, top_k, indices.stride(0), indices.stride(1), visible.starts.shape[1],
                lanes, num_warps=4 if lanes <= 2048 else 8,
            )  # fmt: skip
    return found
