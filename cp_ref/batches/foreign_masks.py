"""Readers of others' masks: BlockMask of PyTorch's FlexAttention, and the ranges of MagiAttention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from cp_ref.batches.area_rows import listed, numbers, packed, tensor
from cp_ref.schedules.areas import WindowRow
from cp_ref.schedules.values import check_data, read_several
from cp_ref.schedules.words import Feature, Unsupported

__all__ = [
    "from_block_mask",
    "from_magi",
    "seen_rows",
]

Mask = torch.Tensor  # bool, queries by keys


class _Head(torch.Tensor):
    """The number of a head, at which no `mask_mod` may look: areas are the same for all heads."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _unsupported(
            "whose mask_mod looks at the head",
            "areas are the same for all heads; a score_mod that gives hidden pairs -inf may look at it",
        )


def seen_rows(block_mask: Any, b: int) -> Iterator[tuple[int, Mask]]:
    """For each row of blocks the number of its first query, and the keys that its queries see: bool [queries, keys].

    Args:
        b: the number of the batch's row.

    Raises:
        ValueError: the lists of blocks have no meaning. TypeError: `mask_mod` returns no bool. Unsupported: blocks and
        `mask_mod` disagree; the block is named.
    """
    rows, keys = block_mask.seq_lengths
    size_q, size_k = block_mask.BLOCK_SIZE
    partial, full = _tables(block_mask, b)
    mask_mod = _over_pairs(block_mask, b)
    for n, start in enumerate(range(0, rows, size_q)):
        seen = mask_mod(start, min(start + size_q, rows))
        padded = torch.nn.functional.pad(seen.any(dim=0), (0, -keys % size_k)).view(-1, size_k).any(dim=1)
        missed = padded & ~(partial | full)[n]
        hides = torch.nn.functional.pad(~seen.all(dim=0), (0, -keys % size_k)).view(-1, size_k).any(dim=1)
        for wrong, reason in (
            (missed, "mask_mod allows pairs of it, and it is not listed"),
            (full[n] & hides, "it is listed as full, and mask_mod hides pairs of it"),
        ):
            if bool(wrong.any()):
                raise _disagree(block_mask, b, n, int(wrong.nonzero()[0]), reason)
        yield start, seen


def _over_pairs(block_mask: Any, b: int) -> Callable[[int, int], Mask]:
    """A function that asks `mask_mod` about queries [start, stop) and all keys."""
    device = block_mask.kv_indices.device
    batch = torch.full((), b, dtype=torch.int64, device=device)
    head = torch.zeros_like(batch).as_subclass(_Head)
    keys = torch.arange(block_mask.seq_lengths[1], device=device)
    of_a_row = torch.vmap(block_mask.mask_mod, in_dims=(None, None, None, 0))
    of_rows = torch.vmap(of_a_row, in_dims=(None, None, 0, None))

    def asked(start: int, stop: int) -> Mask:
        seen = of_rows(batch, head, torch.arange(start, stop, device=device), keys)
        if seen.dtype != torch.bool:
            raise TypeError(f"mask_mod of block_mask returns {seen.dtype}; it must return torch.bool")
        return seen.cpu()

    return asked


