"""Run a model a few times on a handful of tokens, with attention that passes each token on alone. If a token's outputs
depend only on this token and its position, then only attention mixes tokens.

The first run has two whole rows, as a user calls the model. The second has NaN in place of one token, which must reach
no other token. It also has numbers in place of masks: they say what mask comes to each layer. The third has two whole
rows far from position 0. The last has a rank's slice of them, with the positions that `shard_batch` gives. Each row of
the slice has tokens of both.

The special tokens of the configuration stand outside of the slice, so that a module which counts them, or looks for
them, gives the slice other outputs. Ids of padding are tokens like others, and stand before the slice and in it: a
batch may have such a token where its mask says token.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from cp_fast.integrations.hugging_face.built_masks import Said, Sides, refuse_own_mask
from cp_fast.integrations.hugging_face.long_positions import CountFrom, far_position, give_longest, say_longest
from cp_fast.integrations.hugging_face.position_tables import has_tables, takes_positions
from cp_fast.integrations.hugging_face.token_mixers import ROUTER_SWITCH, token_axis

__all__ = [
    "Numbering",
    "Probe",
    "Seen",
    "TrialRows",
    "at_rest",
    "look_over",
    "outputs_of",
    "slice_of",
    "takes_cache",
    "trial_rows",
]

_SLICE = (1, 2, 6, 7, 9)  # A rank's tokens, behind the special ones: two chunks and one more.
# Tokens of each row whose id is that of padding. A model that leaves them out shifts the slice's tokens by 1, 2 or 3:
# no one shift is that of half of them.
_PADDED = ((0, 3, 6), (0, 3))
_POISONED = 5
_LENGTHS = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
_UNNUMBERED = "{} takes no position_ids; it would number a slice's tokens from its own first"

_running = threading.local()


class Probe:
    """Replaces a batch's sequences: attention records its callers, and passes each token on alone."""

    def __init__(self) -> None:
        self.callers: dict[nn.Module, Said] = {}
        self.linear: set[nn.Module] = set()  # Linear layers and convolutions.
        self.sides: dict[nn.Module, Sides] = {}  # Of the mask that has come to a layer.
        self._masks: list[frozenset[Sides]] | None = None  # The sides of each mask of this run.

    @staticmethod
    def now() -> Probe | None:
        """The one whose run this thread is in."""
        return getattr(_running, "probe", None)

    @contextmanager
    def running(self, masks: bool = False) -> Iterator[None]:
        """A run of the model; masks: whether it gets numbers in the place of masks."""
        _running.probe, self._masks = self, [] if masks else None
        try:
            yield
        finally:
            _running.probe = self._masks = None

    def mask(self, sides: frozenset[Sides], given: Mapping[str, Any]) -> torch.Tensor | None:
        """A number in the place of a mask that the model builds, [b, 1, s, s]. given: the arguments that it builds it
        of.
        """
        if self._masks is None:
            return None
        self._masks.append(sides)
        shape = given["batch_size"], 1, given["q_length"], given["kv_length"]
        how = {"dtype": given.get("dtype", torch.float32), "device": given.get("device")}
        return torch.full(shape, float(len(self._masks)), **how)

    def whole_mask(self, mask_function: Callable[..., Any], given: Mapping[str, Any]) -> torch.Tensor | None:
        """A number in the place of a mask whose function this probe looks at itself. None: of no mask."""
        return None

    def look_at_mask(self, module: nn.Module, said: Said, mask: Any) -> None:
        """Compare a layer's own account with the mask that came to it."""
        said = self.callers.setdefault(module, said)
        if mask is None:
            return
        masks, name = self._masks or [], type(module).__name__
        ours = isinstance(mask, torch.Tensor) and mask.is_floating_point() and mask.numel() > 0
        number = float(mask.flatten()[0]) if ours else 0.0
        if not 1 <= number <= len(masks) or not bool((mask == round(number)).all()):
            refuse_own_mask(name, mask)
        self.sides[module] = said.among(masks[round(number) - 1], name)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[b, h, s, d] -> [b, s, h, d_v]: v, scaled by its own token's q and k. These carry the position."""
        g = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(g, dim=1) for x in (key, value))
        weight = torch.linspace(-1, 1, query.shape[-1], device=query.device, dtype=query.dtype)
        q, k = (nn.functional.normalize(x, dim=-1) @ weight + _size(x) for x in (query, key))
        return (value * (1 + torch.tanh(q + 2 * k))[..., None]).transpose(1, 2).contiguous()


