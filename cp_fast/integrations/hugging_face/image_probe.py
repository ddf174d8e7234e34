"""Run a prepared model of images on a few tokens of two images, whole and as a slice. If the slice's outputs and
gradients are those of the whole, then a rank may take the rows of its tokens.

The functions of images run once, on the pictures of `image_trials`. Their rows are thinned out to a few a picture: what
is looked at is how the model goes on with them. The whole has what a user's batch has besides, such as the types of
tokens, so that masks and positions which depend on images are seen. Masks are compared with the rules that are known
here; positions with those that `shard_batch` finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from cp_fast.integrations.hugging_face.image_calls import Share, end_call, put_around_functions, show_share
from cp_fast.integrations.hugging_face.image_masks import WINDOW, MaskProbe
from cp_fast.integrations.hugging_face.image_models import KINDS, ImageModel, Modality
from cp_fast.integrations.hugging_face.image_positions import axes_of_pictures, rows_apart
from cp_fast.integrations.hugging_face.image_ranks import pieces_of
from cp_fast.integrations.hugging_face.image_rows import rows_in, with_rows
from cp_fast.integrations.hugging_face.image_trials import ERRORS, PICTURES, Trial, placed, run_function, trial_of
from cp_fast.integrations.hugging_face.slice_probe import (
    Probe,
    Seen,
    TrialRows,
    outputs_of,
    slice_of,
    trial_rows,
)

__all__ = ["prove_images"]

_RUNS = ((0, 1, 4), (0, 6, 9), (1, 2, 4), (1, 7, 8))  # of images: row, first token behind the special ones, and end
_MOST = 0.85  # of the rows of a few tokens
_LARGE = 1e4  # no number of a trial, but a mask


def prove_images(model: nn.Module, holder: Any, images: ImageModel, seen: Seen, shared: bool) -> ImageModel:
    """Prove how a model reads images: its modalities, its positions, and the rule of its masks.

    Args:
        model: with its attention switched to cp_fast's, as for `look_over`.
        holder: the module in it with the functions of images.
        seen: by `look_over`.
        shared: whether the ranks are to share the pictures out.

    Raises:
        NotImplementedError: nothing is proved; the error says why.
    """
    trials: dict[str, Trial] = {}
    for modality in images.modalities:
        found = trial_of(holder, modality)
        if isinstance(found, Trial):
            trials[modality.name] = found
        else:
            images = images.without(modality.name, f"prepare could not try {modality.function}: {found}")
    images = replace(images, modalities=tuple(trials[one.name].modality for one in images.modalities))
    images = _proved_each(model, holder, images, trials, seen)
    images = _proved_together(model, holder, images, trials, seen)
    images = _proved_shared(holder, images, trials) if shared else images
    if not images.modalities:
        why = "; ".join(f"{name}s: {why}" for name, why in images.refused.items())
        raise NotImplementedError(
            f"{type(model).__name__} reads images, in a way that cp_fast could not prove right over ranks: {why}"
        )
    put_around_functions(holder, images)
    return images


def _proved_each(model: nn.Module, holder: Any, images: ImageModel, trials: dict[str, Trial], seen: Seen) -> ImageModel:
    """Prove each modality alone, and leave out those that cannot be proved."""
    for modality in images.modalities:
        try:
            images = _proved(model, holder, images, (trials[modality.name],), seen)
        except NotImplementedError as error:  # It may take its rows elsewhere.
            other = replace(modality, fields=("last_hidden_state",))
            trials[modality.name] = replace(trials[modality.name], modality=other)
            try:
                images = _proved(model, holder, images.having(other), (trials[modality.name],), seen)
            except ERRORS:
                images = images.without(modality.name, _said(error))
        except ERRORS as error:
            images = images.without(modality.name, _said(error))
    return images


def _proved_together(
    model: nn.Module, holder: Any, images: ImageModel, trials: dict[str, Trial], seen: Seen
) -> ImageModel:
    """Prove all modalities in one batch. Leave out the last one until that can be proved."""
    while len(images.modalities) > 1 and len({one.token for one in images.modalities}) > 1:
        try:
            return _proved(model, holder, images, tuple(trials[one.name] for one in images.modalities), seen)
        except ERRORS as error:
            images = images.without(images.modalities[-1].name, f"beside the others: {_said(error)}")
    return images


def _proved_shared(holder: Any, images: ImageModel, trials: dict[str, Trial]) -> ImageModel:
    """Prove that the ranks can share the pictures of each modality out, and leave out those for which they cannot."""
    for modality in images.modalities:
        found = _shared(holder, trials[modality.name], modality)
        if isinstance(found, Modality):
            images = images.having(found)
        else:
            images = images.without(
                modality.name, f'images="ranks" cannot share them out: {found}; take images="whole"'
            )
    return images


def _shared(holder: Any, trial: Trial, modality: Modality) -> Modality | str:
    """The modality as the ranks share it out. A text: why they cannot."""
    given = {name: placed(x, holder) for name, x in trial.inputs(holder, PICTURES).items()}
    for frames in (True, False):
        pieces = pieces_of(modality, given, frames)
        if isinstance(pieces, str):
            return pieces
        if len(pieces.costs) < len(PICTURES):
            return f"two pictures are {len(pieces.costs)} piece"
        try:
            parts = [run_function(holder, modality, pieces.part(n, n + 1)) for n in range(len(pieces.costs))]
            rows = [_first_rows(part, modality) for part in parts]
            whole = _first_rows(run_function(holder, modality, given), modality)
            if torch.cat(rows).shape == whole.shape and _alike(torch.cat(rows), whole):
                return replace(modality, shared=True, frames=frames)
        except ERRORS:
            continue
    return "a picture alone has other rows than beside another one"


def _first_rows(out: Any, modality: Modality) -> torch.Tensor:
    found: list[torch.Tensor] = []
    with_rows(out, rows_in(out, modality.fields), lambda rows: found.append(rows) or rows, modality.fields)
    return torch.cat(found, -1)


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {text}"


def _proved(model: nn.Module, holder: Any, images: ImageModel, trials: tuple[Trial, ...], seen: Seen) -> ImageModel:
    """Prove some modalities together, and return what the model is known to do with them."""
    put_around_functions(holder, images)
    if images.axes:
        axes, apart = axes_of_pictures(holder, images, trials), rows_apart(holder, images, trials)
        images = replace(images, axes=max(images.axes, axes), rows_apart=images.rows_apart and apart)
    batch = _batch_of(model, holder, images, trials, seen)
    probe = MaskProbe()
    given = {name: x for name, x in seen.arguments.items() if name not in ("cp_batch", "position_ids")}
    whole, whole_grads = batch.run(model, holder, {**given, **batch.types, **batch.of_tokens, "cp_batch": probe}, probe)
    rule = probe.rule_of(next(iter(batch.types.values()), None), images.both_ways)
    for mixed in (False, True) if not seen.by_row else (False,):
        part, grads = batch.run_slice(model, holder, {**given, "cp_batch": MaskProbe()}, mixed)
        if odd := batch.other_rows(whole, part, mixed):
            raise NotImplementedError(f"a slice of tokens with their images has other {odd} than the whole")
        expected = whole_grads(mixed)
        if not all(_alike(x, y) for x, y in zip(expected, grads, strict=True)):
            raise NotImplementedError("a slice of tokens gives the rows of images other gradients than the whole")
    return replace(images, both_ways=rule)


# ---- rows of images in a few tokens


class _TrialShare(Share):
    """The rows of some tokens, of outputs that were computed before; each is a leaf of gradients."""

    def __init__(self, batch: _Batch, numbers: Mapping[str, torch.Tensor]) -> None:
        self.batch, self.leaves = batch, list[torch.Tensor]()
        super().__init__({name: (x[x >= 0], batch.counts[name]) for name, x in numbers.items()})

    def of(self, holder: Any, modality: Modality, by_place: tuple[Any, ...], given: dict[str, Any]) -> Any:
        mine, count = self.rows[modality.name]

        def take(every: torch.Tensor) -> torch.Tensor:
            self.leaves.append(every.detach().clone().requires_grad_())
            return self.leaves[-1][mine.to(every.device)]

        return with_rows(self.batch.outputs[modality.name], count, take, modality.fields)


@dataclass(frozen=True, eq=False)
class _Batch:
    """Two rows of tokens, some of them of images.

    Attributes:
        numbers: of each modality the row of its outputs that a token takes, [2, t]; -1 for none.
        counts: how many rows the outputs have.
        inputs: the arguments of the functions.
        types: the entry that says which tokens are images.
        of_tokens: further entries with a number for each token.
        positions: [2, t], or [axes, 2, t].
        weights: of the outputs, in the sum whose gradients are compared.
    """

    rows: TrialRows
    numbers: dict[str, torch.Tensor]
    counts: dict[str, int]
    outputs: dict[str, Any]
    inputs: dict[str, torch.Tensor]
    types: dict[str, torch.Tensor]
    of_tokens: dict[str, torch.Tensor]
    positions: torch.Tensor

    def run(
        self, model: nn.Module, holder: nn.Module, given: dict[str, Any], probe: MaskProbe
    ) -> tuple[dict[str, torch.Tensor], Callable[[bool], list[torch.Tensor]]]:
        """The outputs of the whole, and a function that gives the gradients of a slice of them."""
        share = _TrialShare(self, self.numbers)
        arguments = {"input_ids": self.rows.ids, "position_ids": self.positions, **given}
        with _narrow_windows(model):
            found = self._outputs(model, holder, arguments, share, probe)

        def grads(mixed: bool) -> list[torch.Tensor]:
            tokens = self.rows.ids.shape[1]
            axes = {name: list(x.shape).index(tokens) for name, x in found.items() if tokens in x.shape}
            return _grads({n: slice_of(found[n], self.rows, axis, mixed) for n, axis in axes.items()}, share.leaves)

        return found, grads

    def run_slice(
        self, model: nn.Module, holder: nn.Module, given: dict[str, Any], mixed: bool
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """The outputs and the gradients of a slice."""
        share = _TrialShare(self, {name: slice_of(x, self.rows, 1, mixed) for name, x in self.numbers.items()})
        named = {"input_ids": self.rows.ids, **self.of_tokens}
        arguments = {name: slice_of(x, self.rows, 1, mixed) for name, x in named.items()}
        arguments["position_ids"] = slice_of(self.positions, self.rows, self.positions.dim() - 1, mixed)
        found = self._outputs(model, holder, {**arguments, **given}, share, given["cp_batch"])
        return found, _grads(found, share.leaves)

    def other_rows(self, whole: Mapping[str, torch.Tensor], part: Mapping[str, torch.Tensor], mixed: bool) -> str:
        """The first output whose rows are others in a slice: those of all tokens, or of images; "": none."""
        slices = (slice_of(x, self.rows, 1, mixed) >= 0 for x in self.numbers.values())
        of_images = torch.stack(list(slices)).any(0)
        for name, x in whole.items():
            if x.shape[:2] != self.rows.ids.shape:
                continue
            mine, theirs = slice_of(x, self.rows, 1, mixed), part.get(name)
            if theirs is None or mine.shape != theirs.shape:
                return name
            for there in (of_images, torch.ones_like(of_images)):
                if not _alike(mine[there].flatten(1), theirs[there].flatten(1)):
                    return name
        return "" if any(x.shape[:2] == self.rows.ids.shape for x in whole.values()) else "outputs"

    def _outputs(
        self, model: nn.Module, holder: nn.Module, arguments: dict[str, Any], share: Share, probe: Probe
    ) -> dict[str, torch.Tensor]:
        show_share(holder, share)
        try:
            with torch.enable_grad(), probe.running():
                return outputs_of(model(**arguments, **self.inputs))
        finally:
            end_call(holder)


def _alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether all rows [n, d] but a few are equal up to rounding: a rounded router may choose another expert."""
    there = (x != 0).any(-1) | (y != 0).any(-1)
    tolerance = 1e-3 if torch.finfo(x.dtype).bits >= 32 else 5e-2
    x, y = (torch.where(z.abs() < _LARGE, z, 0)[there].double() for z in (x, y))  # A model may mask some logits.
    error = (x - y).abs().amax(-1) / x.abs().amax(-1).clamp(min=1e-9)
    return bool((error <= tolerance).double().mean() >= _MOST) if len(error) else True


