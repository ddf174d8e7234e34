"""The rows of a batch of token ids, checked: tokens, documents and labels."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from zlib import crc32

import torch
import torch.nn.functional as F

from cp_ref.batches.tensors import bytes_of, read_fill
from cp_ref.schedules.values import check_flag, check_tensor, kind_of, read_several, shown

__all__ = ["Digests", "TokenRows", "digests", "read_fills", "read_rows", "wide_integers"]

Digests = dict[str, tuple[list[int], str, int]]  # shape, dtype and checksum of each entry

_ENTRIES = ("input_ids", "position_ids", "attention_mask", "labels")
_MADE = ("cp_batch", "shift_labels", "num_items_in_batch")  # what shard_batch adds


@dataclass(frozen=True, eq=False)
class TokenRows:
    """A batch that every rank has whole.

    Attributes:
        ids: [b, s]; [1, t] of a packed batch.
        targets: like ids: what each token is to learn, -100 for nothing; None without labels.
        cu_seqlens: int32 [b + 1] on the CPU: the documents of the packed row, or the tokens before each row's padding.
        packed: whether the one row has several documents.
        others: further tensors [b, s, ...], by name.
    """

    ids: torch.Tensor
    targets: torch.Tensor | None
    cu_seqlens: torch.Tensor
    packed: bool
    others: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    @property
    def longest(self) -> int:
        """How many positions a sequence has at most: a document's tokens, or a row's, padding included."""
        return int(self.cu_seqlens.diff().max()) if self.packed else self.ids.shape[1]

    @property
    def documents(self) -> torch.Tensor:
        """The number of each token's document in a packed batch, else of its row; -1 for padding. int64 [b, s], CPU."""
        rows, length = self.ids.shape
        if self.packed:
            numbers = torch.arange(len(self.cu_seqlens) - 1, device="cpu")
            return torch.repeat_interleave(numbers, self.cu_seqlens.diff().long())[None]
        there = torch.arange(length, device="cpu") < self.cu_seqlens.diff()[:, None]
        return torch.where(there, torch.arange(rows, device="cpu")[:, None], -1)


def read_rows(batch: Any, shift_labels: bool, fill: Any = None, whole: Collection[str] = ()) -> TokenRows:
    """The rows of a batch. The arguments are those of `shard_batch`. Sends nothing.

    Args:
        whole: tensors of the batch that are not cut.

    Raises:
        ValueError, TypeError: naming the entry, the row and the rule.

    >>> rows = read_rows({"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])}, True)
    >>> rows.targets.tolist(), rows.cu_seqlens.tolist()
    ([[6, 7, -100]], [0, 3])
    """
    check_flag("shift_labels", shift_labels)
    names = _names_of_fill(fill)
    if isinstance(whole, str) or not isinstance(whole, Collection):
        raise TypeError(f"whole is {shown(whole)}; it must be a list of names of tensors in batch")
    _check_entries(batch, names, _names("whole", whole))
    read_fills(batch, fill)
    ids, labels, mask, positions = (
        wide_integers(name, batch[name]) if name in batch and name != "input_ids" else batch.get(name)
        for name in ("input_ids", "labels", "attention_mask", "position_ids")
    )
    if positions is not None and (mask is not None or len(ids) != 1):
        if whole or not _counts_rows(positions, mask):
            raise ValueError(
                f"position_ids is given with input_ids {list(ids.shape)}{' and attention_mask' * (mask is not None)}; "
                "it says where the documents of one packed row [1, t] start, and needs no mask: leave the mask out, "
                "with all documents in one row, or leave position_ids out, which then are 0, 1, 2 ... in each row"
            )
        positions = None
    if positions is not None:
        cu_seqlens = _documents(positions[0].cpu())
    else:
        lengths = torch.full((len(ids),), ids.shape[1], device="cpu") if mask is None else _lengths(mask.cpu())
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    others = {name: batch[name] for name in names}
    if labels is None:
        return TokenRows(ids, None, cu_seqlens, positions is not None, others)
    targets = labels  # int64: unsigned integers have no -100
    if mask is not None:
        _check_padding(targets, mask)
    if shift_labels:
        targets = F.pad(targets, (0, 1), value=-100)[:, 1:]  # also of rows without a token
        if positions is not None:
            targets[0, (cu_seqlens[1:] - 1).long().to(targets.device)] = -100
    return TokenRows(ids, targets, cu_seqlens, positions is not None, others)


