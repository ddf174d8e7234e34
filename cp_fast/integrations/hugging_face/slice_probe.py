"""Run a model a few times on a handful of tokens, with attention that passes each token on alone. If a token's outputs
depend only on this token and its position, then only attention mixes tokens.

Three runs: the whole sequence as a user calls the model; a rank's slice of it with the positions that `shard_batch`
gives; and the whole with NaN in place of one token, which must reach no other. The special tokens of the configuration
stand outside of the slice, so that a module which counts them, or looks for them, gives the slice other outputs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from cp_fast.integrations.hugging_face.token_mixers import token_axis

__all__ = ["Probe", "Rows", "Seen", "at_rest", "give_longest", "look_over", "say_longest", "takes_cache"]

# ---- the longest position of a batch
#
# Rotary embeddings whose frequencies depend on the longest position of a batch: rope_type "dynamic" and "longrope".
#
# transformers reads that position off the position_ids of the call, and a rank has those of a slice. So such an
# embedding computes one position more over ranks, the longest of the whole batch, which is cut off again.


_OF_ANY_LENGTH = {"default", "linear", "llama3", "proportional", "yarn"}  # rope_type


def give_longest(model: nn.Module) -> None:
    """Have the model's rotary embeddings take the position that `say_longest` says."""
    found: list[Any] = [module for module in model.modules() if _kinds(module) - _OF_ANY_LENGTH]
    for rotary in found:
        if not hasattr(rotary, "_cp_fast_longest"):
            rotary.register_forward_pre_hook(_append, with_kwargs=True)
            rotary.register_forward_hook(_cut_off)
        rotary._cp_fast_longest = None
    model.__dict__["_cp_fast_rotaries"] = found


def say_longest(model: nn.Module, longest: int | None, device: torch.device | None = None) -> None:
    """Say the longest position of the batch of the next call; None: the call has the whole batch."""
    for rotary in model.__dict__.get("_cp_fast_rotaries", ()):
        rotary._cp_fast_longest = None if longest is None else torch.tensor([longest], device=device)


def _kinds(module: nn.Module) -> set[str]:
    """The rope_type of a rotary embedding, of each kind of layer; none of other modules."""
    kinds: Any = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        kinds = list(kinds.values())
    return {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}


def _append(rotary: Any, by_place: tuple[Any, ...], given: dict[str, Any]) -> Any:
    if rotary._cp_fast_longest is None:
        return None
    bound = inspect.signature(rotary.forward).bind(*by_place, **given)
    positions = bound.arguments["position_ids"]  # [b, s/cp], or [axes, b, s/cp]
    last = rotary._cp_fast_longest.to(positions.dtype).expand(*positions.shape[:-1], 1)
    bound.arguments["position_ids"] = torch.cat([positions, last], dim=-1)
    return bound.args, bound.kwargs


def _cut_off(rotary: Any, _: Any, out: Any) -> Any:
    """cos and sin, or one tensor of both: [..., s/cp + 1, d] -> [..., s/cp, d]."""
    if rotary._cp_fast_longest is None:
        return None
    return tuple(x[..., :-1, :] for x in out) if isinstance(out, tuple) else out[..., :-1, :]


# ---- the runs


_SLICE = (1, 2, 6, 7, 9)  # A rank's tokens, behind the special ones: two chunks and one more.
_POISONED = 5
_LENGTHS = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
_UNNUMBERED = "{} takes no position_ids; it would number a slice's tokens from its own first"


class Probe:
    """Replaces a batch's sequences: attention records its callers, and passes each token on alone."""

    def __init__(self) -> None:
        self.callers: dict[nn.Module, bool] = {}  # Whether its attention is causal.
        self.linear: set[nn.Module] = set()  # Linear layers and convolutions.

    def attend(
        self, module: nn.Module, causal: bool, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """[b, h, s, d] -> [b, s, h, d_v]: v, scaled by its own token's q and k, which carry the position."""
        self.callers[module] = causal
        g = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(g, dim=1) for x in (key, value))
        weight = torch.linspace(-1, 1, query.shape[-1], device=query.device, dtype=query.dtype)
        q, k = (torch.nn.functional.normalize(x, dim=-1) @ weight for x in (query, key))
        return (value * (1 + torch.tanh(q + 2 * k))[..., None]).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Rows:
    """Token ids [1, t], with the places of a rank's slice, and of the token whose value becomes NaN."""

    ids: torch.Tensor
    kept: torch.Tensor
    poisoned: int


@dataclass(frozen=True)
class Seen:
    """The probe's findings: the attention modules, the number of position 0, and the arguments of its calls.

    Attributes:
        callers: whether each module's attention is causal.
        linear: linear layers and convolutions.
        heard: all modules that were given cp_batch.
        rows: the tokens of the whole.
        arguments: of the call with the whole, without the tokens.
    """

    callers: dict[nn.Module, bool]
    linear: set[nn.Module]
    heard: set[nn.Module]
    first_position: int
    rows: Rows
    arguments: dict[str, Any] = field(repr=False)


