"""Models of images and text: the vision part runs on every rank, and its rows go where their tokens are cut.

Such a model embeds its tokens, and puts the k-th row of its vision part in the place of the k-th image token. A rank
has some of these tokens, also of an image that straddles a cut. So every rank runs the vision part on all images, as
one process does. It takes the rows of its tokens, by their numbers in the whole batch. The gradients that the
ranks find add up to those of one process, as those of all other weights.

Two things depend on the whole batch, and are found before it is cut. M-RoPE (Qwen-VL) has a position for each of three
axes. The tokens of an image see each other both ways in Gemma 3; such images become areas.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import nn

from cp_fast.integrations.hugging_face.module_states import put_state, state_of
from cp_fast.integrations.token_batches import CpBatch
from cp_ref.schedules.values import kind_of

__all__ = [
    "ImageBatch",
    "ImagePlaces",
    "arguments_of_images",
    "has_images",
    "images_of",
    "is_whole",
    "mark_whole",
    "run_vision",
    "vision_parts",
]


@dataclass(frozen=True)
class Kind:
    """How a family has its images.

    Args:
        pixels: of each modality, the entry of a batch that its vision part reads.
        beside: of each modality, further entries that the vision part reads.
        settings: arguments of the vision part that are no tensors of a batch.
        types: the entry that says which tokens are images, where images are refused without it.
        of_positions: whether positions are numbered on three axes.
        both_ways: whether the tokens of one image see each other both ways.
    """

    pixels: dict[str, str]
    beside: dict[str, str] = field(default_factory=dict[str, str])
    settings: tuple[str, ...] = ()
    types: str = ""
    of_positions: bool = False
    both_ways: bool = False


_IMAGE = {"image": "pixel_values"}
_QWEN = Kind(
    _IMAGE | {"video": "pixel_values_videos"},
    {"image": "image_grid_thw", "video": "video_grid_thw"},
    types="mm_token_type_ids",
    of_positions=True,
)
_LAYER = ("vision_feature_layer", "vision_feature_select_strategy")
KINDS = {  # by the class of the model of transformers that has the vision part and the language model
    "Qwen2VLModel": _QWEN,
    "Qwen2_5_VLModel": _QWEN,
    "Qwen3VLModel": _QWEN,
    "Qwen3VLMoeModel": _QWEN,
    "Qwen3_5Model": _QWEN,
    "Qwen3_5MoeModel": _QWEN,
    "LlavaModel": Kind(_IMAGE, {"image": "image_sizes"}, _LAYER),
    "InternVLModel": Kind(_IMAGE, settings=_LAYER),
    "Gemma3Model": Kind(_IMAGE, types="token_type_ids", both_ways=True),
}
FAMILIES = "Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5, LLaVA, InternVL and Gemma 3"
_TYPES = ("mm_token_type_ids", "token_type_ids")
_SECONDS, _AXES = "second_per_grid_ts", "the axes of position_ids"
_ENTRIES = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image_sizes", _SECONDS)
_LANGUAGE = "language_model"
_GIVEN = "mm_encoder_outputs"  # what the vision part made, in place of images


# ---- the model


def vision_parts(model: nn.Module) -> tuple[str, ...]:
    """The names of a model's modules for images, outside of its language model; none of a model of text.

    Raises:
        NotImplementedError: the model reads images in a way that is not known here.
    """
    found: Any = next(((where, m) for where, m in model.named_modules() if has_images(m)), None)
    config: Any = model.config
    if found is None:
        if getattr(config, "vision_config", None) is None:
            return ()
        raise NotImplementedError(
            f"{type(model).__name__} reads images, in a way that cp_fast does not have; it has {FAMILIES}{_text(model)}"
        )
    where, holder = found
    kind = _kind(holder)
    if _GIVEN not in inspect.signature(holder.forward).parameters:
        raise NotImplementedError(
            f"{type(holder).__name__} of this transformers takes no {_GIVEN}, in which each rank gives it the rows of "
            "its own image tokens; pip install --upgrade 'transformers>=5.23'"
        )
    if config is not holder.config or (holder is not model and not _generates(model)):
        raise NotImplementedError(
            f"{type(model).__name__} is no ...ForConditionalGeneration; cp_fast takes images in these alone"
        )
    if kind is not None and kind.both_ways and getattr(config.get_text_config(), "use_bidirectional_attention", False):
        raise NotImplementedError(
            "use_bidirectional_attention is True; cp_fast has images inside causal masks: set it to False"
            f"{_text(model)}"
        )
    names = [name for name, _ in holder.named_children() if name != _LANGUAGE]
    return tuple(f"{where}.{name}" if where else name for name in names)


def _text(model: nn.Module) -> str:
    """Say in a sentence how the text model inside is prepared. "": the model has no text model."""
    config: Any = model.config
    text = config.get_text_config()
    found = (where for where, m in model.named_modules() if where and getattr(m, "config", None) is text)
    if text is config or (where := next(found, None)) is None:
        return ""
    return (
        f". The text model inside can be tried alone, prepare(model.{where}, cp), and be called with inputs_embeds="
        "part['cp_batch'].shard(embeddings) in place of input_ids, where its own masks are those of text"
    )


def _kind(module: nn.Module) -> Kind | None:
    kinds = (one for one in type(module).__mro__ if one.__module__.startswith("transformers.models."))
    return next((KINDS[one.__name__] for one in kinds if one.__name__ in KINDS), None)


def _generates(model: nn.Module) -> bool:
    return any(one.__name__.endswith("ForConditionalGeneration") for one in type(model).__mro__)


class _Whole:
    """Of a module that every rank runs on everything."""


def mark_whole(model: nn.Module, parts: tuple[str, ...]) -> None:
    """Mark what every rank runs on everything, by the names of these parts of the model."""
    for part in parts:
        for module in model.get_submodule(part).modules():
            put_state(module, _Whole())


def is_whole(module: nn.Module) -> bool:
    """Whether every rank runs this module on everything."""
    return state_of(module, _Whole) is not None


def has_images(module: nn.Module) -> bool:
    """Whether a module has a vision part and a language model."""
    return _kind(module) is not None


def arguments_of_images(model: nn.Module) -> frozenset[str]:
    """The arguments of a call that belong to the vision part in a model; `run_vision` reads or refuses each of them."""
    kinds = [kind for kind in map(_kind, model.modules()) if kind is not None]
    named = [{*kind.pixels.values(), *kind.beside.values(), *kind.settings, kind.types} for kind in kinds]
    return frozenset({_GIVEN}.union(*named)) if kinds else frozenset()


# ---- a batch


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """The images of a batch.

    Attributes:
        holder: the module with the vision part.
        kind: of the model's family.
        given: the batch's entries of images, which stay whole.
        rest: its other entries.
        types: which tokens are images, [b, s], as the batch says it.
        positions: [3, b, s], where the batch says them.
    """

    holder: Any
    kind: Kind
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
        config: Any = self.holder.config
        numbers: dict[str, torch.Tensor] = {}
        for modality, name in self.kind.pixels.items():
            if name in self.given:
                there = ids == getattr(config, f"{modality}_token_id")
                numbers[modality] = torch.where(there, there.flatten().cumsum(0).view(ids.shape) - 1, -1)
        positions, runs = self.positions, ()
        if numbers and self.kind.types and self.types is None and positions is None:
            raise ValueError(
                f"batch has {', '.join(self.kind.pixels[one] for one in numbers)} and no {self.kind.types}, which say "
                "which tokens are images; the model's processor returns them"
            )
        if self.kind.of_positions and numbers and positions is None:
            positions = self._mrope(ids, mask, documents)
        if self.kind.both_ways and self.types is not None:
            runs = _runs(self.types, mask, documents)
        return ImagePlaces(numbers, positions, runs)

    def _mrope(self, ids: torch.Tensor, mask: Any, documents: Any) -> torch.Tensor:
        """[3, b, s]: the positions that the model itself gives, to a packed batch's documents as if each were alone."""
        assert self.types is not None
        ids, types = ids.cpu(), self.types.cpu()
        names = (*self.kind.beside.values(), _SECONDS)
        given = {name: x.cpu() for name, x in self.given.items() if name in names}
        if missing := [name for one, name in self.kind.beside.items() if self._lacks(one, name)]:
            raise ValueError(f"batch has images and no {missing[0]}, which the model's processor returns beside them")
        if isinstance(mask, torch.Tensor) and mask.shape == ids.shape and not (tokens := mask.bool().any(1)).all():
            raise ValueError(
                f"attention_mask has no token in row {int(tokens.int().argmin())}, and the positions of images begin "
                "with one; leave this row out"
            )
        packed = documents is not None
        if packed:
            starts = (documents[0].cpu() == 0).nonzero()[:, 0].tolist()
            lengths = [b - a for a, b in zip(starts, [*starts[1:], ids.shape[1]], strict=True)]
            ids, types = (nn.utils.rnn.pad_sequence([*x[0].split(lengths)], batch_first=True) for x in (ids, types))
            mask = torch.arange(ids.shape[1], device="cpu") < torch.tensor(lengths, device="cpu")[:, None]
        given["attention_mask"] = None if mask is None else mask.cpu().long()
        try:
            positions, _ = self.holder.get_rope_index(ids, mm_token_type_ids=types, **given)
        except (IndexError, RuntimeError, StopIteration, TypeError, ValueError) as error:
            raise ValueError(
                f"the positions of images cannot be found ({type(error).__name__}: {error}); {self.kind.types} and "
                f"{' and '.join(name for name in names if name in given)} must say the same images"
            ) from error
        return positions[:, mask.bool()][:, None] if packed and mask is not None else positions

    def _lacks(self, modality: str, name: str) -> bool:
        return self.kind.pixels[modality] in self.given and name not in self.given

    def whole(self, places: ImagePlaces) -> dict[str, torch.Tensor]:
        """The entries of images that all ranks must have alike."""
        found = dict(self.given)
        if self.types is not None and self.kind.types not in self.rest:
            found[self.kind.types] = self.types
        return found if places.positions is None else found | {_AXES: places.positions}

    def cut(self, places: ImagePlaces, part: dict[str, Any]) -> dict[str, Any]:
        """This rank's part from `shard_batch`, with its rows of the images."""
        sequences: CpBatch = part["cp_batch"]
        sequences.image_rows = {}
        for modality, numbers in places.numbers.items():
            mine = sequences.shard(numbers, -1).flatten()
            sequences.image_rows[modality] = mine[mine >= 0], int(numbers.max()) + 1
        sequences.both_ways = places.both_ways
        if places.positions is not None:
            positions = places.positions.to(part["input_ids"].device)
            part["position_ids"] = sequences.shard(positions.permute(1, 2, 0)).permute(2, 0, 1)
            sequences.longest = int(positions.max()) + 1
        used = {_SECONDS, _AXES, *([self.kind.types] if self.kind.types not in self.rest else [])}
        return {name: x for name, x in part.items() if name not in used}