def digests(batch: Mapping[str, torch.Tensor]) -> Digests:
    """Each entry of a checked batch in a few bytes, to be compared between ranks."""
    return {name: (list(x.shape), str(x.dtype), crc32(bytes_of(x))) for name, x in sorted(batch.items())}


def read_fills(batch: Mapping[str, torch.Tensor], fill: Any) -> dict[str, float]:
    """The values of padding that `fill` gives to entries of a checked batch; {} for None."""
    given = cast("Mapping[str, Any]", fill or {})
    return {
        name: read_fill(f"fill[{name!r}]", value, batch[name].dtype, f"batch[{name!r}]")
        for name, value in given.items()
    }


def wide_integers(name: str, x: torch.Tensor) -> torch.Tensor:
    """An entry of integers or bools as int64, in which PyTorch computes with all of them.

    >>> wide_integers("labels", torch.tensor([2**64 - 100], dtype=torch.uint64))
    Traceback (most recent call last):
        ...
    ValueError: labels has 18446744073709551516; it must be at most 9223372036854775807, the largest number of int64
    """
    wide = x.to(torch.int64)
    if x.dtype == torch.uint64 and (beyond := wide < 0).any():
        raise ValueError(
            f"{name} has {int(wide[beyond][0]) + 2**64}; it must be at most {2**63 - 1}, the largest number of int64"
        )
    return wide


def _names(argument: str, given: Any) -> list[str]:
    """The names of entries in an argument."""
    names = read_several(argument, given)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{argument} has {name!r}; it must have names of tensors in batch")
    return names


def _names_of_fill(fill: Any) -> list[str]:
    """The entries that `fill` names."""
    if fill is None:
        return []
    if not isinstance(fill, Mapping):
        raise TypeError(f"fill is {kind_of(fill)}; it must be a dict from an entry's name to the value of its padding")
    for name in (names := _names("fill", cast("Mapping[Any, Any]", fill))):
        if name in (*_ENTRIES, *_MADE):
            raise ValueError(
                f"fill names {name!r}, which shard_batch fills itself; name only further tensors [b, s, ...]"
            )
    return names