def _size(x: torch.Tensor) -> torch.Tensor:
    """[..., d] -> [...], a small number that grows with the length of x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide.norm(dim=-1).clamp(min=1e-6).log() / 8).to(x.dtype)


@dataclass(frozen=True)
class Numbering:
    """How a model numbers positions.

    Args:
        first: the number of the first token of a sequence.
        without: an id whose tokens it leaves out; they have the number before the first. None: it counts all.
    """

    first: int
    without: int | None = None

    def of(self, ids: torch.Tensor) -> torch.Tensor:
        """The positions of whole rows: [b, s] -> [b, s].

        >>> Numbering(2, without=1).of(torch.tensor([[7, 1, 8]])).tolist()
        [[2, 1, 3]]
        """
        counted = torch.ones_like(ids) if self.without is None else (ids != self.without).to(ids.dtype)
        return self.first + counted.cumsum(1) * counted - 1


@dataclass(frozen=True)
class TrialRows:
    """Rows of token ids [b, t], with the places of a rank's slice, and of the token whose value becomes NaN."""

    ids: torch.Tensor
    places: torch.Tensor
    poisoned: int


@dataclass(frozen=True)
class Seen:
    """The probe's findings: the attention modules, the numbering, and the arguments of its calls.

    Attributes:
        callers: what each module says of its attention.
        sides: of the masks that came to them, where the model builds some.
        linear: linear layers and convolutions.
        heard: all modules that were given cp_batch.
        by_row: the name of a module whose outputs depend on a token's row; "" for none.
        rows: the tokens of the first whole row.
        arguments: of the call with the whole, without the tokens.
    """

    callers: dict[nn.Module, Said]
    sides: dict[nn.Module, Sides]
    linear: set[nn.Module]
    heard: set[nn.Module]
    numbering: Numbering
    by_row: str
    rows: TrialRows
    arguments: dict[str, Any] = field(repr=False)


def look_over(model: nn.Module, covered: Mapping[str, nn.Module], *, numbered: bool, pooled: bool = False) -> Seen:
    """Run the model on a few tokens.

    Args:
        pooled: it may have outputs of sequences beside those of tokens, which are known to be right.
        covered: linear layers and convolutions that cp_fast has over ranks, by name.
        numbered: it takes position_ids; if not, attention alone knows positions.

    Raises:
        NotImplementedError: another module than attention mixes tokens, or positions do not come from position_ids; the
        error names the module and the cause.
    """
    name = type(model).__name__
    positions = any(map(takes_positions, _inside(model))) or has_tables(model)
    rows, probe = trial_rows(model, next(model.parameters()).device), Probe()
    given: dict[str, Any] = {"cp_batch": probe, **({"use_cache": False} if takes_cache(model) else {})}
    if getattr(cast(Any, model).config.get_text_config(), ROUTER_SWITCH, False):
        given[ROUTER_SWITCH] = False
    heard: set[nn.Module] = set()
    with ExitStack() as stack:
        for module in model.modules():
            hook = module.register_forward_pre_hook(
                lambda m, _, named: heard.add(m) if named.get("cp_batch") is probe else None, with_kwargs=True
            )
            stack.callback(hook.remove)
        stack.enter_context(probe.running())
        counting = stack.enter_context(CountFrom(0, rows.ids.shape[1]))
        whole = outputs_of(model(input_ids=rows.ids, **given))
    for where, module in covered.items():
        if module not in probe.linear:
            raise NotImplementedError(f"{_named(model, where)} is not given cp_batch, which its model does not hand on")
    if not probe.callers and not covered:
        raise NotImplementedError(
            f"{name} never calls its attention by transformers' AttentionInterface{_own_configuration(model)}"
        )
    if numbered and not positions and probe.callers:
        raise NotImplementedError(_UNNUMBERED.format(name))
    _refuse_pooling(model, rows, given, whole, pooled)
    with probe.running(masks=True):
        _refuse_mixing(model, rows, given)
    for module, said in probe.callers.items():
        if said.silent and module not in probe.sides:
            raise NotImplementedError(
                f"{type(module).__name__} has a sliding window that it does not pass to its attention, nor has a mask"
            )
    numbering, by_row = _numbering(model, rows, given, whole)
    if counting.used and numbered:
        _refuse_counting(model, rows, given, numbering, whole)
    rows = TrialRows(rows.ids[:1], rows.places, rows.poisoned)
    given["position_ids"] = numbering.of(rows.ids)
    return Seen(probe.callers, probe.sides, probe.linear, heard, numbering, by_row, rows, given)


