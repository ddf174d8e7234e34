"""A batch as a list of buffers without names: PyTorch's `context_parallel` and accelerate's `maybe_context_parallel`
take such batches. Each buffer comes with the dimension of its tokens. Here buffers are read, and cut in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cp_ref.schedules.values import check_tensor

__all__ = ["check_buffers", "check_filled", "padding_of", "put", "rows_of", "said_by"]


def check_buffers(buffers: Sequence[Any], dims: Sequence[int], kept: Any) -> tuple[int, int]:
    """[b, s] of the batch's tokens, which come second in at least one buffer.

    Args:
        buffers, dims, kept: as `context_parallel`'s buffers, buffer_seq_dims and no_restore_buffers.

    Raises:
        ValueError, TypeError: naming the buffer.

    >>> check_buffers([torch.zeros(2, 8), torch.zeros(8, 4)], [1, 0], None)
    (2, 8)
    """
    if len(buffers) != len(dims):
        raise ValueError(f"buffer_seq_dims has {len(dims)} entries for {len(buffers)} buffers; it must have as many")
    for i, x in enumerate(buffers):
        check_tensor(f"buffers[{i}]", x)
        if x.requires_grad:
            raise ValueError(f"buffers[{i}] requires a gradient, and would be cut in place; give the batch's tensors")
        if not 0 <= dims[i] < x.dim():
            raise ValueError(f"buffer_seq_dims[{i}] is {dims[i]}; buffers[{i}] has {x.dim()} dimensions")
    if any(all(x is not y for y in buffers) for x in kept or ()):
        raise ValueError("no_restore_buffers has a tensor that is none of buffers")
    rows = [x for x, dim in zip(buffers, dims, strict=True) if dim == 1]
    if not rows:
        raise ValueError("buffers has no tensor [b, s, ...] with buffer_seq_dims 1; give input_ids, and all like it")
    b, s = min(rows, key=lambda x: x.dim()).shape[:2]
    for i, x in enumerate(buffers):
        if x.shape[dims[i]] != s:
            raise ValueError(
                f"buffers[{i}] has shape {list(x.shape)}, with {x.shape[dims[i]]} entries in dimension {dims[i]}; the "
                f"sequences have {s}"
            )
    return b, s


def said_by(buffers: Sequence[torch.Tensor], dims: Sequence[int], shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The batch's padding, or its documents, by the names that `shard_batch` has for them. They are known by their
    values alone, so compare them with what the model is given by name.

    Args:
        buffers, dims: as `check_buffers` takes them.
        shape: [b, s], as it returns it.

    Returns:
        {}, {"attention_mask": int64 [b, s]} or {"position_ids": int64 [1, s]}.

    Raises:
        ValueError: several buffers say other things.

    >>> mask, ids = torch.tensor([[1, 1, 1], [1, 0, 0]]), torch.tensor([[5, 6, 7], [8, 0, 0]])
    >>> said_by([ids, mask], [1, 1], (2, 3))["attention_mask"] is mask
    False
    """
    rows = [x.detach() for x, dim in zip(buffers, dims, strict=True) if dim == 1 and x.shape == shape]
    integers = [x.long() for x in rows if _is_integer(x)]
    masks = [x for x in integers if _is_mask(x)]
    if any(not torch.equal(x, masks[0]) for x in masks):
        raise ValueError("buffers has several masks, of other padding each; give attention_mask alone")
    if masks:
        return {"attention_mask": masks[0]}
    positions = [x for x in integers if _is_packed(x)]
    if any(not torch.equal(x, positions[0]) for x in positions):
        raise ValueError("buffers has several tensors of positions, of other documents each; give position_ids alone")
    return {"position_ids": positions[0]} if positions else {}


def padding_of(x: torch.Tensor) -> int:
    """The value that fills a buffer up: -100, which is no label, in integers; 0 in masks and floats.

    >>> padding_of(torch.tensor([[5, 6]])), padding_of(torch.tensor([[1, 1]])), padding_of(torch.tensor([[0.5]]))
    (-100, 0, 0)
    """
    return -100 if _is_integer(x) and x.dtype.is_signed and not _is_binary(x) else 0


def check_filled(buffers: Mapping[str, torch.Tensor], mask: torch.Tensor | None, ranks: int) -> None:
    """Raise for a buffer whose padding is not known, where a cut has to fill buffers up.

    Args:
        buffers: by name.
        mask: int64, of the batch's padding.
        ranks: that share the batch.

    Raises:
        ValueError: a buffer has zeros and ones, which may be labels, or weights, or anything.
    """
    for name, x in buffers.items():
        marks = _is_integer(x) and x.dtype != torch.bool and _is_binary(x) and bool((x == 0).any())
        if marks and (mask is None or not torch.equal(x.long(), mask)):
            raise ValueError(
                f"{name} has zeros and ones, of which cp_fast does not know the padding, and {x.shape[1]} tokens "
                f"cannot be cut for {ranks} ranks without it; pad the batch to a multiple of {2 * ranks} tokens"
            )


def rows_of(x: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
    """The slice of a buffer with tokens in any dimension.

    Args:
        places: int64 [n]: the slice's tokens, -1 for padding.

    >>> rows_of(torch.arange(6.0).view(3, 2), 0, torch.tensor([2, -1]))
    tensor([[4., 5.],
            [0., 0.]])
    """
    mine = places.to(x.device)
    found = x.index_select(dim, mine.clamp(min=0))
    return found.masked_fill((mine < 0).view(-1, *[1] * (x.dim() - dim - 1)), padding_of(x))


def put(x: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor other contents. Views of it, such as another buffer, keep theirs; a backward pass that needs the
    old contents raises.

    >>> ids = torch.tensor([[1, 2, 3]])
    >>> tokens, labels = ids[:, :-1], ids[:, 1:]
    >>> put(tokens, torch.tensor([[7]]))
    >>> tokens.tolist(), labels.tolist()
    ([[7]], [[2, 3]])
    """
    x.data = value
    torch.autograd.graph.increment_version(x)


def _is_integer(x: torch.Tensor) -> bool:
    return not x.dtype.is_floating_point and not x.dtype.is_complex


def _is_binary(x: torch.Tensor) -> bool:
    return bool(((x == 0) | (x == 1)).all())


def _is_mask(x: torch.Tensor) -> bool:
    """Ones, and behind them zeros for padding, of which there are some."""
    return _is_binary(x) and bool((x == 0).any() and (x == 1).any() and (x.diff(dim=1) <= 0).all())


def _is_packed(x: torch.Tensor) -> bool:
    """One row of positions 0, 1, 2 and so on. Each document begins with 0."""
    if len(x) != 1 or x.shape[1] < 2:
        return False
    first, behind = x[0, :-1], x[0, 1:]
    follows = (behind == first + 1) | (behind == 0)
    return bool(x[0, 0] == 0 and follows.all() and (behind == 0).any() and (x == 1).any())
