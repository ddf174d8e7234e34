"""Small images for a trial of a model's functions, in the form that its configuration permits.

Processors make this form of pictures. A model has no processor. So forms are tried one after another, each by the names
of the function's arguments and the sizes in the configuration, until the model's own function takes one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from cp_fast.integrations.hugging_face.image_models import Modality
from cp_fast.integrations.hugging_face.image_rows import fields_of

__all__ = ["ERRORS", "PICTURES", "Picture", "Trial", "placed", "run_function", "trial_of"]

ERRORS = (ArithmeticError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)  # and refusals
_ERRORS = (*ERRORS, AssertionError)
_GRIDS = ((1, 4, 4), (1, 4, 8))  # patches: time, height, width; of pictures that are narrow and wide
_CHANNELS = ("num_channels", "in_channels", "in_chans")
_SIDES = ("image_size", "resolution", "img_size")


@dataclass(frozen=True)
class Picture:
    """One image, video or sound of random values.

    Attributes:
        wide: whether it is the wide one, where a model has pictures of several sizes.
        seed: of its values.
    """

    wide: bool
    seed: int

    def draw(self, *shape: int) -> torch.Tensor:
        """Draw values of a shape, float32 on the CPU."""
        return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(self.seed), device="cpu")


PICTURES = (Picture(wide=False, seed=1), Picture(wide=True, seed=2))


@dataclass(frozen=True)
class Trial:
    """The form of pictures that a function takes.

    Attributes:
        modality: of the function.
        form: the number of the form.
        tokens: of a picture that is not wide, and of a wide one.
    """

    modality: Modality
    form: int
    tokens: tuple[int, int]

    def inputs(self, holder: nn.Module, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """The function's arguments for these pictures."""
        form = list(_forms(holder, self.modality))[self.form]
        return _collated(self.modality, [form(picture) for picture in pictures])


def trial_of(holder: Any, modality: Modality) -> Trial | str:
    """The first form that the function takes, alone and two at a time. A text: why it takes no form."""
    why = ""
    for number, form in enumerate(_forms(holder, modality)):
        pictures = Picture(False, 1), Picture(True, 2)
        try:
            each = [fields_of(_run(holder, modality, [form(one)]))[1] for one in pictures]
            fields, both = fields_of(_run(holder, modality, [form(one) for one in pictures]))
        except _ERRORS as error:
            why = why or f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        if sum(each) == both and min(each):
            return Trial(replace(modality, fields=fields), number, (each[0], each[1]))
        why = why or f"two pictures have {both} rows, and each of them alone {each[0]} and {each[1]}"
    return why or "its arguments are not known here"


def _run(holder: Any, modality: Modality, pictures: Sequence[Mapping[str, torch.Tensor]]) -> Any:
    return run_function(holder, modality, _collated(modality, pictures))


def run_function(holder: Any, modality: Modality, inputs: Mapping[str, torch.Tensor]) -> Any:
    """Call the model's function for a modality."""
    weight = next(holder.parameters())
    given = {
        name: x.to(weight.device, weight.dtype if x.is_floating_point() else x.dtype) for name, x in inputs.items()
    }
    return getattr(type(holder), modality.function)(holder, **given, return_dict=True)


