"""The functions of images in a model's calls: from them a rank gets the rows of its tokens.

`put_around_functions` gives the module that has them, its holder, functions that do so while a call of a slice runs.
The model calls them, and puts what they return in the place of its tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.hugging_face.image_models import ImageModel, Modality
from cp_fast.integrations.hugging_face.image_ranks import rows_of_ranks
from cp_fast.integrations.hugging_face.image_rows import with_rows
from cp_fast.integrations.hugging_face.module_states import drop_state, known_state, put_state, state_of
from cp_fast.integrations.token_batches import CpBatch
from cp_fast.runtime.handles import outside_of_graphs

__all__ = ["Share", "begin_call", "end_call", "put_around_functions", "show_share", "take_functions"]


class Share:
    """A rank's rows in one call.

    It is no dataclass, for the reason of `CpBatch`.

    Args:
        rows: of each modality the numbers of the rows that the rank's tokens take, and how many all tokens take.
        cp: of the batch.
    """

    def __init__(self, rows: Mapping[str, tuple[torch.Tensor, int]], cp: ContextParallel | None = None) -> None:
        self.rows, self.cp = rows, cp

    def of(self, holder: Any, modality: Modality, by_place: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """The outputs of the holder's function of images, with this rank's rows alone."""
        function = getattr(type(holder), modality.function)
        mine, count = self.rows[modality.name]
        if modality.shared and self.cp is not None:
            bound = inspect.signature(function).bind(holder, *by_place, **given).arguments
            named = {name: x for name, x in bound.items() if name not in ("self", "kwargs")} | bound.get("kwargs", {})
            if torch.compiler.is_compiling():
                return outside_of_graphs(rows_of_ranks, holder, modality, self.cp, named, mine, count)
            return rows_of_ranks(holder, modality, self.cp, named, mine, count)
        out = function(holder, *by_place, **given)
        try:
            return with_rows(out, count, lambda every: every[mine.to(every.device)], modality.fields)
        except ValueError as error:
            raise ValueError(f"{type(holder).__name__}'s {modality.name}s: {error}") from error

    def __deepcopy__(self, _: Any) -> Share:
        return self


@dataclass(eq=False)
class _Running:
    """Of a holder: the share of the call that runs; None: the call has the whole."""

    share: Share | None = None


def put_around_functions(holder: nn.Module, images: ImageModel) -> None:
    """Have a model's functions of images return a rank's rows while a call of a slice runs."""
    put_state(holder, _Running())
    for modality in images.modalities:  # as the share of a call has them
        holder.__dict__[modality.function] = MethodType(_sharing(modality), holder)


def take_functions(model: nn.Module) -> None:
    """Give a model its class's functions of images again."""
    for module in model.modules():
        if state_of(module, _Running) is not None:
            drop_state(module, _Running)
            for name in [name for name, one in module.__dict__.items() if hasattr(one, "cp_fast_images")]:
                del module.__dict__[name]


def _sharing(modality: Modality) -> Any:
    def function(holder: Any, *by_place: Any, **given: Any) -> Any:
        running = known_state(holder, _Running)
        if (share := running.share) is None:  # A call with the whole, or one by another of these functions.
            return getattr(type(holder), modality.function)(holder, *by_place, **given)
        running.share = None
        try:
            return share.of(holder, modality, by_place, given)
        finally:
            running.share = share

    function.__name__ = modality.function
    function.cp_fast_images = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def begin_call(holder: Any, images: ImageModel, sequences: CpBatch, given: Mapping[str, Any]) -> None:
    """Check the images of a call of a slice, and have the functions return this rank's rows.

    Raises:
        TypeError: images without their places, or what only the whole batch has a use for. RuntimeError: the model has
        its class's functions again.
    """
    name, places = type(holder).__name__, sequences.image_rows or {}
    for entry in (images.types, *images.of_positions):
        if entry and given.get(entry) is not None and entry not in images.of_tokens:
            raise TypeError(f"{name} is given {entry}, which shard_batch(batch, cp=..., model=model) has made use of")
    for one in images.modalities:
        pixels = one.entries[0]
        if not hasattr(holder.__dict__.get(one.function), "cp_fast_images"):
            raise RuntimeError(f"{name} has lost the {one.function} that prepare gave it; it needs another prepare")
        if (given.get(pixels) is not None) != (one.name in places):
            what = f"no {pixels}, and cp_batch says" if one.name in places else f"{pixels}, and cp_batch does not say"
            raise TypeError(
                f"{name} is given {what} which tokens are {one.name}s: call it with all that "
                "shard_batch(batch, cp=..., model=model) returns for a batch with its images"
            )
    show_share(holder, Share(places, sequences.cp))


def show_share(holder: nn.Module, share: Share) -> None:
    """Have the functions return the rows of a share."""
    known_state(holder, _Running).share = share


def end_call(holder: nn.Module) -> None:
    """Have the functions return all rows again."""
    if (running := state_of(holder, _Running)) is not None:
        running.share = None
