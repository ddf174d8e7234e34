"""The blocks of FlexAttention's `BlockMask`, compared with its `mask_mod`: only where they agree is the mask one mask.

FlexAttention's compiled kernels go through lists of blocks. All pairs of a full block count. Of any other block the
pairs count that `mask_mod` allows. A block that is listed twice counts twice. The eager code of FlexAttention asks
`mask_mod` about every pair, and looks at no block. Masks by `create_block_mask` mean the same to both. A mask made by
hand may not, nor a mask with another `mask_mod` than it was made with: such a mask is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from cp_ref.common.masks.area_rows import listed
from cp_ref.spec import Feature, Unsupported

__all__ = ["seen_rows"]

Mask = torch.Tensor  # bool, queries by keys


class _Head(torch.Tensor):
    """The number of a head, at which no `mask_mod` may look: attention slices are the same for all heads."""

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
