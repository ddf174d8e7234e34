"""Models that read images, videos or sound besides text: which of a model's functions make rows of tokens of them.

Such a model has a function for each modality, as `get_image_features`. Its rows take the places of the tokens that
stand for images: the k-th row that of the k-th token. All else is the work of its text model. So one way serves all of
these models, and no family has its own code. `find_images` reads a model's class and configuration, the probe of
`image_probe` proves what it found, and `prepare` keeps that.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from cp_fast.integrations.hugging_face.module_states import put_state

__all__ = [
    "KINDS",
    "POSITIONS",
    "TEXT",
    "BothWaysRule",
    "ImageModel",
    "Modality",
    "Whole",
    "arguments_of",
    "find_images",
    "mark_whole",
    "parts_of",
]

TEXT = ("language_model", "text_model")  # The text model has one of these names.
KINDS = ("image", "video", "audio")
_TYPES = ("mm_token_type_ids", "token_type_ids")  # They say which tokens are images.
POSITIONS = "compute_3d_position_ids"  # It calls get_rope_index.


@dataclass(frozen=True)
class _Exceptions:
    """Where a class is not as its names say.

    Args:
        tokens: the id of the tokens of a modality, as the name of an attribute of its configuration or of itself.
        refused: modalities that are not taken, and why.
    """

    tokens: dict[str, str] = field(default_factory=dict[str, str])
    refused: dict[str, str] = field(default_factory=dict[str, str])


_FRAMES = _Exceptions(tokens={"video": "image_token_id"})  # Each frame of a video is an image between its tokens.
_WORDS = _Exceptions(tokens={"image": "vocabulary_mapping.image_token_id"})
_PRUNED = "tokens of videos are left out of a row by what they contain, and a slice has other ones"
EXCEPTIONS: dict[str, _Exceptions] = {  # by the name of the class that has the functions
    **dict.fromkeys(("Glm4vModel", "Glm4vMoeModel", "Glm46VModel", "GlmOcrModel"), _FRAMES),
    **dict.fromkeys(("ChameleonModel", "Emu3Model"), _WORDS),
    "Glm5NextModel": _Exceptions(refused={"video": "it counts the ends of videos before each token of a slice"}),
    "NemotronH_Omni_Reasoning_V3": _Exceptions({"video": "image_token_id"}, {"video": _PRUNED}),
}


@dataclass(frozen=True)
class Modality:
    """A modality that a model reads, and the function that makes its rows.

    Attributes:
        name: "image", "video" or "audio".
        function: the name of the holder's function.
        entries: of a batch, that the function reads; the first one has the pixels.
        token: the id of the tokens whose places the rows take.
        fields: the names of the function's outputs with a row for each token; `prepare` sees them.
        shared: the ranks share its pictures out.
        frames: they share out the frames of a video too, which do not see each other.
    """

    name: str
    function: str
    entries: tuple[str, ...]
    token: int
    fields: tuple[str, ...] = ("pooler_output",)
    shared: bool = False
    frames: bool = False


@dataclass(frozen=True)
class BothWaysRule:
    """Which tokens see each other both ways in causal masks.

    Attributes:
        value: of the entry of types, that these tokens have.
        joined: all of them in a row see each other; if not, those of one run of neighbours.
        windowed: a layer's window hides them too.
    """

    value: int
    joined: bool
    windowed: bool


@dataclass(frozen=True)
class ImageModel:
    """How a model reads images.

    Attributes:
        where: the name in the model of the module with the functions, its holder.
        modalities: those that are taken.
        refused: those that are not taken, and why.
        types: the entry of a batch that says which tokens are images; "" where the model reads none.
        axes: of its positions, which its own function finds; 0: they are those of text.
        both_ways: the rule of its masks; None: they are those of text.
        positions: the entries that its function of positions reads.
        of_tokens: entries with a number for each token, which are cut as ids are.
        rows_apart: the positions of a row's images do not depend on the rows before it.
    """

    where: str
    modalities: tuple[Modality, ...]
    refused: dict[str, str]
    types: str
    axes: int = 0
    both_ways: BothWaysRule | None = None
    positions: tuple[str, ...] = ()
    of_tokens: tuple[str, ...] = ()
    rows_apart: bool = True

    def within(self, where: str) -> ImageModel | None:
        """The same as a module of the model has it. None: the holder is not in that module."""
        if not where or self.where == where:
            return replace(self, where="" if where else self.where)
        inside = self.where.startswith(f"{where}.")
        return replace(self, where=self.where.removeprefix(f"{where}.")) if inside else None

    def having(self, modality: Modality) -> ImageModel:
        """The same with a modality in the place of the one of its name."""
        return replace(
            self, modalities=tuple(modality if one.name == modality.name else one for one in self.modalities)
        )

    def without(self, name: str, why: str) -> ImageModel:
        """The same without a modality."""
        left = tuple(one for one in self.modalities if one.name != name)
        return replace(self, modalities=left, refused=self.refused | {name: why})

    @property
    def of_positions(self) -> tuple[str, ...]:
        """The arguments that change positions alone: `shard_batch` has found these by it."""
        read = {name for one in self.modalities for name in one.entries}
        return tuple(name for name in self.positions if name not in read)

    @property
    def entries(self) -> frozenset[str]:
        """All entries of a batch that belong to its images."""
        return frozenset(name for one in self.modalities for name in one.entries) | {*self.positions}


def find_images(model: nn.Module) -> ImageModel | None:
    """How a model reads images, by its class and its configuration. None: it reads text alone, or has no functions
    that make rows of tokens of images.
    """
    where, holder = next(((w, m) for w, m in model.named_modules() if _functions(m)), ("", None))
    if holder is None:
        return None
    exceptions = EXCEPTIONS.get(type(holder).__name__, _Exceptions())
    forward, found, refused = _parameters(type(holder).forward), list[Modality](), dict(exceptions.refused)
    positions = _parameters(getattr(type(holder), POSITIONS, None))
    for name in _functions(holder):
        if name in refused:
            continue
        function = f"get_{name}_features"
        entries = [one for one in _parameters(getattr(type(holder), function)) if one in forward]
        token = _token(holder, exceptions.tokens.get(name, f"{name}_token_id"))
        if token is None:
            refused[name] = f"its configuration has no {name}_token_id"
            continue
        found.append(Modality(name, function, tuple(one for one in entries if one not in SETTINGS), token))
    types = next((one for one in _TYPES if one in positions), next((one for one in _TYPES if one in forward), ""))
    known = {*_TYPES, "input_ids", "inputs_embeds", "attention_mask", "cache", "past_key_values"}
    more = tuple(one for one in positions if one not in known)
    cut = tuple(one for one in forward if one.endswith("token_type_ids") and one != types)
    axes = 3 if positions else 0
    return ImageModel(where, tuple(found), refused, types, axes, positions=more, of_tokens=cut)


SETTINGS = (  # numbers and words, no entries of a batch
    *("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio", "interpolate_pos_encoding"),
    "downsample_mode",
)


def _functions(module: nn.Module) -> list[str]:
    """The modalities whose functions a module's forward calls, and which its configuration has."""
    forward = inspect.unwrap(type(module).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    called = [name for name in KINDS if f"get_{name}_features" in names and not _is_absent(module, name)]
    return called if hasattr(type(module), "get_input_embeddings") else []


def _is_absent(module: nn.Module, modality: str) -> bool:
    """Whether a module's configuration leaves a modality out."""
    entries = ("audio_config",) if modality == "audio" else ("vision_config", "vq_config")
    config: Any = getattr(module, "config", None)
    found = [getattr(config, entry) for entry in entries if hasattr(config, entry)]
    return bool(found) and all(one is None for one in found)


def _parameters(function: Any) -> list[str]:
    if function is None:
        return []
    kinds = inspect.signature(function).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in kinds if one.kind in named and one.name != "self"]


