"""Linear layers and convolutions of transformers over ranks: their own forward, with other functions in it.

A mixer of tokens projects, calls functions of its file by name, and projects again. The functions alone know more than
one token. `put_over_ranks` gives each mixer of one model a copy of its class's `forward`: the same code, whose names of
these functions mean those of `linear_functions`. The class, its file, and other models in the process do not change.
Some mixers call no such functions: `written_mixers` has their forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, cast

from torch import nn

from cp_fast.integrations.hugging_face.called_layers import note_call
from cp_fast.integrations.hugging_face.linear_functions import (
    FUNCTIONS,
    OF_CACHES,
    mamba2_split_conv1d_scan_combined,
    one_token,
)
from cp_fast.integrations.hugging_face.module_states import check_forward, give_forward, take_forward
from cp_fast.integrations.hugging_face.slice_probe import Probe
from cp_fast.integrations.hugging_face.token_mixers import refuse_caches
from cp_fast.integrations.hugging_face.written_mixers import WRITTEN, hand_on
from cp_ref.calls.score_mod import names_in_code

__all__ = ["linear_mixers", "put_over_ranks", "take_back"]

_REPLACED: dict[str, Callable[..., Any]] = {
    **FUNCTIONS,
    **dict.fromkeys(OF_CACHES, one_token),
    "mamba2_split_conv1d_scan_combined": mamba2_split_conv1d_scan_combined,
}
_LACKING = ("mamba_selective_scan",)  # of which mixers do not hand `cp_batch` on


def linear_mixers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model whose classes mix tokens by functions that cp_fast has, or are known, by name."""
    known = ((where, module, type(module)) for where, module in model.named_modules())
    return {where: module for where, module, kind in known if _functions(kind) & set(FUNCTIONS) or _written(kind)}


def _written(kind: type[nn.Module]) -> Callable[..., Any] | None:
    return WRITTEN.get(f"{kind.__module__}.{kind.__qualname__}")


def put_over_ranks(model: nn.Module) -> None:
    """Give the mixers of a model the forward that takes slices. Calls without `cp_batch` run their own, as before.

    Raises:
        NotImplementedError: a mixer, named, has other functions than those that cp_fast knows, or another forward than
        its class.
    """
    for where, module in linear_mixers(model).items():
        name, kind = f"{where} ({type(module).__name__})", cast(Any, type(module))
        check_forward(name, module)
        written = _written(kind)
        for function in _functions(kind) & set(_LACKING) if written is None else ():
            raise NotImplementedError(f"{name} calls {function}, which cp_fast does not have over ranks")
        for function in _functions(kind) & set(FUNCTIONS):
            _check_parameters(name, function, inspect.unwrap(kind.forward).__globals__[function])
        give_forward(module, _forward(kind.forward, written))
        hand_on(model.get_submodule(where.rpartition(".")[0]), module)


def take_back(model: nn.Module) -> None:
    """Give the mixers their classes' forward again."""
    for module in linear_mixers(model).values():
        take_forward(module)


def _forward(theirs: Callable[..., Any], written: Callable[..., Any] | None) -> Callable[..., Any]:
    """A forward that runs the class's own, or its copy where the call has sequences over ranks.

    Args:
        written: in place of the copy.
    """
    ours = written or _with_functions(theirs, _REPLACED)

    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        sequences = named.get("cp_batch")
        if sequences is None:
            return theirs(self, *given, **named)
        refuse_caches(type(self).__name__, named)
        if isinstance(sequences, Probe):
            sequences.linear.add(self)
        note_call(self, sequences)
        return ours(self, *given, **named)

    return forward


def _with_functions(function: Any, functions: dict[str, Any]) -> Callable[..., Any]:
    """A function of the same code, in which names of its file mean other functions.

    >>> def shift(x): return x + 1
    >>> def twice(x): return shift(shift(x))
    >>> _with_functions(twice, {"shift": lambda x: x + 10})(0), twice(0)
    (20, 2)
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        names = {**function.__globals__, **functions}
        names.pop("__name__")  # torch.compile would use it to look names up in the file.
        return _copy(function, names, function.__closure__)
    changed = _with_functions(inner, functions)
    cells = tuple(CellType(changed) if cell.cell_contents is inner else cell for cell in function.__closure__ or ())
    if cells == function.__closure__:
        raise NotImplementedError(f"{function.__qualname__} is wrapped in a way that cp_fast cannot follow")
    return _copy(function, function.__globals__, cells)


def _copy(function: FunctionType, names: dict[str, Any], cells: Any) -> Callable[..., Any]:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _functions(kind: type[nn.Module]) -> set[str]:
    """The names that a module's forward looks up in its file."""
    plain = inspect.unwrap(kind.forward)
    return set(names_in_code(plain.__code__)) & set(plain.__globals__) if isinstance(plain, FunctionType) else set()


def _check_parameters(name: str, function: str, theirs: Any) -> None:
    """Raise where a function of this name takes other arguments than the one that is to replace it."""
    found, known = (
        [p.name for p in inspect.signature(f).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        for f in (inspect.unwrap(theirs), FUNCTIONS[function])
    )
    if found != known:
        raise NotImplementedError(f"{name} calls {function}({', '.join(found)}); cp_fast knows ({', '.join(known)})")
