"""The images of a batch: where their rows go, their positions, and which tokens see each other both ways.

A rank has some tokens of an image, which may straddle a cut. It takes the rows of its tokens, by their numbers in
the whole batch. Two things depend on the whole batch, and are found before it is cut. M-RoPE (Qwen-VL) has a position
for each of three axes; the model's own function finds them. The tokens of an image see each other both ways in some
models; such images become areas.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from cp_fast.integrations.hugging_face.image_models import POSITIONS, BothWaysRule, ImageModel
from cp_fast.integrations.shared.mask_areas import Block, BothWays
from cp_fast.integrations.token_batches import CpBatch
from cp_ref.schedules.values import kind_of

__all__ = ["ImageBatch", "ImagePlaces", "blocks_of", "images_of", "positions_of"]

_TYPES = ("mm_token_type_ids", "token_type_ids")
_PIXELS = ("pixel_values", "pixel_values_videos", "input_features")  # Of a batch that is given without its model.
_AXES = "the axes of position_ids"
_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError)


@dataclass(frozen=True, eq=False)
class ImagePlaces:
    """Where a whole batch has its images.

    Attributes:
        numbers: of each modality the row of its function that each token takes, int64 [b, s]; -1 for none.
        positions: [axes, b, s] where they are no positions of text.
        both_ways: blocks of tokens that see each other both ways.
    """

    numbers: dict[str, torch.Tensor]
    positions: torch.Tensor | None
    both_ways: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """The images of a batch.

    Attributes:
        holder: the module with the functions.
        images: how the model reads them.
        given: the batch's entries of images, which stay whole.
        rest: its other entries.
        types: which tokens are images, [b, s], as the batch says it.
        positions: [axes, b, s], where the batch says them.
    """

    holder: Any
    images: ImageModel
    given: dict[str, Any]
    rest: dict[str, Any]
    types: torch.Tensor | None
    positions: torch.Tensor | None

    def placed(self, rows: Mapping[str, Any]) -> ImagePlaces:
        """Where everything lies in the whole batch. rows: the batch, with its documents as position_ids.

        Raises:
            ValueError: entries contradict each other.
        """
        ids, mask, documents = rows["input_ids"], rows.get("attention_mask"), rows.get("position_ids")
        if documents is not None and (len(ids) != 1 or mask is not None or documents.shape != ids.shape):
            return ImagePlaces({}, None, ())  # which is refused with the text
        numbers: dict[str, torch.Tensor] = {}
        for one in self.images.modalities:
            if one.entries[0] in self.given:
                there = ids == one.token
                numbers[one.name] = torch.where(there, there.flatten().cumsum(0).view(ids.shape) - 1, -1)
        self._check_tokens(numbers)
        positions, blocks = self.positions, ()
        if numbers and self.images.types and self.types is None and positions is None:
            raise ValueError(
                f"batch has {', '.join(one for one in self.given)} and no {self.images.types}, which say "
                "which tokens are images; the model's processor returns them"
            )
        if self.images.axes and numbers and positions is None:
            positions = self._of_axes(ids, mask, documents)
        if self.images.both_ways is not None and self.types is not None:
            blocks = blocks_of(self.images.both_ways, self.types, mask, documents)
        return ImagePlaces(numbers, positions, blocks)

    def _check_tokens(self, numbers: Mapping[str, torch.Tensor]) -> None:
        """Raise for two modalities whose tokens have one id, of which each would take all."""
        taken: dict[int, str] = {}
        for one in self.images.modalities:
            if one.name in numbers and taken.setdefault(one.token, one.name) != one.name:
                raise ValueError(
                    f"batch has {taken[one.token]}s and {one.name}s, whose tokens have one id, {one.token}: "
                    f"{type(self.holder).__name__} cannot tell them apart; give them in two batches"
                )

    def _of_axes(self, ids: torch.Tensor, mask: Any, documents: Any) -> torch.Tensor | None:
        """[axes, b, s]: the positions that the model itself gives, to a packed batch's documents as if each were
        alone.
        """
        ids = ids.cpu()
        types = None if self.types is None else self.types.cpu()
        for one in self.images.modalities:
            grids = [name for name in one.entries if name in self.images.positions and not name.endswith("lengths")]
            if one.entries[0] in self.given and (missing := [name for name in grids if name not in self.given]):
                raise ValueError(
                    f"batch has {one.name}s and no {missing[0]}, which the model's processor returns beside them"
                )
        if isinstance(mask, torch.Tensor) and mask.shape == ids.shape and not (tokens := mask.bool().any(1)).all():
            raise ValueError(
                f"attention_mask has no token in row {int(tokens.int().argmin())}, and the positions of images begin "
                "with one; leave this row out"
            )
        packed = documents is not None
        if packed and not self.images.rows_apart:
            raise NotImplementedError(
                f"{type(self.holder).__name__} numbers the images of a row on from those of the rows before it, so a "
                "document of a packed batch has other positions than alone; give rows with padding, or position_ids "
                "with all axes"
            )
        if packed:
            starts = (documents[0].cpu() == 0).nonzero()[:, 0].tolist()
            lengths = [b - a for a, b in zip(starts, [*starts[1:], ids.shape[1]], strict=True)]
            pad = nn.utils.rnn.pad_sequence
            ids = pad([*ids[0].split(lengths)], batch_first=True)
            types = None if types is None else pad([*types[0].split(lengths)], batch_first=True)
            mask = torch.arange(ids.shape[1], device="cpu") < torch.tensor(lengths, device="cpu")[:, None]
        read = [name for name in self.images.positions if name in self.given]
        try:
            positions = positions_of(self.holder, self.images, ids, types, mask, self.given)
        except _ERRORS as error:
            raise ValueError(
                f"the positions of images cannot be found ({type(error).__name__}: {error}); {self.images.types} and "
                f"{' and '.join(read)} must say the same images"
            ) from error
        if positions is None or not packed or mask is None:
            return positions
        return positions[:, mask.bool()][:, None]

    def whole(self, places: ImagePlaces) -> dict[str, torch.Tensor]:
        """The entries of images that all ranks must have alike."""
        found = dict(self.given)
        if self.types is not None and self.images.types not in self.rest:
            found[self.images.types] = self.types
        return found if places.positions is None else found | {_AXES: places.positions}

    @property
    def fill(self) -> dict[str, float]:
        """The entries with a number for each token, and what padding has."""
        return {name: 0 for name in self.images.of_tokens if name in self.rest}

    def cut(self, places: ImagePlaces, part: dict[str, Any]) -> dict[str, Any]:
        """This rank's part from `shard_batch`, with its rows of the images."""
        sequences: CpBatch = part["cp_batch"]
        sequences.image_rows = {}
        for modality, numbers in places.numbers.items():
            mine = sequences.shard(numbers, -1).flatten()
            sequences.image_rows[modality] = mine[mine >= 0], int(numbers.max()) + 1
        if places.both_ways and self.images.both_ways is not None:
            sequences.both_ways = BothWays(places.both_ways, self.images.both_ways.windowed)
        if places.positions is not None:
            positions = places.positions.to(part["input_ids"].device)
            part["position_ids"] = sequences.shard(positions.permute(1, 2, 0)).permute(2, 0, 1)
            sequences.longest = int(positions.max()) + 1
        types = [] if self.images.types in self.rest else [self.images.types]
        used = {*self.images.of_positions, _AXES, *types}
        return {name: x for name, x in part.items() if name not in used}


