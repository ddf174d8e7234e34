"""Run a prepared model of images on a few tokens of two images, whole and as a slice. If the slice's outputs and
gradients are those of the whole, then a rank may take the rows of its tokens.

The functions of images run once, on the pictures of `image_trials`. Their rows are thinned out to a few a picture: what
is looked at is how the model goes on with them. The whole has what a user's batch has besides, such as the types of
tokens, so that masks and positions which depend on images are seen. Masks are compared with the rules that are known
here; positions with those that `shard_batch` finds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import torch
from torch import nn

from cp_fast.integrations.hugging_face.built_masks import Said
from cp_fast.integrations.hugging_face.image_batches import blocks_of, positions_of
from cp_fast.integrations.hugging_face.image_calls import Share, end_call, put_around_functions, show_share
from cp_fast.integrations.hugging_face.image_models import KINDS, TEXT, BothWaysRule, ImageModel, Modality
from cp_fast.integrations.hugging_face.image_ranks import pieces_of
from cp_fast.integrations.hugging_face.image_rows import rows_in, with_rows
from cp_fast.integrations.hugging_face.image_trials import Picture, Trial, run_function, trial_of
from cp_fast.integrations.hugging_face.slice_probe import (
    Probe,
    Seen,
    TrialRows,
    outputs_of,
    slice_of,
    trial_rows,
)

__all__ = ["frames_apart", "prove_images", "seconds_of"]

_RUNS = ((0, 1, 4), (0, 6, 9), (1, 2, 4), (1, 7, 8))  # of images: row, first token behind the special ones, and end
_PICTURES = (Picture(wide=False, seed=1), Picture(wide=True, seed=2))
_MOST = 0.85  # of the rows of a few tokens
_LARGE = 1e4  # no number of a trial, but a mask
_WINDOW = 3  # in place of a layer's own, which is wider than all tokens here
_ERRORS = (ArithmeticError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)  # and refusals
_RULES = (None, *(BothWaysRule(*one) for one in product((1, 0), (False, True), (True, False))))


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
    for modality in images.modalities:
        try:
            images = _proved(model, holder, images, (trials[modality.name],), seen)
        except NotImplementedError as error:  # It may take its rows elsewhere.
            other = replace(modality, fields=("last_hidden_state",))
            trials[modality.name] = replace(trials[modality.name], modality=other)
            try:
                images = _proved(model, holder, images.having(other), (trials[modality.name],), seen)
            except _ERRORS:
                images = images.without(modality.name, _said(error))
        except _ERRORS as error:
            images = images.without(modality.name, _said(error))
    while len(images.modalities) > 1 and len({one.token for one in images.modalities}) > 1:
        try:
            images = _proved(model, holder, images, tuple(trials[one.name] for one in images.modalities), seen)
            break
        except _ERRORS as error:
            images = images.without(images.modalities[-1].name, f"beside the others: {_said(error)}")
    for modality in images.modalities if shared else ():
        found = _shared(holder, trials[modality.name], modality)
        if isinstance(found, Modality):
            images = images.having(found)
        else:
            images = images.without(
                modality.name, f'images="ranks" cannot share them out: {found}; take images="whole"'
            )
    if not images.modalities:
        why = "; ".join(f"{name}s: {why}" for name, why in images.refused.items())
        raise NotImplementedError(
            f"{type(model).__name__} reads images, in a way that cp_fast could not prove right over ranks: {why}"
        )
    put_around_functions(holder, images)
    return images


def _shared(holder: Any, trial: Trial, modality: Modality) -> Modality | str:
    """The modality as the ranks share it out. A text: why they cannot."""
    given = {name: _placed(x, holder) for name, x in trial.inputs(holder, _PICTURES).items()}
    for frames in (True, False):
        pieces = pieces_of(modality, given, frames)
        if isinstance(pieces, str):
            return pieces
        if len(pieces.costs) < len(_PICTURES):
            return f"two pictures are {len(pieces.costs)} piece"
        try:
            parts = [run_function(holder, modality, pieces.part(n, n + 1)) for n in range(len(pieces.costs))]
            rows = [_first_rows(part, modality) for part in parts]
            whole = _first_rows(run_function(holder, modality, given), modality)
            if torch.cat(rows).shape == whole.shape and _alike(torch.cat(rows), whole):
                return replace(modality, shared=True, frames=frames)
        except _ERRORS:
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
        axes, apart = _axes(holder, images, trials), _rows_apart(holder, images, trials)
        images = replace(images, axes=max(images.axes, axes), rows_apart=images.rows_apart and apart)
    batch = _batch_of(model, holder, images, trials, seen)
    probe = ImageProbe()
    given = {name: x for name, x in seen.arguments.items() if name not in ("cp_batch", "position_ids")}
    whole, whole_grads = batch.run(model, holder, {**given, **batch.types, **batch.of_tokens, "cp_batch": probe}, probe)
    rule = probe.rule_of(batch, images.both_ways)
    for mixed in (False, True) if not seen.by_row else (False,):
        part, grads = batch.run_slice(model, holder, {**given, "cp_batch": ImageProbe()}, mixed)
        if odd := batch.other_rows(whole, part, mixed):
            raise NotImplementedError(f"a slice of tokens with their images has other {odd} than the whole")
        expected = whole_grads(mixed)
        if not all(_alike(x, y) for x, y in zip(expected, grads, strict=True)):
            raise NotImplementedError("a slice of tokens gives the rows of images other gradients than the whole")
    return replace(images, both_ways=rule)


# ---- positions


class _Stopped(Exception):
    """The text model was called; it need not run."""


def _axes(holder: Any, images: ImageModel, trials: tuple[Trial, ...]) -> int:
    """The axes of the positions that a model gives to whole pictures; they are those that `positions_of` finds.

    Raises:
        NotImplementedError: they are others.
    """
    text = next((one for name, one in holder.named_children() if name in TEXT), None)
    if text is None:
        raise NotImplementedError("its positions are its own, and it has no text model that takes them")
    return _axes_of(holder, text, images, trials, frames=2 if frames_apart(holder, images, trials) else 1)


def _rows_apart(holder: Any, images: ImageModel, trials: tuple[Trial, ...]) -> bool:
    """Whether a row with pictures has the same positions behind another row with pictures."""
    frames = 2 if frames_apart(holder, images, trials) else 1
    ids, types, _ = picture_tokens(holder, images, trials, frames)
    inputs: dict[str, torch.Tensor] = {}
    for trial in trials:
        inputs |= trial.inputs(holder, _PICTURES * 2) | seconds_of(images, trial, 2 * len(_PICTURES))
    rows, kinds = torch.tensor([ids] * 2), torch.tensor([types] * 2)
    found = positions_of(holder, images, rows, kinds, torch.ones_like(rows), inputs)
    return found is None or torch.equal(found[:, 0], found[:, 1])


def frames_apart(holder: Any, images: ImageModel, trials: tuple[Trial, ...]) -> bool:
    """Whether a model's positions want the frames of a video apart, as where their times stand between them."""
    ids, types, inputs = picture_tokens(holder, images, trials, frames=1)
    try:
        positions_of(holder, images, torch.tensor([ids]), torch.tensor([types]), torch.ones(1, len(ids)), inputs)
    except _ERRORS:
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
            holder(**given, **more, **{n: _placed(x, holder) for n, x in inputs.items()}, use_cache=False)
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
        inputs |= trial.inputs(holder, _PICTURES) | seconds_of(images, trial, len(_PICTURES))
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