def look_over(model: nn.Module, covered: Mapping[str, nn.Module], *, numbered: bool) -> Seen:
    """Run the model on a few tokens.

    Args:
        covered: linear layers and convolutions that cp_fast has over ranks, by name.
        numbered: it takes position_ids; if not, attention alone knows positions.

    Raises:
        NotImplementedError: another module than attention mixes tokens, or positions do not come from position_ids; the
        error names the module and the cause.
    """
    name = type(model).__name__
    positions = "position_ids" in inspect.signature(model.forward).parameters
    if numbered and not positions and not covered:
        raise NotImplementedError(_UNNUMBERED.format(name))
    rows, probe = _rows(model, next(model.parameters()).device), Probe()
    given: dict[str, Any] = {"cp_batch": probe, **({"use_cache": False} if takes_cache(model) else {})}
    heard: set[nn.Module] = set()
    with ExitStack() as stack:
        for module in model.modules():
            hook = module.register_forward_pre_hook(
                lambda m, _, named: heard.add(m) if named.get("cp_batch") is probe else None, with_kwargs=True
            )
            stack.callback(hook.remove)
        whole = _outputs(model(input_ids=rows.ids, **given))
    for where, module in covered.items():
        if module not in probe.linear:
            raise NotImplementedError(f"{_named(model, where)} is not given cp_batch, which its model does not hand on")
    if not probe.callers and not covered:
        raise NotImplementedError(
            f"{name} never calls its attention by transformers' AttentionInterface{_own_configuration(model)}"
        )
    if numbered and not positions and probe.callers:
        raise NotImplementedError(_UNNUMBERED.format(name))
    _refuse_pooling(model, rows, given, whole)
    _refuse_mixing(model, rows, given)
    first = _first_position(model, rows, given, whole)
    places = torch.arange(rows.ids.shape[1], device=rows.ids.device)[None]
    given["position_ids"] = first + places
    return Seen(probe.callers, probe.linear, heard, first, rows, given)


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
    inner = getattr(model, "base_model", model)
    text = getattr(inner, "language_model", inner)  # to which models of images hand their keywords on
    return any("use_cache" in inspect.signature(m.forward).parameters for m in (model, inner, text))


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


def _rows(model: nn.Module, device: torch.device) -> Rows:
    """Token ids whose number is not a size of any weight, so that an axis of tokens is recognised by its size.

    Special tokens come first, where all others see them, and padding, which may not be told from a token by the model,
    last but one: models number the tokens behind it in another way.
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
    ids = special + [plain[(7 * i + 3) % len(plain)] for i in range(tokens - len(special))]
    if padding is not None and 0 <= padding < text.vocab_size:
        ids[-2] = padding
    kept = torch.tensor([len(special) + i for i in _SLICE], device=device)
    return Rows(torch.tensor([ids], device=device), kept, len(special) + _POISONED)


def _outputs(out: Any) -> dict[str, torch.Tensor]:
    """The floating tensors that a model returns, by name."""
    found: dict[str, torch.Tensor] = {}
    pairs = out.items() if isinstance(out, Mapping) else enumerate(out if isinstance(out, (tuple, list)) else [out])
    for name, value in pairs:
        for i, x in enumerate(value if isinstance(value, (tuple, list)) else [value]):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                found[f"{name}[{i}]" if isinstance(value, (tuple, list)) else str(name)] = x
    return found


def _refuse_pooling(model: nn.Module, rows: Rows, given: dict[str, Any], whole: dict[str, torch.Tensor]) -> None:
    tokens = rows.ids.shape[1]
    odd = [name for name, x in whole.items() if token_axis(x, tokens) is None]
    if not odd:
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


def _refuse_mixing(model: nn.Module, rows: Rows, given: dict[str, Any]) -> None:
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
        out = _outputs(model(input_ids=rows.ids, **given))
    if mixing or any(map(reached, out.values())):
        where = mixing[0] if mixing else _named(model, "")
        raise NotImplementedError(f"{where} mixes tokens without attention; a rank would do so on its slice")


def _first_position(model: nn.Module, rows: Rows, given: dict[str, Any], whole: dict[str, torch.Tensor]) -> int:
    """The number of the first position that makes a slice's outputs those of the whole sequence.

    Raises:
        NotImplementedError: there is none; the error names the first module whose outputs differ.
    """
    firsts = list(dict.fromkeys((0, 1 + (getattr(model.config, "pad_token_id", None) or 0))))
    give_longest(model)
    say_longest(model, rows.ids.shape[1] - 1, rows.ids.device)
    try:
        for first in firsts:
            if not _differ(whole, _outputs(model(**_slice(rows, first), **given)), rows):
                return first
        whole = _outputs_of_modules(model, {"input_ids": rows.ids, **given})
        parts = [_outputs_of_modules(model, {**_slice(rows, first), **given}) for first in firsts]
    finally:
        say_longest(model, None)
    where = max((_differ(whole, part, rows)[0] for part in parts), key=list(whole).index).partition(" ")[0]
    raise NotImplementedError(
        f"{_named(model, where)} gives a slice of tokens with their position_ids other outputs than the whole; it "
        "takes positions, or counts tokens, from elsewhere"
    )


def _slice(rows: Rows, first: int) -> dict[str, torch.Tensor]:
    return {"input_ids": rows.ids[:, rows.kept], "position_ids": first + rows.kept[None]}


def _differ(whole: dict[str, torch.Tensor], part: dict[str, torch.Tensor], rows: Rows) -> list[str]:
    """The outputs with a row a token whose rows of the slice are others than those of the whole."""
    axes = {name: token_axis(x, rows.ids.shape[1]) for name, x in whole.items()}
    return [
        name
        for name, axis in axes.items()
        if axis is not None and not _near(whole[name].index_select(axis, rows.kept), part.get(name, whole[name]))
    ]


def _outputs_of_modules(model: nn.Module, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The floating tensors that each module returns, by its name and theirs, in the order of the calls."""
    found: dict[str, torch.Tensor] = {}

    def look(where: str, _: nn.Module, __: tuple[Any, ...], out: Any) -> None:
        found.update({f"{where} {name}": x for name, x in _outputs(out).items()})

    with _watched(model, look):
        model(**given)
    return found


def _near(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether most tokens are equal up to rounding. A rounded router may choose another expert for a few."""
    if x.shape != y.shape:
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