def _tables(block_mask: Any, b: int) -> tuple[Mask, Mask]:
    """Which blocks are listed as partial, and which as full: bool [blocks of queries, blocks of keys]."""
    shape = [-(-length // size) for length, size in zip(block_mask.seq_lengths, block_mask.BLOCK_SIZE, strict=True)]
    partial, full = (_table(block_mask, b, f"{kind}kv", shape) for kind in ("", "full_"))
    for n, m in listed((partial + full > 1).nonzero()):
        raise _disagree(block_mask, b, n, m, "it is listed more than once, and counts as often")
    for kind, table in (("", partial), ("full_", full)):
        if getattr(block_mask, f"{kind}q_num_blocks", None) is None:
            continue
        unlike = table != _table(block_mask, b, f"{kind}q", shape[::-1]).T
        for n, m in listed(unlike.nonzero()):
            raise _disagree(block_mask, b, n, m, f"{kind}q_indices, of the backward pass, has other blocks")
    return partial > 0, full > 0


def _table(block_mask: Any, b: int, name: str, shape: list[int]) -> torch.Tensor:
    """How often each block is listed: int64 [blocks of the rows, blocks of the columns]."""
    count, index = getattr(block_mask, f"{name}_num_blocks"), getattr(block_mask, f"{name}_indices")
    if count is None:
        return torch.zeros(shape, dtype=torch.int64, device="cpu")
    count, index = count[b, 0].cpu().long(), index[b, 0].cpu().long()
    if len(count) < shape[0] or len(index) != len(count) or bool(((count < 0) | (count > index.shape[1])).any()):
        raise ValueError(
            f"block_mask.{name}_num_blocks is {count.tolist()} for {name}_indices of shape {list(index.shape)}; it "
            f"must have a number from 0 to {index.shape[1]} for each of {shape[0]} rows of blocks"
        )
    there = torch.arange(index.shape[1], device="cpu") < count[:, None]
    there[shape[0] :] = False
    row, place = there.nonzero(as_tuple=True)
    block = index[row, place]
    if bool(((block < 0) | (block >= shape[1])).any()):
        raise ValueError(f"block_mask.{name}_indices has blocks outside of the {shape[1]} of a row")
    return torch.bincount(row * shape[1] + block, minlength=shape[0] * shape[1]).view(shape)


def _disagree(block_mask: Any, b: int, n: int, m: int, reason: str) -> Unsupported:
    """The error for a block, by its queries and keys."""
    q, k = (x * size for x, size in zip((n, m), block_mask.BLOCK_SIZE, strict=True))
    place = f"queries {q}:{q + block_mask.BLOCK_SIZE[0]} and keys {k}:{k + block_mask.BLOCK_SIZE[1]}"
    place += f" of row {b}" if len(block_mask.kv_num_blocks) > 1 else ""
    return _unsupported(
        f"whose blocks and mask_mod disagree in the block of {place} ({reason}),",
        "FlexAttention computes other pairs compiled than not; make it with create_block_mask",
    )


def _unsupported(what: str, reason: str) -> Unsupported:
    return Unsupported(f"a BlockMask {what}", {"from_block_mask": {Feature.AREAS}}, reason)


_MOST = 16  # areas that may begin in a block

Run = tuple[int, int]  # keys [start, stop) that a query sees


def from_block_mask(block_mask: Any) -> torch.Tensor:
    """Read the areas of a `torch.nn.attention.flex_attention.BlockMask`. Its `mask_mod` is asked about every pair, and
    compared with its blocks.

    Args:
        block_mask: what `create_block_mask` returned, the same for all heads (H=None); or one that was made by hand, if
            its blocks and its `mask_mod` agree.

    Returns:
        int64 [n, 6]. Rows of a document mask may lie in several documents: they are those of the packed buffer. A mask
        with B > 1 has a mask for each row of the batch, one after the other: q [b, s, h, d] is the buffer
        q.flatten(0, 1), whose sequences have s tokens each.

    Raises:
        TypeError: it is no BlockMask, or `mask_mod` returns no bool. ValueError: its lists of blocks have no meaning.
        Unsupported: it differs between heads; blocks and `mask_mod` disagree, so that FlexAttention computes
        other pairs when it is compiled; or a block is not a union of a few diagonal bands (16 may begin in it). The
        block is named.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> from cp_ref.masks import picture
    >>> def prefix_of_two(b, h, q, k):
    ...     return (k <= q) | (k < 2)
    >>> print(picture(from_block_mask(create_block_mask(prefix_of_two, None, None, 5, 5, device="cpu"))))
    5 query rows x 5 key rows; a cell is 1 x 1
         k 0
    q    0 0 0 . . .
         1 0 0 . . .
         2 1 1 1 . .
         3 1 1 1 1 .
         4 1 1 1 1 1
    """
    if not all(hasattr(block_mask, name) for name in ("kv_num_blocks", "kv_indices", "mask_mod", "BLOCK_SIZE")):
        raise TypeError(f"block_mask is a {type(block_mask).__name__}; it must be a FlexAttention BlockMask")
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    if heads != 1:
        raise Unsupported(
            f"a BlockMask of {heads} heads",
            {"from_block_mask": {Feature.AREAS}},
            "areas are the same for all of them: make it with H=None; a score_mod that gives hidden pairs -inf may "
            "look at the head",
        )
    rows, keys = block_mask.seq_lengths
    tables = [tensor(band.row() for band in _bands(block_mask, b)) for b in range(batch)]
    return packed(tables, [b * rows for b in range(batch)], [b * keys for b in range(batch)])


def _bands(block_mask: Any, b: int) -> list[_Band]:
    """The bands of one row of the batch."""
    found: list[_Band] = []
    begun: Counter[tuple[int, int]] = Counter()  # by block
    going: list[_Band] = []  # those of the row before
    for i, runs in _rows(block_mask, b):
        before, going = going, []
        for run in runs:
            band = next((one for one in before if one.takes(run)), None)
            if band is None:
                band = _Band(i, run)
                found.append(band)
                begun[_block(block_mask, i, run[0])] += 1
            else:
                before.remove(band)
                band.add(run)
            going.append(band)
        _refuse_many(block_mask, b, begun)
    return found


class _Band:
    """A diagonal band in a rectangle, row by row: the first visible key stays, and then moves on with the row; the last
    one moves on, and then stays.
    """

    def __init__(self, i: int, run: Run) -> None:
        self.first_row, self.first_run, self.rows, self.last_run = i, run, 1, run
        self.start_moves = self.stop_stays = False

    def takes(self, run: Run) -> bool:
        """Whether the next row may see this run."""
        start, stop = run[0] - self.last_run[0], run[1] - self.last_run[1]
        return start in ((1,) if self.start_moves else (0, 1)) and stop in ((0,) if self.stop_stays else (0, 1))

    def add(self, run: Run) -> None:
        """The next row."""
        self.start_moves |= run[0] > self.last_run[0]
        self.stop_stays |= run[1] == self.last_run[1]
        self.rows, self.last_run = self.rows + 1, run

    def row(self) -> WindowRow:
        """The area."""
        q_start, q_stop = self.first_row, self.first_row + self.rows
        k_start, k_stop = self.first_run[0], self.last_run[1]
        corner = k_stop - q_stop
        left = corner - (self.last_run[0] - (q_stop - 1)) if self.start_moves else -1
        right = self.first_run[1] - 1 - q_start - corner if k_stop > self.first_run[1] else -1
        return q_start, q_stop, k_start, k_stop, left, right


def _rows(block_mask: Any, b: int) -> Iterator[tuple[int, list[Run]]]:
    """Each query, and the runs of keys that it sees."""
    for start, seen in seen_rows(block_mask, b):
        edges = torch.nn.functional.pad(seen, (1, 1)).int().diff(dim=1)
        for i, row in enumerate(edges, start):
            first, last = (_places(row == step) for step in (1, -1))
            yield i, list(zip(first, last, strict=True))


def _places(where: torch.Tensor) -> list[int]:
    return listed(where.nonzero().flatten())


def _block(block_mask: Any, i: int, j: int) -> tuple[int, int]:
    return i // block_mask.BLOCK_SIZE[0], j // block_mask.BLOCK_SIZE[1]


def _refuse_many(block_mask: Any, b: int, begun: Counter[tuple[int, int]]) -> None:
    """Raise Unsupported where too many diagonal bands begin in one block."""
    for place, number in begun.most_common(1):
        if number > _MOST:
            q, k = (n * size for n, size in zip(place, block_mask.BLOCK_SIZE, strict=True))
            row = f" of row {b}" if len(block_mask.kv_num_blocks) > 1 else ""
            raise Unsupported(
                f"the BlockMask, in its block of queries {q}:{q + block_mask.BLOCK_SIZE[0]} and keys {k}:"
                f"{k + block_mask.BLOCK_SIZE[1]}{row},",
                {"from_block_mask": {Feature.AREAS}},
                f"more than {_MOST} bands begin there; blocks must be unions of a few bands. A score_mod takes every "
                "mask: let it return -inf where mask_mod hides, with attn_mask_type='no_mask'",
            )


# Type, as MagiAttention's number and as the name of its AttnMaskType: (keys after the diagonal of the last row and key
# are hidden, keys before the diagonal of the first row and key are hidden).
_TYPES = {
    **dict.fromkeys((0, "full"), (False, False)),
    **dict.fromkeys((1, "causal"), (True, False)),
    **dict.fromkeys((2, "inv_causal"), (False, True)),
    **dict.fromkeys((3, "bi_causal"), (True, True)),
}


def from_magi(q_ranges: Any, k_ranges: Any, types: Sequence[int | str]) -> torch.Tensor:
    """Read a mask as MagiAttention has it.

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
    rows: list[WindowRow] = []
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