def _placed(x: torch.Tensor, holder: nn.Module) -> torch.Tensor:
    weight = next(holder.parameters())
    return x.to(weight.device, weight.dtype if x.is_floating_point() else x.dtype)


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
    """Two rows of tokens, some of which stand for images.

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
        self, model: nn.Module, holder: nn.Module, given: dict[str, Any], probe: ImageProbe
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
    plain = int(rows.ids[0, rows.kept[-1]])
    ids = torch.where(torch.isin(rows.ids, torch.tensor(tokens, device=device)), plain, rows.ids)
    first = int(rows.kept[0]) - 1
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
        name, given = trial.modality.name, trial.inputs(holder, _PICTURES)
        inputs |= {entry: _placed(x, holder) for entry, x in given.items()}
        outputs[name], counts[name] = run_function(holder, trial.modality, given), sum(trial.tokens)
        there = numbers[name] >= 0
        order = torch.arange(int(there.sum()), device=device)
        numbers[name][there] = order * counts[name] // len(order)
    positions = seen.numbering.of(ids)
    if images.axes:
        positions = torch.stack([positions + axis * (kinds > 0) for axis in range(images.axes)])
    types = {images.types: kinds} if images.types else {}
    of_tokens = {name: (kinds > 0).to(kinds.dtype) for name in images.of_tokens}
    kept = TrialRows(ids, rows.kept, rows.poisoned)
    return _Batch(kept, numbers, counts, outputs, inputs, types, of_tokens, positions)


@contextmanager
def _narrow_windows(model: nn.Module) -> Iterator[None]:
    """The model with windows that are narrower than a few tokens, where it has any."""
    config: Any = cast(Any, model).config.get_text_config()
    before = getattr(config, "sliding_window", None)
    if not isinstance(before, int) or before <= _WINDOW:
        yield
        return
    config.sliding_window = _WINDOW
    try:
        yield
    finally:
        config.sliding_window = before


# ---- masks


class ImageProbe(Probe):
    """A probe that evaluates the masks that a model builds, pair by pair."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[torch.Tensor] = []
        self.of_layers: list[tuple[Said, int]] = []  # of each call of attention, and the number of its table; -1: none

    def whole_mask(self, mask_function: Callable[..., Any], given: Mapping[str, Any]) -> torch.Tensor:
        sizes = [int(given[name]) for name in ("batch_size", "q_length", "kv_length")]
        device = given.get("device")
        row, query, key = (torch.arange(n, device=device) for n in sizes)
        zero = torch.zeros((), dtype=torch.long, device=device)
        seen = mask_function(row[:, None, None], zero, query[None, :, None], key[None, None, :])
        self.tables.append(torch.as_tensor(seen).expand(sizes).cpu())
        number = float(len(self.tables))
        return torch.full((sizes[0], 1, *sizes[1:]), number, dtype=given.get("dtype", torch.float32), device=device)

    def look_at_mask(self, module: nn.Module, said: Said, mask: Any) -> None:
        self.of_layers.append((said, -1 if mask is None else round(float(mask.flatten()[0])) - 1))

    def rule_of(self, batch: _Batch, known: BothWaysRule | None) -> BothWaysRule | None:
        """The rule that all masks follow; None: they are those of text.

        Args:
            known: the rule of modalities that were looked at before, which is tried first.

        Raises:
            NotImplementedError: none is known.
        """
        types = next(iter(batch.types.values()), None)
        for rule in (known, *_RULES) if types is not None else (None,):
            layers = [(said, self.tables[table]) for said, table in self.of_layers if table >= 0]
            if all(_agrees(rule, types, said, table) for said, table in layers):
                return rule
        raise NotImplementedError("tokens of images see each other by a mask that cp_fast does not know")