def _token(holder: Any, name: str) -> int | None:
    for place in (holder.config, holder):
        for part in name.split("."):
            place = getattr(place, part, None)
        if isinstance(place, int):
            return place
    return None


def arguments_of(model: nn.Module, images: ImageModel) -> frozenset[str]:
    """The arguments of a call that belong to images, or have a number for each token."""
    holder = model.get_submodule(images.where)
    found = {one for part in images.modalities for one in _parameters(getattr(type(holder), part.function))}
    return frozenset({*found, *images.of_tokens} - {*images.of_positions})


def parts_of(model: nn.Module, images: ImageModel) -> tuple[str, ...]:
    """The names of a model's modules for images, outside of its text model."""
    holder = model.get_submodule(images.where)
    children = dict(holder.named_children())
    if any(name in children for name in TEXT):
        names = [name for name in children if name not in TEXT and name != "lm_head"]
    else:  # The holder is the text model.
        names = [name for name, one in children.items() if hasattr(one, "set_attn_implementation")]
    return tuple(f"{images.where}.{name}" if images.where else name for name in names)


class Whole:
    """The state of a module that runs on whole images."""


def mark_whole(model: nn.Module, parts: tuple[str, ...]) -> None:
    """Mark what runs on whole images, by the names of these parts of the model."""
    for part in parts:
        for module in model.get_submodule(part).modules():
            put_state(module, Whole())
