"""`score_mod`: a user's function of scores and their places, with FlexAttention's signature.

    score_mod(score, b, h, q_idx, kv_idx, **aux_tensors) -> score

All ranks must have the same function. It cannot travel, so its digest does: a short text of its name, its code, and
what it captures.
"""

from __future__ import annotations

import builtins
import dis
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from inspect import Parameter, signature
from typing import Any, cast

import torch

from cp_ref.schedules.values import kind_of

__all__ = [
    "ScoreMod",
    "check_result",
    "digest_of",
    "frozen",
    "modified_scores",
    "names_in_code",
    "parameters_of",
]

ScoreMod = Callable[..., torch.Tensor]

_PLAIN = (type(None), bool, int, float, str, torch.dtype)
_LIBRARIES = {"torch", "math", "operator"}  # Of modules and of what is in them, which is the same in all processes.
_OPEN_ENDED = {  # Built-in functions whose result is no matter of their arguments alone.
    *("__import__", "breakpoint", "compile", "delattr", "dir", "eval", "exec", "globals", "hash", "id", "input"),
    *("locals", "open", "setattr", "vars"),
}
_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_CHANGES = ("STORE_GLOBAL", "DELETE_GLOBAL")
_OF_FLASH_ATTENTION = (
    "a pair with its derivative or a function of seqlen_info; give the same function in PyTorch, of (score, b, h, "
    "q_idx, kv_idx): backend 'fa4' compiles it and its derivative"
)
_CAPTURE = "it may capture plain values, and functions and modules of torch and math; give tensors by aux_tensors"


def digest_of(score_mod: Any) -> str:
    """The digest of a function, equal where name, code and captured values are equal; "" for None.

    Functions that it captures count with their own code, captured values and attributes. Plain values: None, bool, int,
    float, str, dtypes, and tuples of these.

    Raises:
        TypeError: it is no plain Python function. ValueError: its parameters are others, or it captures a value whose
        equality on all ranks cannot be checked, such as a tensor, or it imports or changes something outside of it.

    >>> def capped(width):
    ...     return lambda score, b, h, q_idx, kv_idx: torch.where(q_idx - kv_idx < width, score, score / 2)
    >>> digest_of(capped(3)) == digest_of(capped(3)), digest_of(capped(3)) == digest_of(capped(4)), digest_of(None)
    (True, False, '')
    """
    if score_mod is None:
        return ""
    if _is_of_flash_attention(score_mod):
        raise TypeError(f"score_mod has the form of FlashAttention's own kernels, {_OF_FLASH_ATTENTION}")
    if not isinstance(score_mod, types.FunctionType):
        raise TypeError(f"score_mod is {kind_of(score_mod)}; it must be a plain Python function, or None")
    parameters_of(score_mod)
    text = _function_text(score_mod, score_mod.__qualname__, ())
    return f"{score_mod.__qualname__}:{blake2b(text.encode(), digest_size=8).hexdigest()}"


