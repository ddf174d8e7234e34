"""Public functions of both packages: a stub has the parameters, the defaults and the docstring, without a body.

def trimmed(x: Tensor, *, rows: int = 1) -> Tensor:                           cp_ref/common/trimming.py
    "The first rows of ..."

@implements(trimming.trimmed)                                                 cp_ref and cp_fast, each in its way
def trimmed(x: Tensor, *, rows: int) -> Tensor:
    return ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

__all__ = ["bind", "declare", "implements", "same_parameters"]

F = TypeVar("F", bound=Callable[..., Any], covariant=True)
P = ParamSpec("P")
R = TypeVar("R")


class _Implements(Protocol[F]):
    def __call__(self, implementation: Callable[..., Any], /) -> F: ...


def implements(stub: F) -> _Implements[F]:
    """A decorator that gives a function the defaults, the signature and the docstring of the stub.

    The function has the parameters of the stub, without their defaults. It may take keyword-only ones as `**arguments`,
    which then hold only the values that the caller passed.

    >>> def scaled(x: int, *, by: int = 2) -> int: ...
    >>> @implements(scaled)
    ... def scaled_by_adding(x: int, *, by: int) -> int:
    ...     return sum([x] * by)
    >>> scaled_by_adding(3), str(inspect.signature(scaled_by_adding))
    (6, "(x: 'int', *, by: 'int' = 2) -> 'int'")
    """

    def decorate(implementation: Callable[..., Any]) -> F:
        function, declared = cast(Any, implementation), cast(Any, stub)
        returns = inspect.signature(function).return_annotation
        function.__defaults__, function.__kwdefaults__ = declared.__defaults__, declared.__kwdefaults__
        function.__signature__ = inspect.signature(stub).replace(return_annotation=returns)
        function.__doc__ = function.__doc__ or stub.__doc__
        return function

    return decorate


declare = implements  # above a stub: the decorator of its implementations, which alone run the stub's examples


def same_parameters(stub: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """`implements` for a function that returns another type, and that may have a docstring of its own."""
    return cast(Any, implements(stub))


def bind(stub: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with defaults.

    Raises:
        TypeError: an argument is unknown or missing.

    >>> def scaled(*, x: int, by: int = 2) -> int: ...
    >>> bind(scaled, {"x": 1})
    {'x': 1, 'by': 2}
    >>> bind(scaled, {"y": 1})
    Traceback (most recent call last):
        ...
    TypeError: scaled(): missing a required argument: 'x'
    """
    try:
        call = inspect.signature(stub).bind(**arguments)
    except TypeError as error:
        raise TypeError(f"{stub.__qualname__}(): {error}") from None
    call.apply_defaults()
    return call.arguments