def _grads(outputs: Mapping[str, torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of rows of images, of a weighted sum of outputs."""
    total = torch.zeros((), device=leaves[0].device)
    for _, x in sorted(outputs.items()):
        if x.requires_grad:
            generator = torch.Generator("cpu").manual_seed(x.dim())
            total = total + (x.float() * torch.randn(x.shape, generator=generator, device="cpu").to(x.device)).sum()
    if not total.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if x is None else x for leaf, x in zip(leaves, found, strict=True)]


def _batch_of(model: nn.Module, holder: Any, images: ImageModel, trials: tuple[Trial, ...], seen: Seen) -> _Batch:
    device = next(model.parameters()).device
    rows = trial_rows(model, device)
    tokens = [one.token for one in images.modalities] + [one.modality.token for one in trials]
    plain = int(rows.ids[0, rows.places[-1]])
    ids = torch.where(torch.isin(rows.ids, torch.tensor(tokens, device=device)), plain, rows.ids)
    first = int(rows.places[0]) - 1
    numbers = {one.modality.name: torch.full_like(ids, -1) for one in trials}
    kinds = torch.zeros_like(ids)
    for number, (row, start, stop) in enumerate(_RUNS):
        modality = trials[number % len(trials)].modality
        ids[row, first + start : first + stop] = modality.token
        numbers[modality.name][row, first + start : first + stop] = 0
        kinds[row, first + start : first + stop] = 1 + KINDS.index(modality.name)
    inputs: dict[str, torch.Tensor] = {}
    outputs, counts = dict[str, Any](), dict[str, int]()
    for trial in trials:
        name, given = trial.modality.name, trial.inputs(holder, PICTURES)
        inputs |= {entry: placed(x, holder) for entry, x in given.items()}
        outputs[name], counts[name] = run_function(holder, trial.modality, given), sum(trial.tokens)
        there = numbers[name] >= 0
        order = torch.arange(int(there.sum()), device=device)
        numbers[name][there] = order * counts[name] // len(order)
    positions = seen.numbering.of(ids)
    if images.axes:
        positions = torch.stack([positions + axis * (kinds > 0) for axis in range(images.axes)])
    types = {images.types: kinds} if images.types else {}
    of_tokens = {name: (kinds > 0).to(kinds.dtype) for name in images.of_tokens}
    shown = TrialRows(ids, rows.places, rows.poisoned)
    return _Batch(shown, numbers, counts, outputs, inputs, types, of_tokens, positions)


@contextmanager
def _narrow_windows(model: nn.Module) -> Iterator[None]:
    """The model with windows that are narrower than a few tokens, where it has any."""
    config: Any = cast(Any, model).config.get_text_config()
    before = getattr(config, "sliding_window", None)
    if not isinstance(before, int) or before <= WINDOW:
        yield
        return
    config.sliding_window = WINDOW
    try:
        yield
    finally:
        config.sliding_window = before
