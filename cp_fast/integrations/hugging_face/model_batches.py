"""A rank's part of a batch as a collator of Hugging Face makes it, with labels as the model's head wants them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations import token_batches
from cp_fast.integrations.hugging_face.image_batches import images_of
from cp_fast.integrations.hugging_face.model_task import Task
from cp_fast.integrations.hugging_face.prepared_model import PreparedModel, holder_of_images, prepared_model
from cp_fast.integrations.hugging_face.slice_probe import Numbering
from cp_fast.integrations.hugging_face.task_head import SPANS
from cp_fast.integrations.shared.token_rows import wide_integers
from cp_ref.groups.agreement import agreed, collective
from cp_ref.schedules.values import check_tensor, read_count, read_lengths

__all__ = ["shard_batch"]

FLAT = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@collective(token_batches.ranks_of_batch)
def shard_batch(
    batch: Mapping[str, Any],
    *,
    cp: ContextParallel,
    model: torch.nn.Module | None = None,
    pad_token_id: int = 0,
    over: Any = None,
    fill: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Cut this rank's part out of a batch that every rank of a context has whole, as arguments of a prepared model.
    Collective.

    Args:
        batch: input_ids [b, s], and any of
            position_ids [1, t]: the batch is packed; each document starts at the model's first position.
            cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, seq_idx: the same said again, or instead, as
                `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` returns it.
            attention_mask [b, s]: 1 for tokens, 0 for padding behind them.
            labels [b, s]: as the model takes them alone, -100 where nothing is to be learnt, as on padding.
            start_positions, end_positions [b]: the spans of question answering, as places in rows; they stay whole.
            pixel_values, pixel_values_videos, image_grid_thw, video_grid_thw, image_sizes, second_per_grid_ts: images
                and videos, as the processor returns them, with mm_token_type_ids or token_type_ids [b, s]; needs model.
            position_ids [3, b, s], or [4, 1, t] of a packed row, whose first axis says the documents: of M-RoPE.
        cp: the group, the schedule and the layout.
        model: the prepared model, which knows whether a token learns the label of the next one or its own, and how
            positions are numbered, and where images go. None: a decoder of text, whose labels are the next tokens', and
            whose positions begin at 0.
        pad_token_id: what lengths are filled up with until they divide.
        over, fill: as in `cp_fast.integrations.token_batches.shard_tokens`.

    Returns:
        What that function returns: input_ids, position_ids, cp_batch; with labels also labels, num_items_in_batch, and
        shift_labels where they are the next tokens'. Images and their sizes are returned whole: every rank runs the
        vision part on all of them, and takes the rows of its own tokens. Positions of M-RoPE are [3, b, s/cp].

    Raises:
        ValueError, TypeError: as there; a model that was not prepared; lengths that contradict the positions.
    """

    def read() -> tuple[Any, ...]:
        prepared = PreparedModel(Numbering(0), Task()) if model is None else prepared_model(model)
        holder = None if model is None else holder_of_images(model)
        images = images_of(batch, holder, prepared.images, fill or (), model)
        rows = positions_said(batch if images is None else images.rest, prepared.numbering.first)
        places = None if images is None else images.placed(rows)
        labelled = prepared.task.head is not None and isinstance(rows, Mapping) and "labels" in rows
        shifts = prepared.task.labels_head(type(model).__name__).shifts if labelled else True
        return images, rows, places, shifts

    met = token_batches.ranks_of_batch({"cp": cp, "over": over})
    images, rows, places, shifts = agreed(met, "shard_batch", read)
    how: dict[str, Any] = {"cp": cp, "pad_token_id": pad_token_id, "shift_labels": shifts, "over": over, "fill": fill}
    spans = [name for name in SPANS if isinstance(rows, Mapping) and name in rows]
    if images is None or places is None:
        return token_batches.shard_tokens(rows, **how, whole=spans)
    whole, how["fill"] = images.whole(places), {**images.fill, **(fill or {})}
    return images.cut(places, token_batches.shard_tokens({**rows, **whole}, **how, whole=[*spans, *whole]))


def positions_said(batch: Any, first: int) -> Any:
    """The batch with its documents as position_ids from 0, and without what says the same again."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return batch  # for token_batches to refuse
    flat = {name: x for name, x in batch.items() if name in FLAT}
    batch = {name: x for name, x in batch.items() if name not in FLAT}
    given: torch.Tensor | None = batch.get("position_ids")
    for name in ("input_ids", "position_ids"):
        if name in batch:
            check_tensor(name, batch[name], "a tensor of integers")
    if given is not None and (given.ndim != 2 or given.dtype.is_floating_point or given.dtype.is_complex):
        return batch  # for token_batches to refuse
    positions = None if given is None else wide_integers("position_ids", given) - first
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if (lengths := flat.get(name)) is None:
            continue
        ends = read_lengths(name, lengths.flatten() if isinstance(lengths, torch.Tensor) else lengths) or [0]
        said = torch.cat([torch.arange(b - a, device="cpu") for a, b in pairwise([0, *ends])])[None]
        if said.shape != batch["input_ids"].shape:
            raise ValueError(f"{name} is of {said.shape[1]} tokens; input_ids is {list(batch['input_ids'].shape)}")
        if positions is not None and not torch.equal(said, positions.cpu()):
            raise ValueError(f"{name} and position_ids say different documents")
        positions = said
    if positions is None:
        if flat:
            raise ValueError(
                f"{', '.join(flat)} are given without position_ids or cu_seq_lens_q, which say the documents"
            )
        return batch
    for name in ("max_length_q", "max_length_k"):
        if name in flat:
            given_longest = flat[name]
            if isinstance(given_longest, torch.Tensor) and given_longest.numel() == 1:
                given_longest = given_longest.item()
            longest = int(positions.max()) + 1
            if read_count(name, given_longest, at_least=0) != longest:
                raise ValueError(f"{name} is {given_longest}; the longest document has {longest} tokens")
    if (which := flat.get("seq_idx")) is not None:
        check_tensor("seq_idx", which, "a tensor of integers")
        if which.shape != positions.shape:
            raise ValueError(f"seq_idx has shape {list(which.shape)}; it must be that of input_ids")
        starts = wide_integers("seq_idx", which).diff(dim=-1).ne(0).cpu()
        if not torch.equal(starts, positions[:, 1:].cpu() == 0):
            raise ValueError("seq_idx and position_ids say different documents")
    return batch | {"position_ids": positions.to(batch["input_ids"].device)}
