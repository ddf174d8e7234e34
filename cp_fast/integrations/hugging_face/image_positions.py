"""Compare the positions that a model gives to the tokens of pictures with those that `shard_batch` finds."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from cp_fast.integrations.hugging_face.image_batches import positions_of
from cp_fast.integrations.hugging_face.image_models import KINDS, TEXT, ImageModel
from cp_fast.integrations.hugging_face.image_trials import ERRORS, PICTURES, Trial, placed

__all__ = ["axes_of_pictures", "frames_apart", "rows_apart", "seconds_of"]


class _Stopped(Exception):
    """The text model was called; it need not run."""


def axes_of_pictures(holder: Any, images: ImageModel, trials: tuple[Trial, ...]) -> int:
    """The axes of the positions that a model gives to whole pictures; they are those that `positions_of` finds.

    Raises:
        NotImplementedError: they are others.
    """
    text = next((one for name, one in holder.named_children() if name in TEXT), None)
    if text is None:
        raise NotImplementedError("its positions are its own, and it has no text model that takes them")
    return _axes_of(holder, text, images, trials, frames=2 if frames_apart(holder, images, trials) else 1)


def rows_apart(holder: Any, images: ImageModel, trials: tuple[Trial, ...]) -> bool:
    """Whether a row with pictures has the same positions behind another row with pictures."""
    frames = 2 if frames_apart(holder, images, trials) else 1
    ids, types, _ = picture_tokens(holder, images, trials, frames)
    inputs: dict[str, torch.Tensor] = {}
    for trial in trials:
        inputs |= trial.inputs(holder, PICTURES * 2) | seconds_of(images, trial, 2 * len(PICTURES))
    rows, kinds = torch.tensor([ids] * 2), torch.tensor([types] * 2)
    found = positions_of(holder, images, rows, kinds, torch.ones_like(rows), inputs)
    return found is None or torch.equal(found[:, 0], found[:, 1])


def frames_apart(holder: Any, images: ImageModel, trials: tuple[Trial, ...]) -> bool:
    """Whether a model's positions want the frames of a video apart, as where their times stand between them."""
    ids, types, inputs = picture_tokens(holder, images, trials, frames=1)
    try:
        positions_of(holder, images, torch.tensor([ids]), torch.tensor([types]), torch.ones(1, len(ids)), inputs)
    except ERRORS:
        return True
    return False


def _axes_of(holder: Any, text: nn.Module, images: ImageModel, trials: tuple[Trial, ...], frames: int) -> int:
    """frames: in how many runs the tokens of a video lie."""
    ids, types, inputs = picture_tokens(holder, images, trials, frames)
    device = next(holder.parameters()).device
    given = {"input_ids": torch.tensor([ids], device=device), "attention_mask": torch.ones(1, len(ids), device=device)}
    given["attention_mask"] = given["attention_mask"].long()
    kinds = torch.tensor([types], device=device)
    more = {images.types: kinds} if images.types else {}
    taken: list[Any] = []

    def stop(_: nn.Module, __: Any, named: dict[str, Any]) -> None:
        taken.append(named.get("position_ids"))
        raise _Stopped

    before, handle = holder.rope_deltas, text.register_forward_pre_hook(stop, with_kwargs=True)
    holder.rope_deltas = None
    try:
        with contextlib.suppress(_Stopped):
            holder(**given, **more, **{n: placed(x, holder) for n, x in inputs.items()}, use_cache=False)
    finally:
        holder.rope_deltas = before
        handle.remove()
    theirs = taken[0]
    mine = positions_of(holder, images, given["input_ids"].cpu(), kinds.cpu(), given["attention_mask"], inputs)
    alike = theirs is mine if theirs is None or mine is None else torch.equal(theirs.cpu(), mine.cpu())
    if not alike:
        raise NotImplementedError("it numbers the tokens of images in another way than its own function of positions")
    return 0 if mine is None else len(mine)


def seconds_of(images: ImageModel, trial: Trial, count: int) -> dict[str, torch.Tensor]:
    """How long a frame of each video lasts, where positions depend on that."""
    names = [name for name in images.of_positions if "second_per_grid" in name and trial.modality.name == "video"]
    return {name: torch.ones(count, device="cpu") for name in names}


def picture_tokens(
    holder: Any, images: ImageModel, trials: tuple[Trial, ...], frames: int
) -> tuple[list[int], list[int], dict[str, torch.Tensor]]:
    """The ids of a row with two pictures of each kind, their types, and the entries of a batch."""
    config, ids, types = holder.config, [5, 6], [0, 0]
    inputs: dict[str, torch.Tensor] = {}
    for trial in trials:
        inputs |= trial.inputs(holder, PICTURES) | seconds_of(images, trial, len(PICTURES))
        names, kind = (trial.modality.name, "vision"), 1 + KINDS.index(trial.modality.name)
        marks = [
            next((x for n in names if (x := getattr(config, f"{n}_{end}_token_id", None)) is not None), 7)
            for end in ("start", "end")
        ]
        for count in trial.tokens:
            for _ in range(frames if trial.modality.name == "video" else 1):
                length = count // (frames if trial.modality.name == "video" else 1)
                ids += [marks[0], *[trial.modality.token] * length, marks[1], 8]
                types += [0, *[kind] * length, 0, 0]
    return [*ids, 9], [*types, 0], inputs
