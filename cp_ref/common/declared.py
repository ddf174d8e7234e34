"""Public functions that `cp_ref` and `cp_fast` both have: parameters, defaults and docstring are declared once.

    @declare                                                                      cp_ref/common/trimming.py
    def trimmed(x: Tensor, *, rows: int = 1) -> Tensor:
        "The first rows of ..."

    @trimming.trimmed                                                             cp_ref and cp_fast, each in its way
    def trimmed(x: Tensor, *, rows: int) -> Tensor:
        return ...

A declaration has no body: its worked examples run on the implementations, in both packages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, cast

__all__ = ["Declaration", "declare", "implements", "parameters_of"]

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


class Declaration(Generic[F]):
    """A public function without its body. As a decorator it makes another function its implementation."""

    def __init__(self, function: F) -> None:
        self.function = function
        self.signature = inspect.signature(function)

    def __call__(self, implementation: Callable[..., Any]) -> F:
        """The implementation, with the declared defaults, signature and docstring.

        It has the declared parameters, without their defaults; it may take keyword-only ones as `**arguments`, which
        then hold what the caller gave.

        >>> @declare
        ... def scaled(x: int, *, by: int = 2) -> int: ...
        >>> @scaled
        ... def scaled_by_adding(x: int, *, by: int) -> int:
        ...     return sum([x] * by)
        >>> scaled_by_adding(3), str(inspect.signature(scaled_by_adding))
        (6, "(x: 'int', *, by: 'int' = 2) -> 'int'")
        """
        function, declared = cast(Any, implementation), cast(Any, self.function)
        function.__defaults__, function.__kwdefaults__ = declared.__defaults__, declared.__kwdefaults__
        function.__signature__, function.__doc__ = self.signature, declared.__doc__
        return function

    def bind(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, with defaults.

        Raises:
            TypeError: one that is not declared, or one that is missing.

        >>> @declare
        ... def scaled(*, x: int, by: int = 2) -> int: ...
        >>> scaled.bind({"x": 1})
        {'x': 1, 'by': 2}
        >>> scaled.bind({"y": 1})
        Traceback (most recent call last):
            ...
        TypeError: scaled(): missing a required argument: 'x'
        """
        try:
            call = self.signature.bind(**arguments)
        except TypeError as error:
            raise TypeError(f"{self.function.__qualname__}(): {error}") from None
        call.apply_defaults()
        return call.arguments


def declare(function: F) -> Declaration[F]:
    """The function as a declaration: only its parameters and its docstring are used."""
    return Declaration(function)


def implements(declared: Declaration[Callable[P, Any]]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """The declaration as a decorator, for an implementation whose return type belongs to one package."""
    return cast(Any, declared)


def parameters_of(declared: Declaration[Callable[P, Any]]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """For another declaration, written with `**arguments`, that has the same parameters.

    >>> @declare
    ... def known(*, cp: int, softcap: float = 0.0) -> str: ...
    >>> @declare
    ... @parameters_of(known)
    ... def other(**arguments) -> bool: ...
    >>> str(other.signature)
    "(*, cp: 'int', softcap: 'float' = 0.0) -> 'bool'"
    """

    def declare_again(function: Callable[..., R]) -> Callable[P, R]:
        returns = inspect.signature(function).return_annotation
        function.__signature__ = declared.signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
        return function

    return declare_again