def positions_of(
    holder: Any,
    images: ImageModel,
    ids: torch.Tensor,
    types: torch.Tensor | None,
    mask: torch.Tensor | None,
    given: Mapping[str, torch.Tensor],
) -> torch.Tensor | None:
    """The positions that a model gives to whole rows, [axes, b, s]. None: it gives them those of text.

    Args:
        types: which tokens are images, [b, s].
        mask: which are tokens, [b, s]; None: all.
        given: the entries of images, of which it reads some.
    """
    function: Any = getattr(holder, POSITIONS)
    more = {name: None if (x := given.get(name)) is None else x.cpu() for name in images.positions}
    if "audio_feature_lengths" in more and (sounds := given.get("feature_attention_mask")) is not None:
        more["audio_feature_lengths"] = sounds.sum(1).cpu()
    how: dict[str, Any] = {"attention_mask": None if mask is None else mask.cpu().long()}
    how |= {images.types: types} if images.types and images.types in _parameters(function) else {}
    how |= {name: ids[..., None] for name in ("inputs_embeds",) if name in _parameters(function)}
    before = getattr(holder, "rope_deltas", None)  # Of a model's last call, for generation.
    holder.rope_deltas = None
    try:
        return function(input_ids=ids, cache=None, **how, **more)
    finally:
        holder.rope_deltas = before


def _parameters(function: Any) -> Collection[str]:
    return inspect.signature(function).parameters


