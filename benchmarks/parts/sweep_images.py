"""Batches with images, videos and sounds for `benchmarks.parts.sweep_cases`: the pictures that `prepare` tries a model
with, several of them in a row, of several sizes, across the cuts of each layout.

One process gets a packed batch document by document, with the pictures of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.parts.tiny_models import ORDINARY
from cp_fast.integrations.hugging_face.image_models import KINDS, ImageModel
from cp_fast.integrations.hugging_face.image_positions import frames_apart, seconds_of
from cp_fast.integrations.hugging_face.image_trials import Picture, Trial, trial_of

__all__ = ["Pictures", "kinds_of_pictures", "pictures_of"]

_MARKS = ("start", "end")
_DOCUMENTS = ((Picture(False, 1), Picture(True, 2)), (), (Picture(False, 3),))  # the pictures of each
_FRAMES = 2
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Pictures:
    """Documents with pictures: a batch of them, and each alone.

    Args:
        ids, types: of each document, [n].
        whole: the entries of all pictures.
        alone: those of each document.
        types_named: the entries with a number for each token that the model reads.
    """

    ids: list[torch.Tensor]
    types: list[torch.Tensor]
    whole: Batch
    alone: list[Batch]
    types_named: tuple[str, ...] = field(default=())


def kinds_of_pictures(images: ImageModel | None) -> list[tuple[str, ...]]:
    """The modalities that are played in one batch: all of them, where their tokens can be told apart."""
    names = [] if images is None else [one.name for one in images.modalities]
    tokens = [] if images is None else [one.token for one in images.modalities]
    return [tuple(names)] if len(set(tokens)) == len(tokens) and names else [(name,) for name in names]


def pictures_of(model: Any, images: ImageModel, names: Sequence[str]) -> Pictures:
    """Documents with pictures of these modalities.

    Args:
        model: in one process.
        images: how it reads them.
    """
    holder = model.get_submodule(images.where)
    with torch.no_grad():
        found = [trial_of(holder, one) for one in images.modalities if one.name in names]
    trials = [one for one in found if isinstance(one, Trial)]
    generator = torch.Generator().manual_seed(4)
    ids: list[torch.Tensor] = []
    types: list[torch.Tensor] = []
    for pictures in _DOCUMENTS:
        row, kinds = _text(6, generator) if pictures else [7], [0] * (6 if pictures else 1)
        for picture in pictures:
            for trial in trials:
                some, more = _tokens(holder, images, trial, picture)
                row += some + _text(3, generator)
                kinds += more + [0] * 3
        ids.append(torch.tensor(row))
        types.append(torch.tensor(kinds))
    every = [picture for pictures in _DOCUMENTS for picture in pictures]
    named = (*([images.types] if images.types else []), *images.of_tokens)
    alone = [_entries(holder, images, trials, pictures) if pictures else {} for pictures in _DOCUMENTS]
    return Pictures(ids, types, _entries(holder, images, trials, every), alone, named)


def _entries(holder: Any, images: ImageModel, trials: Sequence[Trial], pictures: Sequence[Picture]) -> Batch:
    found: Batch = {}
    for trial in trials:
        found |= trial.inputs(holder, pictures) | seconds_of(images, trial, len(pictures))
    return found


def _text(count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(ORDINARY.start, ORDINARY.stop, (count,), generator=generator).tolist()


def _tokens(holder: Any, images: ImageModel, trial: Trial, picture: Picture) -> tuple[list[int], list[int]]:
    """The ids and the types of a picture's tokens, with marks around them; the frames of a video may lie apart."""
    kind, count = trial.modality.name, trial.tokens[picture.wide]
    marks = [
        next((x for one in (kind, "vision") if (x := getattr(holder.config, f"{one}_{end}_token_id", None))), None)
        for end in _MARKS
    ]
    parts = _FRAMES if kind == "video" and images.axes and frames_apart(holder, images, (trial,)) else 1
    ids: list[int] = []
    types: list[int] = []
    for part in range(parts):
        some = [trial.modality.token] * (count // parts)
        start, end = ([mark] if mark is not None else [] for mark in marks)
        between = [11] if part else []
        ids += between + start + some + end
        types += [0] * len(between + start) + [1 + KINDS.index(kind)] * len(some) + [0] * len(end)
    return ids, types