def _check_entries(batch: Any, fill: Collection[str], whole: Collection[str]) -> None:
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch is {kind_of(batch)}; it must be a dict of tensors")
    unknown = set(batch) - {*_ENTRIES, *fill, *whole}
    if unknown or "input_ids" not in batch:
        name = min(map(str, unknown), default="")
        cure = f"; to cut another tensor [b, s, ...], say what its padding is: fill={{{name!r}: 0}}"
        raise ValueError(
            f"batch has {', '.join(sorted(map(str, batch)))}; it must have input_ids, and may have position_ids, "
            f"attention_mask and labels{cure if unknown else ''}"
        )
    if missing := sorted(set(fill) - batch.keys()):
        raise ValueError(f"fill names {missing[0]!r}, which batch does not have")
    for name in whole:
        if name in (*_ENTRIES, *_MADE, *fill) or name not in batch:
            why = "which batch does not have" if name not in batch else "which shard_batch cuts or makes"
            raise ValueError(f"whole names {name!r}, {why}; name only further tensors that every rank gets as they are")
        check_tensor(name, batch[name])
    shape: list[int] = []
    for name in (name for name in _ENTRIES if name in batch):  # input_ids first
        x = batch[name]
        check_tensor(name, x, "a tensor of integers")
        if x.dtype.is_floating_point or x.dtype.is_complex or (x.dtype == torch.bool and name != "attention_mask"):
            raise TypeError(f"{name} has dtype {x.dtype}; it must be an integer dtype")
        shape = shape or list(x.shape)
        if name == "position_ids" and x.ndim == 3 and list(x.shape[1:]) == shape:
            raise ValueError(
                f"position_ids has shape {list(x.shape)}, one for each axis of images and videos; transformers' "
                "shard_batch(batch, cp=..., model=model) cuts them for a prepared model that has such axes. Those of "
                "text are the same on all axes: give position_ids[0]"
            )
        if len(shape) != 2:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [b, s]")
        if x.ndim == 2 and x.shape[0] == shape[0] and x.shape[1] != shape[1]:
            raise ValueError(
                f"row 0 of {name} has {x.shape[1]} entries for {shape[1]} tokens of input_ids; it must have as many"
            )
        if list(x.shape) != shape:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be that of input_ids, {shape}")
    for name in fill:
        x = batch[name]
        check_tensor(name, x, "a tensor [b, s, ...]")
        if list(x.shape[:2]) != shape:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must begin with that of input_ids, {shape}")
        if x.dtype.is_complex:
            raise TypeError(f"{name} has dtype {x.dtype}; it must be real")


def _check_padding(targets: torch.Tensor, mask: torch.Tensor) -> None:
    """Raise for a label on padding: a model alone would learn it, from keys that no rank has."""
    odd = ((targets != -100) & (mask == 0).to(targets.device)).nonzero()
    if len(odd):
        row, at = odd[0].tolist()
        raise ValueError(
            f"row {row} of labels has {targets[row, at].item()} at token {at}, which is padding by attention_mask; "
            "padding must have the label -100"
        )


def _counts_rows(positions: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether positions say nothing: the tokens of each row have 0, 1, 2 and so on, as they have without positions."""
    plain = positions == torch.arange(positions.shape[1], device=positions.device)
    return bool((plain if mask is None else plain | (mask == 0).to(plain.device)).all())


def _documents(positions: torch.Tensor) -> torch.Tensor:
    """Cumulative lengths, int32 [b + 1], of documents whose positions are 0, 1, 2 and so on."""
    if len(positions) == 0:
        raise ValueError("row 0 of position_ids has no token; a packed batch has at least one")
    if positions[0] != 0:
        raise ValueError(
            "row 0 of position_ids does not begin with 0; each document of a packed batch starts at position 0"
        )
    wrong = ((positions[1:] != 0) & (positions[1:] != positions[:-1] + 1)).nonzero()[:, 0]
    if len(wrong):
        at = int(wrong[0]) + 1
        raise ValueError(
            f"row 0 of position_ids has {int(positions[at])} at token {at}, behind {int(positions[at - 1])}; positions "
            "of a document go 0, 1, 2 and so on, and 0 begins the next one"
        )
    starts = (positions == 0).nonzero()[:, 0]
    return F.pad(starts, (0, 1), value=len(positions)).to(torch.int32)


def _lengths(mask: torch.Tensor) -> torch.Tensor:
    """How many tokens each row has before its padding, int64 [b]."""
    odd = ((mask != 0) & (mask != 1)).nonzero()
    if len(odd):
        row, at = odd[0].tolist()
        raise ValueError(
            f"row {row} of attention_mask has {mask[row, at].item()} at token {at}; it must be 1 for a token and 0 for "
            "padding"
        )
    lengths = mask.sum(dim=1)
    gaps = (mask.bool() != (torch.arange(mask.shape[1], device="cpu") < lengths[:, None])).nonzero()
    if len(gaps):
        raise ValueError(
            f"row {int(gaps[0, 0])} of attention_mask has padding before or between tokens; pad behind them "
            "(padding_side='right')"
        )
    return lengths