def with_digest(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with score_mod's digest in the place of the function, as a `Problem` has it."""
    return {**arguments, "score_mod": digest_of(arguments["score_mod"])} if "score_mod" in arguments else arguments


def frozen(score_mod: ScoreMod) -> ScoreMod:
    """A copy of a function that `digest_of` accepts, with the captured values of now. Its digest is the same.

    >>> factor = 2.0
    >>> def scaled(score, b, h, q_idx, kv_idx):
    ...     return factor * score
    >>> copy, factor = frozen(scaled), 3.0
    >>> copy(1.0, 0, 0, 0, 0), scaled(1.0, 0, 0, 0, 0)
    (2.0, 3.0)
    """
    return _frozen(score_mod, {})


def _frozen(value: Any, copies: dict[int, types.FunctionType]) -> Any:
    """A captured value of now. copies: those of functions so far, which may capture each other."""
    if type(value) is tuple:
        return tuple(_frozen(one, copies) for one in cast("tuple[Any, ...]", value))
    if not isinstance(value, types.FunctionType) or _library_text(value):
        return value
    if (known := copies.get(id(value))) is not None:
        return known
    cells = tuple(types.CellType() for _ in value.__closure__ or ())
    names = {"__builtins__": builtins} | {key: one for key, one in value.__globals__.items() if key == "__name__"}
    copy = types.FunctionType(value.__code__, names, value.__name__, None, cells)
    copies[id(value)] = copy
    copy.__qualname__, copy.__module__ = value.__qualname__, value.__module__
    copy.__dict__.update({key: _frozen(one, copies) for key, one in value.__dict__.items()})
    copy.__defaults__ = _frozen(value.__defaults__, copies)
    if value.__kwdefaults__ is not None:
        copy.__kwdefaults__ = {key: _frozen(one, copies) for key, one in value.__kwdefaults__.items()}
    for cell, old in zip(cells, value.__closure__ or (), strict=True):
        cell.cell_contents = _frozen(old.cell_contents, copies)
    read = _globals_of(value.__code__)
    names.update({key: _frozen(value.__globals__[key], copies) for key in read if key in value.__globals__})
    return copy


def parameters_of(score_mod: ScoreMod) -> dict[str, bool]:
    """The names of a score_mod's aux tensors, and whether each must be given.

    Raises:
        ValueError: it does not have the five parameters of a score_mod, or has parameters without a name.

    >>> def biased(score, b, h, q_idx, kv_idx, table, factor=None):
    ...     return score + table[h]
    >>> parameters_of(biased)
    {'table': True, 'factor': False}
    """
    parameters = list(signature(score_mod).parameters.values())
    five, others = parameters[:5], parameters[5:]
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    positional = all(one.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for one in five)
    if len(five) < 5 or not positional or any(one.kind not in named for one in others):
        raise ValueError(
            f"score_mod is {_name(score_mod)}{signature(score_mod)}; its parameters must be (score, b, h, q_idx, "
            "kv_idx), and then one by name for each of aux_tensors"
        )
    return {one.name: one.default is Parameter.empty for one in others}


def check_result(
    score_mod: ScoreMod, places: Sequence[torch.Tensor], aux_tensors: Mapping[str, torch.Tensor], scores: torch.Tensor
) -> None:
    """Try a score_mod on some scores.

    Args:
        places: b, h, q_idx, kv_idx of the scores; see `modified_scores`.

    Raises:
        TypeError, ValueError: score_mod raises, or its result is no tensor of floats in the scores' shape. On the CPU
        also: the first or the last score alone has another result, so that the function is not element-wise.

    >>> def normalized(score, b, h, q_idx, kv_idx):
    ...     return score / score.sum()
    >>> check_result(normalized, [torch.zeros(1, dtype=torch.int32)] * 4, {}, torch.tensor([3.0, 1.0]))
    Traceback (most recent call last):
        ...
    ValueError: score_mod normalized is not element-wise: it gives 0.75 for the first score of a block, and 1.0 alone
    """
    name = _name(score_mod)

    def result_of(scores: torch.Tensor, places: Sequence[torch.Tensor]) -> Any:
        try:
            return modified_scores(score_mod, scores, places, aux_tensors)
        except Exception as error:
            raise ValueError(
                f"score_mod {name} raised {type(error).__name__}: {error}. It must take every pair of a sequence's "
                "queries and keys, hidden ones too"
            ) from error

    with torch.no_grad():
        result = result_of(scores, places)
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            shown = f"a tensor of {result.dtype}" if isinstance(result, torch.Tensor) else kind_of(result)
            raise TypeError(f"score_mod {name} gave {shown}; it must give a tensor of floats")
        if result.shape != scores.shape:
            raise ValueError(
                f"score_mod {name} gave shape {list(result.shape)} for scores {list(scores.shape)}; it must give one "
                "value for each score"
            )
        if scores.device.type != "cpu":  # comparing values would wait for the device
            return
        for which, one in (("first", slice(0, 1)), ("last", slice(-1, None))):
            at = (one,) * scores.dim()
            whole, alone = result[at], result_of(scores[at], [x[at[: x.dim()]] for x in places])
            if not torch.allclose(whole, alone, rtol=1e-3, equal_nan=True):
                raise ValueError(
                    f"score_mod {name} is not element-wise: it gives {whole.item()} for the {which} score of a block, "
                    f"and {alone.item()} alone"
                )


def modified_scores(
    score_mod: ScoreMod, scores: torch.Tensor, places: Sequence[torch.Tensor], aux_tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The result of a score_mod that `check_result` has tried.

    Args:
        scores: a block of scores, of any shape; the function gets a copy.
        places: b, h, q_idx, kv_idx: int32, each broadcasts against the scores. Copies too.

    >>> zero = torch.zeros(1, 1, dtype=torch.int32)
    >>> def halved(score, b, h, q_idx, kv_idx):
    ...     return score / 2
    >>> modified_scores(halved, torch.tensor([[2.0, 4.0]]), [zero] * 4, {}).tolist()
    [[1.0, 2.0]]
    """
    return score_mod(scores.clone(), *(x.clone() for x in places), **aux_tensors)


def _is_of_flash_attention(score_mod: Any) -> bool:
    """Whether it has the form of FlashAttention 4's score_mod: a pair of functions, or one with its parameters."""
    if isinstance(score_mod, tuple | list):
        pair = cast("Sequence[Any]", score_mod)
        return len(pair) == 2 and all(isinstance(one, types.FunctionType) for one in pair)
    return isinstance(score_mod, types.FunctionType) and {"seqlen_info", "aux_tensors"} <= {
        *signature(score_mod).parameters
    }


def _library_text(value: Any) -> str:
    """The name of a module, a class or a function of a library; "" for anything else.

    The value's own name does not count: `functools.wraps` copies a library's names to a function of the user's, and a
    method of a tensor or a dictionary is a built-in function too. The library has to have the value by this name.
    """
    if isinstance(value, types.ModuleType):
        name = value.__name__
        return name if _of_library(name) and sys.modules.get(name) is value else ""
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__
        if owner is None:  # One of torch's own.
            return f"torch.{value.__name__}" if value.__module__ == "torch" else ""
        home = getattr(owner, "__name__", "") if owner is builtins else _library_text(owner)
        return f"{home}.{value.__name__}" if home and value.__name__ not in _OPEN_ENDED else ""
    if isinstance(value, types.FunctionType | type):
        found: Any = sys.modules.get(str(value.__module__))
        if not (found is builtins or _library_text(found)):
            return ""
        for name in value.__qualname__.split("."):
            found = getattr(found, name, None)
        return f"{value.__module__}.{value.__qualname__}" if found is value else ""
    return ""


def _of_library(name: str) -> bool:
    return name.partition(".")[0] in _LIBRARIES


def _name(score_mod: ScoreMod) -> str:
    return getattr(score_mod, "__qualname__", repr(score_mod))


def _function_text(function: types.FunctionType, name: str, above: tuple[types.FunctionType, ...]) -> str:
    """A function's code and captured values. above: the functions around it."""
    for number, one in enumerate(reversed(above)):
        if one is function:
            return f"itself {number}"
    _check_code(name, function.__code__, frozenset(function.__code__.co_freevars))
    try:
        captured = list(_captured(function))
    except ValueError as error:
        raise ValueError(f"score_mod {name} captures a variable without a value ({error}); {_CAPTURE}") from error
    names = names_in_code(function.__code__)
    texts = [f"{key}={_value_text(name, key, value, names, (*above, function))}" for key, value in captured]
    return f"{_code_text(function.__code__)}({', '.join(texts)})"


def _check_code(name: str, code: types.CodeType, captured: frozenset[str]) -> None:
    """Raise ValueError for code that reads modules by import, or changes what it captures."""
    before: list[Any] = [None, None]
    for one in dis.get_instructions(code):
        if one.opname == "IMPORT_NAME" and (before[0] != 0 or not _of_library(str(one.argval))):
            raise ValueError(f"score_mod {name} imports {one.argval!r}; it may import from torch and math alone")
        if one.opname in _CHANGES or (one.opname in ("STORE_DEREF", "DELETE_DEREF") and one.argval in captured):
            raise ValueError(f"score_mod {name} changes {one.argval}, which is outside of it; {_CAPTURE}")
        before = [before[1], one.argval]
    for inner in _inner(code):
        _check_code(name, inner, captured & frozenset(inner.co_freevars))


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The values that a function takes from outside, by name: defaults, cells of its closure, globals, and its own
    attributes.
    """
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from sorted((function.__kwdefaults__ or {}).items())
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield key, cell.cell_contents
    for key in sorted(_globals_of(function.__code__)):
        yield key, function.__globals__[key] if key in function.__globals__ else getattr(builtins, key, None)
    for key, value in sorted(function.__dict__.items()):
        yield f".{key}", value


def _globals_of(code: types.CodeType) -> set[str]:
    """The names of globals that code and the functions and classes inside it read."""
    names = {str(one.argval) for one in dis.get_instructions(code) if one.opname in _READS}
    return names.union(*map(_globals_of, _inner(code)))


def names_in_code(code: types.CodeType) -> set[str]:
    """All names in code and in the functions inside it, of globals and of attributes."""
    return set(code.co_names).union(*map(names_in_code, _inner(code)))


def _inner(code: types.CodeType) -> list[types.CodeType]:
    """The code of the functions and classes inside code."""
    return [x for x in code.co_consts if isinstance(x, types.CodeType)]


def _code_text(code: types.CodeType) -> str:
    constants = [_code_text(x) if isinstance(x, types.CodeType) else _constant_text(x) for x in code.co_consts]
    names = code.co_names, code.co_varnames, code.co_freevars
    return repr((code.co_code.hex(), code.co_exceptiontable.hex(), constants, *names))


def _constant_text(value: Any) -> str:
    return repr(sorted(map(repr, cast("frozenset[Any]", value)))) if isinstance(value, frozenset) else repr(value)


def _value_text(name: str, key: str, value: Any, names: set[str], above: tuple[types.FunctionType, ...]) -> str:
    """A captured value as text; raises ValueError for one that cannot be compared.

    Args:
        name, key: of the score_mod, and of the value. names: those in the code that has the value.
    """
    if type(value) in _PLAIN:
        return repr(value)
    if type(value) is tuple:
        parts = [_value_text(name, key, one, names, above) for one in cast("tuple[Any, ...]", value)]
        return f"({', '.join(parts)})"
    if library := _library_text(value):
        return library if not isinstance(value, types.ModuleType) else f"{library}{_attributes(name, value, names)}"
    if isinstance(value, types.FunctionType):
        return _function_text(value, name, above)
    raise ValueError(f"score_mod {name} captures {key}, {kind_of(value)}; {_CAPTURE}")


def _attributes(name: str, module: types.ModuleType, names: set[str]) -> str:
    """The plain values that a library's module has under some of these names. Raises ValueError where it has another
    module there, as torch has `os`.
    """
    found = {key: vars(module)[key] for key in sorted(names & vars(module).keys())}
    for key, value in found.items():
        if isinstance(value, types.ModuleType) and not _library_text(value):
            raise ValueError(f"score_mod {name} reads {module.__name__}.{key}, {kind_of(value)}; {_CAPTURE}")
    return repr({key: value for key, value in found.items() if type(value) in _PLAIN})
