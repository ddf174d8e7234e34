"""Run a model a few times on a handful of tokens, with attention that passes each token on alone. If a token's outputs
depend only on this token and its position, then only attention mixes tokens.

Three runs: the whole sequence as a user calls the model; a rank's slice of it with the positions that `shard_batch`
gives; and the whole with NaN in place of one token, which must reach no other.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cp_fast.integrations.hugging_face.token_mixers import token_axis

__all__ = ["Probe", "Seen", "at_rest", "look_over", "takes_cache"]

SLICE = [1, 2, 6, 7, 9]  # A rank's tokens: two chunks and one more.
POISONED = 5
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
class Seen:
    """The probe's findings: the attention modules, the number of position 0, and the arguments of its calls."""

    callers: dict[nn.Module, bool]
    first_position: int
    ids: torch.Tensor
    arguments: dict[str, Any] = field(repr=False)


def look_over(model: nn.Module, covered: Mapping[str, nn.Module], *, numbered: bool = True) -> Seen:
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
    device = next(model.parameters()).device
    ids = _ids(model, device)
    tokens, probe = ids.shape[1], Probe()
    given: dict[str, Any] = {"cp_batch": probe, **({"use_cache": False} if takes_cache(model) else {})}
    whole = _outputs(model(input_ids=ids, **given))
    for where, module in covered.items():
        if module not in probe.linear:
            raise NotImplementedError(f"{_named(model, where)} is not given cp_batch, which its model does not hand on")
    if not probe.callers and not covered:
        raise NotImplementedError(f"{name} never calls its attention by transformers' AttentionInterface")
    if numbered and not positions and probe.callers:
        raise NotImplementedError(_UNNUMBERED.format(name))
    _refuse_pooling(model, ids, given, whole)
    _refuse_mixing(model, ids, given)
    first = _first_position(model, ids, given, whole)
    return Seen(probe.callers, first, ids, {**given, "position_ids": first + torch.arange(tokens, device=device)[None]})


def takes_cache(model: nn.Module) -> bool:
    """Whether calls of a model, or of the model in its head, have an argument `use_cache`."""
    inner = getattr(model, "base_model", model)
    return any("use_cache" in inspect.signature(m.forward).parameters for m in (model, inner))


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


def _ids(model: nn.Module, device: torch.device) -> torch.Tensor:
    """Token ids [1, t]; t is not a size of any weight, so an axis of tokens is recognised by its size."""
    config: Any = model.config
    config = config.get_text_config()
    sizes = {size for weight in model.parameters() for size in weight.shape}
    sizes |= {value for value in config.to_dict().values() if isinstance(value, int)}
    tokens = next(n for n in (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47) if n not in sizes)
    given = [getattr(config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos")]
    special = {token for x in given for token in (x if isinstance(x, list) else [x])}
    plain = [token for token in range(min(config.vocab_size, 200)) if token not in special]
    return torch.tensor([[plain[(7 * i + 3) % len(plain)] for i in range(tokens)]], device=device)


def _outputs(out: Any) -> dict[str, torch.Tensor]:
    """The floating tensors that a model returns, by name."""
    found: dict[str, torch.Tensor] = {}
    pairs = out.items() if isinstance(out, Mapping) else enumerate(out)
    for name, value in pairs:
        for i, x in enumerate(value if isinstance(value, (tuple, list)) else [value]):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                found[f"{name}[{i}]" if isinstance(value, (tuple, list)) else str(name)] = x
    return found


def _refuse_pooling(model: nn.Module, ids: torch.Tensor, given: dict[str, Any], whole: dict[str, torch.Tensor]) -> None:
    tokens = ids.shape[1]
    odd = [name for name, x in whole.items() if token_axis(x, tokens) is None]
    if not odd:
        return
    pooling: list[str] = []

    def look(where: str, module: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        first = next((x for x in inputs if isinstance(x, torch.Tensor)), None)
        if first is not None and isinstance(out, torch.Tensor) and token_axis(first, tokens) is not None:
            pooling.extend([_named(model, where)] if token_axis(out, tokens) is None else [])

    with _watched(model, look):
        model(input_ids=ids, **given)
    where = pooling[0] if pooling else _named(model, "")
    raise NotImplementedError(
        f"{where} pools over tokens ({odd[0]} is {list(whole[odd[0]].shape)}); a rank has a slice"
    )


def _refuse_mixing(model: nn.Module, ids: torch.Tensor, given: dict[str, Any]) -> None:
    tokens, mixing = ids.shape[1], []

    def reached(x: Any) -> bool:
        axis = token_axis(x, tokens) if isinstance(x, torch.Tensor) and x.is_floating_point() else None
        if axis is None:
            return False
        rows = x.isnan().transpose(0, axis).flatten(1).any(1)
        rows[POISONED] = False
        return bool(rows.any())

    def look(where: str, module: nn.Module, inputs: tuple[Any, ...], out: Any) -> Any:
        if isinstance(module, nn.Embedding) and out.shape[-2] == tokens:
            out = out.clone()
            out[..., POISONED, :] = torch.nan
            return out
        if any(map(reached, out if isinstance(out, (tuple, list)) else [out])):
            mixing.append(_named(model, where))
        return None

    with _watched(model, look):
        out = _outputs(model(input_ids=ids, **given))
    if mixing or any(map(reached, out.values())):
        where = mixing[0] if mixing else _named(model, "")
        raise NotImplementedError(f"{where} mixes tokens without attention; a rank would do so on its slice")


def _first_position(model: nn.Module, ids: torch.Tensor, given: dict[str, Any], whole: dict[str, torch.Tensor]) -> int:
    """The number of the first position that makes a slice's outputs those of the whole sequence."""
    tokens, kept = ids.shape[1], torch.tensor(SLICE, device=ids.device)
    padding = getattr(model.config, "pad_token_id", None)
    for first in dict.fromkeys((0, 1 + (padding or 0))):
        out = _outputs(model(input_ids=ids[:, kept], position_ids=first + kept[None], **given))
        pairs = [(x.index_select(token_axis(x, tokens) or 0, kept), out[name]) for name, x in whole.items()]
        if all(_near(x, y) for x, y in pairs):
            return first
    raise NotImplementedError(
        f"{type(model).__name__} gives a slice of tokens with their position_ids other outputs than the whole; it "
        "takes positions, or other tokens, from elsewhere"
    )


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
