"""A batch of token ids with its labels, cut for one rank: what models of transformers are called with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F

from cp_fast.context import ContextParallel
from cp_fast.thd import pad_thd_sequences_for_cp
from cp_ref.common.slices import position_ids as positions_of
from cp_ref.common.slices import shard
from cp_ref.spec import check_context, divisor

__all__ = ["CpBatch", "shard_batch"]


@dataclass(frozen=True, eq=False)
class CpBatch:
    """The sequences of a batch, for every layer's attention: `shard_batch` makes it."""

    cp: ContextParallel
    qkv_format: str
    cu_seqlens: torch.Tensor | None = None  # global; None: all sequences are full
    cu_seqlens_padded: torch.Tensor | None = None  # packed batches


def shard_batch(batch: Mapping[str, torch.Tensor], *, cp: ContextParallel, pad_token_id: int = 0) -> dict[str, Any]:
    """This rank's part of a batch that every rank has whole, as arguments of a model. Collective.

    Args:
        batch: input_ids [b, s], and any of
            position_ids [1, t]: the batch is packed; each document starts at position 0.
            attention_mask [b, s]: 1 for tokens, 0 for padding behind them.
            labels [b, s]: not shifted yet, -100 where nothing is to be learnt.
        cp: the group, the schedule and the layout.
        pad_token_id: what lengths are filled up with until they divide.

    Returns:
        input_ids, position_ids (inside each document) and cp_batch; with labels also shift_labels, labels (the same:
        models ask for them) and num_items_in_batch, the counted tokens of all ranks. A rank's loss is then its part of
        the mean: the parts add up to it, and so do the gradients. Where a wrapper averages gradients over n ranks,
        multiply the loss by n.

    Raises:
        ValueError: an argument that is not there, a mask with padding before or between tokens, a packed batch with a
        mask; or a batch that is not the same on all ranks, which their loaders then gave other rows.
    """
    check_context(cp, ContextParallel)
    unknown = set(batch) - {"input_ids", "position_ids", "attention_mask", "labels"}
    if unknown or "input_ids" not in batch:
        raise ValueError(
            f"batch has {', '.join(sorted(batch))}; it must have input_ids, and may have position_ids, attention_mask "
            "and labels"
        )
    _check_the_same(batch, cp)
    ids, labels = batch["input_ids"], batch.get("labels")
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    labels = torch.full_like(ids, -100) if labels is None else labels
    if positions is not None:
        if mask is not None or ids.shape[0] != 1:
            raise ValueError(
                f"position_ids is given with input_ids {list(ids.shape)}{' and attention_mask' * (mask is not None)}; "
                "it says where the documents of one packed row [1, t] start, and needs no mask"
            )
        parts, sequences = _packed(ids[0], labels[0], positions[0], cp, pad_token_id)
    else:
        parts, sequences = _padded(ids, labels, mask, cp, pad_token_id)
    local = dict(zip(("input_ids", "shift_labels", "position_ids"), parts, strict=True))
    shifted, count = local.pop("shift_labels")
    given = {"labels": shifted, "shift_labels": shifted, "num_items_in_batch": count} if "labels" in batch else {}
    return {**local, **given, "cp_batch": sequences}


def _check_the_same(batch: Mapping[str, torch.Tensor], cp: ContextParallel) -> None:
    mine = {name: (list(x.shape), crc32(x.cpu().numpy().tobytes())) for name, x in sorted(batch.items())}
    for rank, theirs in enumerate(cp.comm.all_gather_object(mine)):
        if theirs != mine:
            odd = ", ".join(name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name))
            raise ValueError(
                f"batch differs between rank {cp.rank} and rank {rank} in {odd}; all ranks of a context get the same "
                "batch whole (Trainer's and accelerate's own loaders give every process another)"
            )


Parts = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]


def _packed(
    ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor, cp: ContextParallel, pad_token_id: int
) -> tuple[Parts, CpBatch]:
    starts = (positions == 0).nonzero()[:, 0].cpu()
    if len(starts) == 0 or starts[0] != 0:
        raise ValueError("position_ids does not begin with 0; each document of a packed batch starts at position 0")
    cu_seqlens = torch.cat((starts, torch.tensor([len(ids)]))).to(torch.int32)
    shifted = labels.roll(-1)
    shifted[(cu_seqlens[1:] - 1).long().to(labels.device)] = -100
    padded = pad_thd_sequences_for_cp(ids, shifted, cu_seqlens, divisor(cp.layout, cp.size), pad_token_id, -100)
    ids, shifted, cu_padded = padded
    how: dict[str, Any] = {"cp": cp, "qkv_format": "thd", "cu_seqlens_padded": cu_padded}
    local = positions_of(**how, device=ids.device)[None]
    targets = shard(shifted, **how)[None], (shifted != -100).sum()
    return (shard(ids, **how)[None], targets, local), CpBatch(cp, "thd", cu_seqlens, cu_padded.cpu())


def _padded(
    ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None, cp: ContextParallel, pad_token_id: int
) -> tuple[Parts, CpBatch]:
    lengths = torch.full((len(ids),), ids.shape[1]) if mask is None else mask.cpu().sum(dim=1)
    if mask is not None and not torch.equal(mask.cpu().bool(), torch.arange(ids.shape[1]) < lengths[:, None]):
        raise ValueError("attention_mask has padding before or between tokens; pad behind them (padding_side='right')")
    labels = labels.masked_fill(mask == 0, -100) if mask is not None else labels
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    missing = -ids.shape[1] % divisor(cp.layout, cp.size)
    ids, shifted = F.pad(ids, (0, missing), value=pad_token_id), F.pad(shifted, (0, missing), value=-100)
    full = missing == 0 and bool((lengths == ids.shape[1]).all())
    cu_seqlens = None if full else F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    local = positions_of(cp=cp, seqlen=ids.shape[1], device=ids.device).expand(len(ids), -1)
    targets = shard(shifted, cp=cp), (shifted != -100).sum()
    return (shard(ids, cp=cp), targets, local), CpBatch(cp, "bshd", cu_seqlens)
