"""Models that do not hand keywords on to all of their layers, as StableLM, Nemotron and Mamba-2: hooks hand `cp_batch`
on.

The sequences travel as the mask, because such a forward does hand that on. It also does so in a layer that is computed
again: transformers runs this one without the layer's own hooks. A hook of the module below makes a keyword of it again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from cp_fast.integrations.hugging_face.slice_probe import Probe, takes_cache

__all__ = ["Handed", "as_keyword", "handing_on"]

T = TypeVar("T")
_MASK = "attention_mask"
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # by which transformers' layers find their attention


def handing_on(model: nn.Module, covered: Collection[str], look: Callable[[], T]) -> T:
    """Call `look`, which runs the model, and return its result. Where it fails, and layers were not given `cp_batch`,
    hooks hand it on, and `look` is called again.

    Args:
        covered: the names of linear layers and convolutions that cp_fast has over ranks.
    """
    try:
        return look()
    except (NotImplementedError, TypeError):
        layers = {where for where, module in model.named_modules() if _is_attention(module)} | {*covered}
        before = None
        while (gap := _first_gap(model, layers)) not in (None, before):
            outer, inner = gap
            if not (_takes(model, outer, keywords=False) and _takes(model, inner, keywords=True)):
                break
            _join(model, outer, inner)
            before = gap
        if before is None:
            raise
        return look()


def _is_attention(module: nn.Module) -> bool:
    plain = inspect.unwrap(type(module).forward)
    return isinstance(plain, FunctionType) and _INTERFACE in plain.__code__.co_names


def _takes(model: nn.Module, where: str, keywords: bool) -> bool:
    """Whether a module takes a mask, and any keywords."""
    parameters = inspect.signature(type(model.get_submodule(where)).forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return _MASK in parameters and (inspect.Parameter.VAR_KEYWORD in kinds or not keywords)


def _first_gap(model: nn.Module, layers: set[str]) -> tuple[str, str] | None:
    """Find where a call of the model loses `cp_batch` above a layer. Return the last module with it, and the first one
    below without it. None: each layer of the call has it.
    """
    probe, config = Probe(), cast(Any, model).config
    heard, missing = set[str](), list[str]()
    ids = torch.arange(8, device=next(model.parameters()).device)[None] % config.get_text_config().vocab_size
    given: dict[str, Any] = {"cp_batch": probe, **({"use_cache": False} if takes_cache(model) else {})}

    def look(where: str, named: dict[str, Any]) -> None:
        if named.get("cp_batch") is probe:
            heard.add(where)
        elif where in layers:
            missing.append(where)

    with ExitStack() as stack:
        for where, module in model.named_modules():
            hook = module.register_forward_pre_hook(lambda _, __, named, w=where: look(w, named), with_kwargs=True)
            stack.callback(hook.remove)
        with suppress(Exception):  # the caller's own run meets it
            model(input_ids=ids, **given)
    for names in (where.split(".") for where in missing):
        above = ["", *(".".join(names[: n + 1]) for n in range(len(names)))]
        above = [one for one in above if not isinstance(model.get_submodule(one), nn.ModuleList | nn.ModuleDict)]
        for outer, inner in pairwise(above):
            if outer in heard and inner not in heard:
                return outer, inner
    return None


def _join(model: nn.Module, outer: str, inner: str) -> None:
    """Have all modules of one kind hand `cp_batch` on to the module in them of one name, or of one list."""
    kind, name = type(model.get_submodule(outer)), inner.removeprefix(f"{outer}.")
    holder, _, element = name.rpartition(".")
    for module in [module for module in model.modules() if type(module) is kind]:
        holding = module.get_submodule(holder)
        listed = element.isdigit() and isinstance(holding, nn.ModuleList)
        names = [f"{holder}.{one}" for one, _ in holding.named_children()] if listed else [name]
        module.register_forward_pre_hook(_as_mask, with_kwargs=True)
        for one in map(module.get_submodule, names):
            one.register_forward_pre_hook(as_keyword, with_kwargs=True)


@dataclass(frozen=True, eq=False)
class Handed:
    """The sequences of a call and its mask, in the place of the mask."""

    sequences: Any
    mask: Any


def _as_mask(_: nn.Module, by_place: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if named.get("cp_batch") is None:
        return None
    return by_place, {**named, _MASK: Handed(named["cp_batch"], named.get(_MASK))}


def as_keyword(_: nn.Module, by_place: tuple[Any, ...], named: dict[str, Any]) -> Any:
    found = next((x for x in (*by_place, named.get(_MASK)) if isinstance(x, Handed)), None)
    if found is None:
        return None
    by_place = tuple(found.mask if x is found else x for x in by_place)
    mask = {_MASK: found.mask} if _MASK in named else {}
    return by_place, {**named, **mask, "cp_batch": found.sequences}