def images_of(
    batch: Any, holder: nn.Module | None, images: ImageModel | None, kept: Collection[str], model: nn.Module | None
) -> ImageBatch | None:
    """A batch's images, taken apart from its text; None where it is to be cut as text, or to be refused.

    Args:
        holder, images: the module with the functions of images, and what `prepare` found of it; None: a model of text.
        kept: entries that are cut as text.
        model: that the batch is for, where it is known.

    Raises:
        ValueError: images for no model, or for one that does not take them; entries of other shapes.
        NotImplementedError: images of a modality that `prepare` could not try.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return None
    if images is None:
        if found := [name for name in _PIXELS if batch.get(name) is not None]:
            what = "give shard_batch the prepared model, model=model" if model is None else "its model takes text alone"
            raise ValueError(f"batch has {found[0]}, whose rows go where the model has image tokens; {what}")
        return None
    name = type(holder).__name__
    for one, why in images.refused.items():
        for pixels in _pixels_of(one):
            if batch.get(pixels) is not None and pixels not in images.entries:
                raise NotImplementedError(f"batch has {pixels}, and {name} takes no {one}s over ranks: {why}")
    given = {entry: batch[entry] for entry in images.entries if batch.get(entry) is not None}
    for one in images.modalities:
        alone = [entry for entry in one.entries[1:] if entry in given and one.entries[0] not in given]
        if alone and not any(entry in other.entries for entry in alone for other in images.modalities if other != one):
            raise ValueError(f"batch has {alone[0]} and no {one.entries[0]}; give both, or none of them")
    for entry, x in given.items():
        if not isinstance(x, torch.Tensor):
            if not isinstance(x, list | tuple):
                raise ValueError(f"{entry} is {kind_of(x)}; it must be a tensor, or a list of numbers")
            given[entry] = torch.tensor(x, device="cpu")
    if odd := [entry for entry in batch if _is_pixels(entry) and entry not in {*images.entries, *kept}]:
        raise ValueError(f"batch has {odd[0]}, which {name} does not take")
    rest = {entry: x for entry, x in batch.items() if entry not in {*images.entries, *_TYPES} - {*kept}}
    ids, types = batch["input_ids"], batch.get(images.types)
    shape = list(ids.shape) if isinstance(ids, torch.Tensor) else []
    if len(shape) != 2:
        raise ValueError(f"input_ids is {shape if shape else kind_of(ids)}; it must be a tensor [b, s]")
    if types is not None and (not isinstance(types, torch.Tensor) or list(types.shape) != shape):
        given_shape = list(types.shape) if isinstance(types, torch.Tensor) else kind_of(types)
        raise ValueError(f"{images.types} has shape {given_shape}; it must be that of input_ids, {shape}")
    positions: Any = rest.get("position_ids")
    axes = positions.shape[0] if isinstance(positions, torch.Tensor) and positions.ndim == 3 else 0
    if not images.axes or axes not in (images.axes, images.axes + 1) or list(positions.shape[1:]) != shape:
        return ImageBatch(holder, images, given, rest, types, None)
    del rest["position_ids"]
    if axes == images.axes + 1:  # transformers' form of a packed row: the documents, then the axes
        if shape[0] != 1:
            raise ValueError(
                f"position_ids has shape {list(positions.shape)}; four axes are of a packed row [4, 1, t], whose first "
                "says the documents: give rows with padding [3, b, s] and attention_mask"
            )
        rest["position_ids"] = positions[0]
    return ImageBatch(holder, images, given, rest, types, positions[axes - images.axes :])


def _pixels_of(modality: str) -> tuple[str, ...]:
    return {"image": ("pixel_values",), "video": ("pixel_values_videos",)}.get(modality, _PIXELS[2:])


def _is_pixels(entry: str) -> bool:
    words = ("pixel_", "image_", "video_", "input_features", "second_per_grid")
    return any(entry.startswith(word) for word in words)


def blocks_of(rule: BothWaysRule, types: torch.Tensor, mask: Any, documents: Any) -> tuple[Block, ...]:
    """The tokens that see each other both ways in each row, or in each document of a packed one.

    >>> blocks_of(BothWaysRule(1, False, True), torch.tensor([[0, 1, 1, 0, 1]]), None, None)
    ((0, ((1, 3),)), (0, ((4, 5),)))
    >>> blocks_of(BothWaysRule(1, True, True), torch.tensor([[0, 1, 1, 0, 1]]), None, None)
    ((0, ((1, 3), (4, 5))),)
    """
    there = types == rule.value
    there = there if mask is None else there & (mask == 1).to(types.device)
    rows = there.cpu().tolist()
    if documents is not None:
        starts = (documents[0] == 0).nonzero()[:, 0].tolist()
        rows = [rows[0][a:b] for a, b in zip(starts, [*starts[1:], len(rows[0])], strict=True)]
    found: list[Block] = []
    for number, row in enumerate(rows):
        at, runs = 0, list[tuple[int, int]]()
        for image, run in groupby(row):
            length = len(list(run))
            runs += [(at, at + length)] if image else []
            at += length
        found += [(number, tuple(runs))] * bool(runs) if rule.joined else [(number, (run,)) for run in runs]
    return tuple(found)