def _collated(modality: Modality, pictures: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join pictures, in the order of their names in the function."""
    names = [name for name in modality.entries if name in pictures[0]]
    axis = 3 if "target_sizes" in " ".join(names) else 0
    found = {name: torch.cat([one[name] for one in pictures], axis if name == names[0] else 0) for name in names}
    for name in (one for one in names if "token_pooling" in one):  # by numbers of the patches of all crops
        patches = pictures[0][names[0]].shape[:2].numel()
        found[name] = torch.cat([one[name] + number * patches for number, one in enumerate(pictures)])
    return found


Form = Any  # a function of a picture: the entries of it


def _forms(holder: Any, modality: Modality) -> Iterator[Form]:
    """The forms that the names of the arguments permit, from the likeliest one on."""
    pixels, *beside = modality.entries
    said = " ".join(beside)
    config = _sight(holder, modality)
    video = modality.name == "video"
    if modality.name == "audio":
        yield from _sounds(holder, modality)
    elif "grid_thw" in said or "grid_hw" in said:
        yield from _patches(pixels, beside, config, video)
    elif "target_sizes" in said:
        yield lambda picture: _strip(pixels, beside[0], config, picture, video)
    elif "spatial_shapes" in said:
        yield lambda picture: _shapes(pixels, config, picture)
    elif "token_pooling" in said:
        yield lambda picture: _pooled(modality, config, picture)
    elif "pixel_attention_mask" in said:
        yield lambda picture: _tiles(pixels, "pixel_attention_mask", config, picture)
        yield lambda picture: _tiles(pixels, "", config, picture)
    if "image_sizes" in said:
        yield from _sizes(pixels, holder, config)
    yield from _squares(modality, holder, config, video)


def _sight(holder: Any, modality: Modality) -> Any:
    config = holder.config
    names = ("audio_config",) if modality.name == "audio" else ("vision_config", "vq_config")
    return next((found for name in names if (found := getattr(config, name, None)) is not None), config)


def _first(config: Any, names: Sequence[str], otherwise: Any) -> Any:
    found = next((x for name in names if (x := getattr(config, name, None)) is not None), otherwise)
    return found[0] if isinstance(found, list | tuple) else found


def _patches(pixels: str, beside: Sequence[str], config: Any, video: bool) -> Iterator[Form]:
    """A row for each patch, and the numbers of patches in time, height and width."""
    side = int(_first(config, ("patch_size",), 14))
    time, channels = int(_first(config, ("temporal_patch_size",), 1)), int(_first(config, _CHANNELS, 3))
    grid = next(name for name in beside if "grid" in name)
    flat, whole, timed = (channels * time * side**2,), (channels, side, side), (time, side, side, channels)
    shapes = [flat, whole, (channels * side**2,), timed, (channels * 2 * side**2,)]

    def form(picture: Picture, shape: Sequence[int], frames: int, merged: int) -> dict[str, torch.Tensor]:
        of = (frames, *_GRIDS[picture.wide][1:])
        axes = torch.tensor([of if "thw" in grid else of[1:]], device="cpu")
        found = {pixels: picture.draw(int(axes.prod()), *shape), grid: axes}
        more = {name: torch.tensor([merged], device="cpu") for name in beside if "merge_sizes" in name}
        return found | more

    merges = (1, 2) if any("merge_sizes" in name for name in beside) else (1,)
    for shape, merged in product(dict.fromkeys(shapes), merges):
        yield lambda picture, s=shape, m=merged: form(picture, s, 2 if video else 1, m)


def _strip(pixels: str, sizes: str, config: Any, picture: Picture, video: bool) -> dict[str, torch.Tensor]:
    """The patches of all images in one strip."""
    side, channels = int(_first(config, ("patch_size",), 14)), int(_first(config, _CHANNELS, 3))
    _, high, wide = _GRIDS[picture.wide]
    shape = (1, channels, side, high * wide * side)
    return {pixels: picture.draw(*shape), sizes: torch.tensor([[high, wide]], device="cpu")}


def _shapes(pixels: str, config: Any, picture: Picture) -> dict[str, torch.Tensor]:
    """Patches with padding behind them, and each image's height and width in patches."""
    side, channels = int(_first(config, ("patch_size",), 16)), int(_first(config, _CHANNELS, 3))
    _, high, wide = _GRIDS[picture.wide]
    most = _GRIDS[1][1] * _GRIDS[1][2]
    mask = (torch.arange(most, device="cpu") < high * wide).long()[None]
    values = picture.draw(1, most, channels * side**2)
    return {
        pixels: values * mask[..., None],
        "spatial_shapes": torch.tensor([[high, wide]], device="cpu"),
        "pixel_attention_mask": mask,
    }


def _pooled(modality: Modality, config: Any, picture: Picture) -> dict[str, torch.Tensor]:
    """Patches of one crop, and the patches that each token is made of."""
    pixels, pooling, grids = modality.entries
    side, image = int(_first(config, ("patch_size",), 14)), int(_first(config, _SIDES, 28))
    patches = (image // side) ** 2
    tokens = torch.arange(2 + 2 * picture.wide, device="cpu")[:, None] * 2 + torch.arange(2, device="cpu")
    count = len(tokens)
    grid = [1, count, 0, 0] if modality.name == "image" else [1, 1, count]
    values = picture.draw(1, patches, 3 * side**2)
    return {pixels: values, pooling: tokens % patches, grids: torch.tensor([grid], device="cpu")}


def _tiles(pixels: str, mask: str, config: Any, picture: Picture) -> dict[str, torch.Tensor]:
    """Tiles of a row of a batch, [1, tiles, channels, side, side]."""
    side = int(_first(config, _SIDES, 28))
    found = {pixels: picture.draw(1, 1, int(_first(config, _CHANNELS, 3)), side, side)}
    return found | ({mask: torch.ones(1, 1, dtype=torch.bool, device="cpu")} if mask else {})


def _sizes(pixels: str, holder: Any, config: Any) -> Iterator[Form]:
    """Images with their sizes: of any size, or in tiles of one size."""
    channels, side = int(_first(config, _CHANNELS, 3)), int(_first(config, _SIDES, 28))
    points = getattr(holder.config, "image_grid_pinpoints", None)
    if points:
        first = min(points, key=lambda point: point[0] * point[1])
        most = 1 + max((high // side) * (wide // side) for high, wide in points)

        def tiled(picture: Picture) -> dict[str, torch.Tensor]:
            size = [first[0] - 8 * picture.wide, first[1]]
            values = picture.draw(1, most, channels, side, side)
            return {pixels: values, "image_sizes": torch.tensor([size], device="cpu")}

        yield tiled
    patch = int(_first(config, ("patch_size",), 16)) * int(getattr(holder.config, "spatial_merge_size", 2))

    def sized(picture: Picture, unit: int) -> dict[str, torch.Tensor]:
        high, wide = 2 * unit, (1 + picture.wide) * unit
        values = picture.draw(1, channels, 2 * unit, 2 * unit)
        return {pixels: values, "image_sizes": torch.tensor([[high, wide]], device="cpu")}

    for unit in (patch, 8, 16):
        yield lambda picture, u=unit: sized(picture, u)


def _squares(modality: Modality, holder: Any, config: Any, video: bool) -> Iterator[Form]:
    """Images of one size, [1, channels, side, side]; videos with two frames."""
    channels = int(_first(config, _CHANNELS, 3))
    sides = {int(_first(config, _SIDES, 28)), *(int(_first(holder.config, [name], 28)) for name in _SIDES), 32}
    more = [name for name in modality.entries[1:] if "pixel_values" in name and "local" not in name]
    high = getattr(holder.config, "high_res_vision_config", config)

    def square(picture: Picture, side: int) -> dict[str, torch.Tensor]:
        frames = (2,) if video else ()
        found = {modality.entries[0]: picture.draw(1, *frames, channels, side, side)}
        return found | {name: picture.draw(1, channels, *2 * (int(_first(high, _SIDES, side)),)) for name in more}

    for side in sorted(sides, key=lambda side: side != _first(config, _SIDES, 28)):
        yield lambda picture, s=side: square(picture, s)


def _sounds(holder: Any, modality: Modality) -> Iterator[Form]:
    """Sounds of one length, with a mask of ones where the function reads one."""
    config = _sight(holder, modality)
    bins = int(_first(config, ("num_mel_bins", "input_size", "input_feat_size"), 80))
    mask = [name for name in modality.entries[1:] if "mask" in name]

    def sound(picture: Picture, shape: Sequence[int], length: int) -> dict[str, torch.Tensor]:
        found = {modality.entries[0]: picture.draw(1, *shape)}
        return found | {name: torch.ones(1, length, dtype=torch.long, device="cpu") for name in mask}

    window = getattr(config, "max_source_positions", None)  # Whisper's encoder takes windows of one length.
    for length in (*([2 * window] if isinstance(window, int) else []), 64, 200, 3200):
        for shape in ((bins, length), (length, bins), (length,), (1, length)):
            yield lambda picture, s=shape, n=length: sound(picture, s, n)


def placed(x: torch.Tensor, holder: nn.Module) -> torch.Tensor:
    """Bring a tensor to the device of a module's weights; one of floats has their dtype."""
    weight = next(holder.parameters())
    return x.to(weight.device, weight.dtype if x.is_floating_point() else x.dtype)