def _own_configuration(model: nn.Module) -> str:
    """The first layer whose attention the model's `set_attn_implementation` does not reach, and the cure, or ""."""
    for where, module in model.named_modules():
        mine = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if mine is not None and mine != cast(Any, model).config._attn_implementation:
            return (
                f": {_named(model, where)} has a configuration of its own, with attn_implementation {mine!r} (PEFT's "
                "layer_replication copies it). Let its config be model.config, or add such adapters after prepare"
            )
    return ""


def takes_cache(model: nn.Module) -> bool:
    """Whether calls of a model, or of the model in its head, have an argument `use_cache`."""
    return any("use_cache" in inspect.signature(m.forward).parameters for m in _inside(model))


def _inside(model: nn.Module) -> tuple[Any, ...]:
    """A model, the one in its head, and the text model in that: models of images hand their keywords on to it."""
    inner = getattr(model, "base_model", model)
    return model, inner, getattr(inner, "language_model", inner)


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and without gradients; afterwards its own modes are restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def trial_rows(model: nn.Module, device: torch.device) -> TrialRows:
    """Token ids whose number is not a size of any weight, so that an axis of tokens is recognised by its size.

    Special tokens come first, where all others see them. Padding, which may not be told from a token by the model,
    stands last but one too: models number the tokens behind it in another way.
    """
    top: Any = model.config
    text = top.get_text_config()
    padding = getattr(text, "pad_token_id", None)
    entries = {**top.to_dict(), **text.to_dict()}
    named = [x for name, x in entries.items() if re.search("_token_(id|ids|index)$", name)]
    known = {token for x in named for token in (x if isinstance(x, list) else [x])} - {None}
    special = sorted(token for token in known - {padding} if 0 <= token < text.vocab_size)
    sizes = {size for weight in model.parameters() for size in weight.shape}
    sizes |= {value for value in entries.values() if isinstance(value, int)}
    tokens = next(n for n in _LENGTHS if n not in sizes and n >= len(special) + _LENGTHS[0])
    plain = [token for token in range(min(text.vocab_size, 200 + len(known))) if token not in known]
    first = len(special)
    ids = [special + [plain[(7 * i + 3 + 4 * row) % len(plain)] for i in range(tokens - first)] for row in range(2)]
    if padding is not None and 0 <= padding < text.vocab_size:
        for row, places in zip(ids, _PADDED, strict=True):
            for place in (*(first + place for place in places), -2):
                row[place] = padding
    places = torch.tensor([first + i for i in _SLICE], device=device)
    return TrialRows(torch.tensor(ids, device=device), places, first + _POISONED)


def outputs_of(out: Any) -> dict[str, torch.Tensor]:
    """The floating tensors that a model returns, by name."""
    found: dict[str, torch.Tensor] = {}
    pairs = out.items() if isinstance(out, Mapping) else enumerate(out if isinstance(out, (tuple, list)) else [out])
    for name, value in pairs:
        for i, x in enumerate(value if isinstance(value, (tuple, list)) else [value]):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                found[f"{name}[{i}]" if isinstance(value, (tuple, list)) else str(name)] = x
    return found


