"""Public functions of both packages: a stub has the parameters, the defaults and the docstring, without a body.

def trimmed(x: Tensor, *, rows: int = 1) -> Tensor:                           cp_ref/calls/trimming.py
    "The first rows of ..."

@implements(trimming.trimmed)                                                 cp_ref and cp_fast, each in its way
def trimmed(x: Tensor, *, rows: int) -> Tensor:
    return ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar, cast

__all__ = [
    "bind",
    "declare",
    "implements",
    "not_a_dataclass",
    "refuse_names",
    "replaced",
    "same_parameters",
]

F = TypeVar("F", bound=Callable[..., Any], covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


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
        signature, returns = inspect.signature(stub), inspect.signature(function).return_annotation
        named = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is not p.empty]
        function.__defaults__, function.__kwdefaults__ = declared.__defaults__, {p.name: p.default for p in named}
        function.__signature__ = signature.replace(return_annotation=returns)
        function.__doc__ = function.__doc__ or stub.__doc__
        return function

    return decorate


declare = implements  # above a stub: the decorator of its implementations, which alone run the stub's examples


def same_parameters(stub: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """`implements` for a function that returns another type, and may have another docstring."""
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


def not_a_dataclass(kind: type[T]) -> type[T]:
    """A decorator above `dataclass`: `is_dataclass` is False for the class.

    PyTorch then hands its objects on unchanged. fully_shard with a mixed precision policy copies the dataclasses among
    a module's arguments, field by field.

    >>> from dataclasses import dataclass, is_dataclass
    >>> @not_a_dataclass
    ... @dataclass(frozen=True)
    ... class Pair:
    ...     first: int
    ...     second: int = 2
    >>> Pair(1), is_dataclass(Pair), replaced(Pair(1), second=3)
    (Pair(first=1, second=2), False, Pair(first=1, second=3))
    """
    made: Any = kind
    names = [field.name for field in fields(made) if field.init]

    def replace(self: Any, **changes: Any) -> Any:
        return type(self)(**{name: getattr(self, name) for name in names} | changes)

    made.__replace__ = replace  # of copy.replace
    del made.__dataclass_fields__
    return kind


def replaced(thing: T, **changes: Any) -> T:
    """An object of an `not_a_dataclass` class with other values of some arguments."""
    return cast(Any, thing).__replace__(**changes)


def refuse_names(module: str, instead: dict[str, str]) -> Callable[[str], NoReturn]:
    """A module's `__getattr__` that names the replacement of what other libraries have and this package has not.

    Args:
        instead: by name, what to use.

    >>> refuse_names("ring", {"stripe": "use zigzag"})("stripe")
    Traceback (most recent call last):
        ...
    ImportError: ring has no stripe; use zigzag
    """

    def missing(name: str) -> NoReturn:
        if name in instead:  # an AttributeError's words would be lost in `from module import name`
            raise ImportError(f"{module} has no {name}; {instead[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing
