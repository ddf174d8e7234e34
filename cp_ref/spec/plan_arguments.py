"""The arguments of `make_plan`, which `supports` takes too: told apart into sizes and the problem's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from cp_ref.spec.arguments import Sizes, read_problem

__all__ = ["signature_of", "split_plan_arguments"]

P = ParamSpec("P")
R = TypeVar("R")

_OF_THE_PROBLEM = inspect.signature(read_problem).parameters


def signature_of(other: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Let a function of **arguments show the signature of another to readers, editors and `inspect`.

    >>> def known(*, cp: int, softcap: float = 0.0) -> str: ...
    >>> @signature_of(known)
    ... def copy(**arguments) -> bool: ...
    >>> list(inspect.signature(copy).parameters)
    ['cp', 'softcap']
    """

    def declare(function: Callable[..., R]) -> Callable[P, R]:
        returns = inspect.signature(function).return_annotation
        signature = inspect.signature(other).replace(return_annotation=returns)
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return declare


def split_plan_arguments(make_plan: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Sizes, dict[str, Any]]:
    """A call of `make_plan` -> the sizes it states, and all arguments that the problem is read from, with defaults.

    Raises:
        TypeError: an argument that `make_plan` does not have, or lacks; as Python itself would.
    """
    call = inspect.signature(make_plan).bind(**arguments)
    call.apply_defaults()
    given = call.arguments
    dtype = str(given["dtype"]).removeprefix("torch.")
    names = ("heads_q", "heads_kv", "d_qk", "d_v", "batch_size", "seqlen_q", "seqlen_kv")
    sizes = Sizes(dtype=dtype, **{name: given[name] for name in names})
    return sizes, {name: value for name, value in given.items() if name in _OF_THE_PROBLEM}