def _refuse_pooling(
    model: nn.Module, rows: TrialRows, given: dict[str, Any], whole: dict[str, torch.Tensor], pooled: bool
) -> None:
    tokens = rows.ids.shape[1]
    odd = [name for name, x in whole.items() if token_axis(x, tokens) is None]
    if not odd or (pooled and len(odd) < len(whole)):
        return
    pooling: list[str] = []

    def look(where: str, module: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        first = next((x for x in inputs if isinstance(x, torch.Tensor)), None)
        if first is not None and isinstance(out, torch.Tensor) and token_axis(first, tokens) is not None:
            pooling.extend([_named(model, where)] if token_axis(out, tokens) is None else [])

    with _watched(model, look):
        model(input_ids=rows.ids, **given)
    where = pooling[0] if pooling else _named(model, "")
    raise NotImplementedError(
        f"{where} pools over tokens ({odd[0]} is {list(whole[odd[0]].shape)}); a rank has a slice"
    )


def _refuse_mixing(model: nn.Module, rows: TrialRows, given: dict[str, Any]) -> None:
    tokens, mixing = rows.ids.shape[1], []

    def reached(x: Any) -> bool:
        axis = token_axis(x, tokens) if isinstance(x, torch.Tensor) and x.is_floating_point() else None
        if axis is None:
            return False
        spoilt = x.isnan().transpose(0, axis).flatten(1).any(1)
        spoilt[rows.poisoned] = False
        return bool(spoilt.any())

    def look(where: str, module: nn.Module, inputs: tuple[Any, ...], out: Any) -> Any:
        if isinstance(module, nn.Embedding) and out.shape[-2] == tokens:
            out = out.clone()
            out[..., rows.poisoned, :] = torch.nan
            return out
        if any(map(reached, out if isinstance(out, (tuple, list)) else [out])):
            mixing.append(_named(model, where))
        return None

    with _watched(model, look):
        out = outputs_of(model(input_ids=rows.ids, **given))
    if mixing or any(map(reached, out.values())):
        where = mixing[0] if mixing else _named(model, "")
        raise NotImplementedError(f"{where} mixes tokens without attention; a rank would do so on its slice")


def _numbering(
    model: nn.Module, rows: TrialRows, given: dict[str, Any], whole: dict[str, torch.Tensor]
) -> tuple[Numbering, str]:
    """Return the numbering under which a slice's outputs are those of the whole rows. Return also the name of the first
    module that gives other outputs if a slice's row has tokens of several rows. "": no module does.

    Raises:
        NotImplementedError: there is none; the error names the first module whose outputs differ.
    """
    padding = getattr(cast(Any, model).config.get_text_config(), "pad_token_id", None)
    known = [Numbering(0)]
    known += [] if padding is None else [Numbering(1 + padding), Numbering(1 + padding, padding)]
    give_longest(model)
    say_longest(model, rows.ids.shape[1] - 1, rows.ids.device)
    try:
        for mixed in (True, False):
            for numbering in known:
                part = outputs_of(model(**_slice(rows, numbering, mixed), **given))
                if not _differ(whole, part, rows, mixed):
                    return numbering, "" if mixed else _first_to_differ(model, rows, given, [numbering], mixed=True)
        where = _first_to_differ(model, rows, given, known)
    finally:
        say_longest(model, None)
    raise NotImplementedError(
        f"{where} gives a slice of tokens with their position_ids other outputs than the whole; it takes positions, or "
        "counts tokens, from elsewhere"
    )


def _refuse_counting(
    model: nn.Module, rows: TrialRows, given: dict[str, Any], numbering: Numbering, near: dict[str, torch.Tensor]
) -> None:
    """Raise for a model whose slices are right near position 0, and not far from it. near: the outputs of the whole
    near position 0; a model that has the same ones takes its positions from a table.
    """
    tokens = rows.ids.shape[1]
    if (far := far_position(model, tokens + numbering.first)) <= 0:
        return
    with CountFrom(far, tokens):
        whole = outputs_of(model(input_ids=rows.ids, **given))
    numbering = Numbering(far + numbering.first, numbering.without)
    part = outputs_of(model(**_slice(rows, numbering, mixed=False), **given))
    if not _differ(whole, part, rows, mixed=False) or all(_near(x, whole[name]) for name, x in near.items()):
        return
    raise NotImplementedError(
        f"{_first_to_differ(model, rows, given, [numbering], far=far)} counts a slice's tokens from 0 in place of "
        f"reading position_ids, which changes its outputs far from position 0 (seen from {far} on)"
    )


def _first_to_differ(
    model: nn.Module,
    rows: TrialRows,
    given: dict[str, Any],
    known: list[Numbering],
    *,
    mixed: bool = False,
    far: int = 0,
) -> str:
    """The first module whose outputs of a slice are not those of the whole, by the numbering that comes furthest; of a
    module inside of attention, the attention.
    """
    with CountFrom(far, rows.ids.shape[1]):
        whole = _outputs_of_modules(model, {"input_ids": rows.ids, **given})
    order = [name for name, x in whole.items() if token_axis(x, rows.ids.shape[1]) is not None]
    parts = [_outputs_of_modules(model, {**_slice(rows, numbering, mixed), **given}) for numbering in known]
    odd = [(_differ(whole, part, rows, mixed) or order[-1:])[0] for part in parts]
    where = max(odd, key=order.index).partition(" ")[0]
    outer = where.rpartition(".")[0]
    return _named(model, outer if model.get_submodule(outer) in given["cp_batch"].callers else where)


def _slice(rows: TrialRows, numbering: Numbering, mixed: bool) -> dict[str, torch.Tensor]:
    positions = numbering.of(rows.ids)
    return {name: slice_of(x, rows, 1, mixed) for name, x in (("input_ids", rows.ids), ("position_ids", positions))}


def slice_of(x: torch.Tensor, rows: TrialRows, axis: int, mixed: bool) -> torch.Tensor:
    """The slice of a tensor of the whole rows. mixed: the rows change places, and each token's neighbour in the other
    row is another, as in slices of layout "balanced".
    """
    x = x.index_select(axis, rows.places)
    if not mixed or axis == 0 or x.shape[axis - 1] > 2:
        return x
    first, second = (x.select(axis - 1, row % x.shape[axis - 1]) for row in range(2))
    return torch.stack([second, first.roll(1, axis - 1)], axis - 1)


def _differ(whole: dict[str, torch.Tensor], part: dict[str, torch.Tensor], rows: TrialRows, mixed: bool) -> list[str]:
    """The outputs with a row a token whose rows of the slice are others than those of the whole."""
    axes = {name: token_axis(x, rows.ids.shape[1]) for name, x in whole.items()}
    return [
        name
        for name, axis in axes.items()
        if axis is not None and not _near(slice_of(whole[name], rows, axis, mixed), part.get(name, whole[name]))
    ]


def _outputs_of_modules(model: nn.Module, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The floating tensors that each module returns, by its name and theirs, in the order of the calls."""
    found: dict[str, torch.Tensor] = {}

    def look(where: str, _: nn.Module, __: tuple[Any, ...], out: Any) -> None:
        found.update({f"{where} {name}": x for name, x in outputs_of(out).items()})

    with _watched(model, look):
        model(**given)
    return found


def _near(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether most tokens are equal up to rounding. A rounded router may choose another expert for a few."""
    try:
        x, y = torch.broadcast_tensors(x, y)  # The model makes positions for all rows.
    except RuntimeError:
        return False
    tolerance = 1e-3 if torch.finfo(x.dtype).bits >= 32 else 5e-2
    x, y = (z.double().flatten(0, -2) for z in (x, y))
    error = (x - y).abs().amax(-1) / x.abs().amax(-1).clamp(min=1e-9)
    return bool(error.median() <= tolerance)


@contextmanager
def _watched(model: nn.Module, look: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for where, module in model.named_modules():
            handle = module.register_forward_hook(lambda m, i, o, w=where: look(w, m, i, o))
            stack.callback(handle.remove)
        yield


def _named(model: nn.Module, where: str) -> str:
    kind = type(model.get_submodule(where)).__name__
    return f"{where} ({kind})" if where else kind