def _agrees(rule: BothWaysRule | None, types: torch.Tensor | None, said: Said, table: torch.Tensor) -> bool:
    """Whether a layer's mask follows a rule. Layers without causal masks see images as they see text."""
    if said.causal:
        return torch.equal(_visible(rule, types, said, table), table)
    sizes = (table.shape[1],) if said.size is None else (_WINDOW, _WINDOW - 1)  # transformers has both
    at = torch.arange(table.shape[1], device="cpu")
    distance = (at[:, None] - at).abs()
    return any(torch.equal((distance <= size).expand_as(table), table) for size in sizes)


def _visible(rule: BothWaysRule | None, types: torch.Tensor | None, said: Said, table: torch.Tensor) -> torch.Tensor:
    """bool [b, s, s]: which keys a causal layer's queries see by a rule."""
    narrow = said.size is not None or said.silent
    left = min(said.size or _WINDOW, _WINDOW) - 1 if narrow else table.shape[1]
    at = torch.arange(table.shape[1], device="cpu")
    distance = at[:, None] - at
    seen = ((distance >= 0) & (distance <= left)).expand(table.shape)
    if said.chunk:
        seen = seen & (at[:, None] // said.chunk == at // said.chunk)
    if rule is None or types is None:
        return seen
    block = torch.full(types.shape, -1, device="cpu")
    for number, (row, runs) in enumerate(blocks_of(rule, types, None, None)):
        for first, stop in runs:
            block[row, first:stop] = number
    together = (block[:, :, None] == block[:, None]) & (block >= 0)[:, None]
    return seen | (together & (distance <= left) if rule.windowed else together)
