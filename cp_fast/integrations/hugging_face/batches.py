"""A rank's part of a batch as a collator of Hugging Face makes it, with labels as the model's head wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cp_fast.context import ContextParallel
from cp_fast.integrations import token_batches
from cp_fast.integrations.hugging_face.edge import edge_of
from cp_fast.integrations.loss import count_tokens

__all__ = ["shard_batch"]

_FLAT = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def shard_batch(
    batch: Mapping[str, Any], *, cp: ContextParallel, model: torch.nn.Module | None = None, **others: Any
) -> dict[str, Any]:
    """This rank's part of a batch that every rank has whole, as arguments of a prepared model. Collective.

    Args:
        batch: input_ids [b, s], and any of
            position_ids [1, t]: the batch is packed; each document starts at the model's first position.
            cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, seq_idx: the same said again, or instead, as
                `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` returns it.
            attention_mask [b, s]: 1 for tokens, 0 for padding behind them.
            labels [b, s]: as the model takes them alone, -100 where nothing is to be learnt.
        cp: the group, the schedule and the layout.
        model: the prepared model, which knows whether its labels are shifted and how it numbers positions; without it
            labels are the next tokens', and positions begin at 0, as in decoders.
        others: of `cp_fast.integrations.token_batches.shard_batch`.

    Returns:
        What that function returns: input_ids, position_ids, cp_batch; with labels also labels, num_items_in_batch, and
        shift_labels where they are shifted.

    Raises:
        ValueError: as there; or lengths that contradict the positions.
    """
    edge = None if model is None else edge_of(model)
    batch = _positions_said(dict(batch), 0 if edge is None else edge.first_position)
    if edge is None or edge.head is None or edge.head.shifts or "labels" not in batch:
        return token_batches.shard_batch(batch, cp=cp, **others)
    labels = batch.pop("labels")
    if (mask := batch.get("attention_mask")) is not None:
        labels = labels.masked_fill(mask == 0, -100)
    part = token_batches.shard_batch(batch, cp=cp, **others)
    own = token_batches.shard_batch({**batch, "input_ids": labels}, cp=cp, **others | {"pad_token_id": -100})[
        "input_ids"
    ]
    return part | {"labels": own, "num_items_in_batch": count_tokens(own != -100, over=others.get("over") or cp)}


def _positions_said(batch: dict[str, Any], first: int) -> dict[str, Any]:
    """The batch with its documents as position_ids from 0, and without what says the same again."""
    flat = {name: batch.pop(name) for name in _FLAT if name in batch}
    given: torch.Tensor | None = batch.get("position_ids")
    positions = None if given is None else given - first
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if (lengths := flat.get(name)) is None:
            continue
        said = torch.cat([torch.arange(n) for n in lengths.flatten().diff().tolist()] or [torch.arange(0)])[None]
        if said.shape != batch["input_ids"].shape:
            raise ValueError(f"{name} is of {said.shape[1]} tokens; input_ids is {list(batch['input_ids'].shape)}")
        if positions is not None and not torch.equal(said, positions.cpu()):
            raise ValueError(f"{name} and position_ids say different documents")
        positions = said
    for name in ("max_length_q", "max_length_k"):
        if name in flat and positions is not None and int(flat[name]) != int(positions.max()) + 1:
            raise ValueError(f"{name} is {int(flat[name])}; the longest document has {int(positions.max()) + 1} tokens")
    if (which := flat.get("seq_idx")) is not None:
        starts = which.diff(dim=-1).ne(0).cpu()
        if positions is None or not torch.equal(starts, positions[:, 1:].cpu() == 0):
            raise ValueError("seq_idx and position_ids say different documents")
    return batch if positions is None else batch | {"position_ids": positions.to(batch["input_ids"].device)}