@dataclass(frozen=True, eq=False)
class ImagePlaces:
    """Where a whole batch has its images.

    Attributes:
        numbers: of each modality the row of the vision part that each token takes, int64 [b, s]; -1 for none.
        positions: [3, b, s] where they are no positions of text.
        both_ways: runs of tokens that see each other both ways: sequence, first token, and the one behind the last.
    """

    numbers: dict[str, torch.Tensor]
    positions: torch.Tensor | None
    both_ways: tuple[tuple[int, int, int], ...]


def images_of(batch: Any, model: nn.Module | None, kept: Collection[str]) -> ImageBatch | None:
    """A batch's images, taken apart from its text; None where it is to be cut as text, or to be refused.

    Args:
        kept: entries that are cut as text.

    Raises:
        ValueError: images for no model, or for one that does not take them; entries of other shapes.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return None
    images = [name for name in _ENTRIES if batch.get(name) is not None]
    holder = None if model is None else next((m for m in model.modules() if _kind(m) is not None), None)
    if model is None or holder is None:
        if images:
            what = "give shard_batch the prepared model, model=model" if model is None else "its model has no images"
            raise ValueError(f"batch has {images[0]}, whose rows go where the model has image tokens; {what}")
        return None
    kind = _kind(holder)
    assert kind is not None
    known = {*kind.pixels.values(), *kind.beside.values(), *([_SECONDS] if kind.of_positions else [])}
    if odd := [name for name in images if name not in known]:
        raise ValueError(f"batch has {odd[0]}, which {type(holder).__name__} does not take")
    for modality, name in kind.beside.items():
        if name in images and (pixels := kind.pixels[modality]) not in images:
            raise ValueError(f"batch has {name} and no {pixels}; give both, or none of them")
    given = {name: batch[name] for name in images}
    if _SECONDS in given and not isinstance(given[_SECONDS], torch.Tensor):
        given[_SECONDS] = torch.tensor(given[_SECONDS], device="cpu")
    rest = {name: x for name, x in batch.items() if name not in {*_ENTRIES, *_TYPES} - {*kept}}
    ids, types = batch["input_ids"], batch.get(kind.types)
    shape = list(ids.shape) if isinstance(ids, torch.Tensor) else []
    if len(shape) != 2:
        raise ValueError(f"input_ids is {shape if shape else kind_of(ids)}; it must be a tensor [b, s]")
    if types is not None and (not isinstance(types, torch.Tensor) or list(types.shape) != shape):
        given_shape = list(types.shape) if isinstance(types, torch.Tensor) else kind_of(types)
        raise ValueError(f"{kind.types} has shape {given_shape}; it must be that of input_ids, {shape}")
    positions: Any = rest.get("position_ids")
    axes = positions.shape[0] if isinstance(positions, torch.Tensor) and positions.ndim == 3 else 0
    if not kind.of_positions or axes not in (3, 4) or list(positions.shape[1:]) != shape:
        return ImageBatch(holder, kind, given, rest, types, None)
    del rest["position_ids"]
    if axes == 4:  # transformers' form of a packed row: the documents, then the axes
        if shape[0] != 1:
            raise ValueError(
                f"position_ids has shape {list(positions.shape)}; four axes are of a packed row [4, 1, t], whose first "
                "says the documents: give rows with padding [3, b, s] and attention_mask"
            )
        rest["position_ids"] = positions[0]
    return ImageBatch(holder, kind, given, rest, types, positions[axes - 3 :])


def _runs(types: torch.Tensor, mask: Any, documents: Any) -> tuple[tuple[int, int, int], ...]:
    """The runs of image tokens in each row, or in each document of a packed one."""
    images = types == 1 if mask is None else (types == 1) & (mask == 1).to(types.device)
    rows = images.cpu().tolist()
    if documents is not None:
        starts = (documents[0] == 0).nonzero()[:, 0].tolist()
        rows = [rows[0][a:b] for a, b in zip(starts, [*starts[1:], len(rows[0])], strict=True)]
    found: list[tuple[int, int, int]] = []
    for number, row in enumerate(rows):
        at = 0
        for image, run in groupby(row):
            length = len(list(run))
            found += [(number, at, at + length)] if image else []
            at += length
    return tuple(found)


# ---- a call


def run_vision(holder: Any, sequences: CpBatch, given: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments, with the rows of this rank's image tokens in place of the images.

    Raises:
        TypeError, ValueError: images without their places, or of another number than the batch's tokens.
    """
    kind, name = _kind(holder), type(holder).__name__
    assert kind is not None
    if given.get(_GIVEN) is not None:
        raise NotImplementedError(
            f"{name} is given {_GIVEN}, of which a rank would take the first rows; give the images themselves"
        )
    if given.get(kind.types) is not None:
        raise TypeError(f"{name} is given {kind.types}, which shard_batch(batch, cp=..., model=model) has made use of")
    found: dict[str, Any] = {}
    given = dict(given)
    settings = {name: given.pop(name) for name in kind.settings if given.get(name) is not None}
    for modality, entry in kind.pixels.items():
        pixels, beside = given.pop(entry, None), kind.beside.get(modality)
        more = {} if beside is None else {beside: given.pop(beside, None)}
        places = sequences.image_rows or {}
        if (pixels is not None) != (modality in places):
            what = f"no {entry}, and cp_batch says" if pixels is None else f"{entry}, and cp_batch does not say"
            raise TypeError(
                f"{name} is given {what} which tokens are {modality}s: call it with all that "
                "shard_batch(batch, cp=..., model=model) returns for a batch with its images"
            )
        if pixels is None:
            continue
        more = {name: x for name, x in more.items() if x is not None}
        out = getattr(holder, f"get_{modality}_features")(pixels, **more, **settings, return_dict=True)
        mine, count = places[modality]
        found[modality] = _of_tokens(out, mine, count, f"{name}'s {modality}s")
    return given | ({_GIVEN: found} if found else {})


def _of_tokens(out: Any, mine: torch.Tensor, count: int, what: str) -> Any:
    """The vision part's outputs, with the rows of these tokens alone."""

    def take(rows: Any) -> Any:
        every = rows.flatten(0, -2) if isinstance(rows, torch.Tensor) else torch.cat([*rows])
        if len(every) != count:
            raise ValueError(f"{what} have {len(every)} rows, and the batch has {count} tokens for them")
        taken = every[mine.to(every.device)]
        return taken if isinstance(rows, torch.Tensor) else (taken,)

    out.pooler_output = take(out.pooler_output)
    if getattr(out, "deepstack_features", None) is not None:
        out.deepstack_features = [take(rows) for rows in out.deepstack_features]
    return out
