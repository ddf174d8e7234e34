"""A mutant: an implementation with one bug planted."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

from conformance.implementation import Implementation, load
from conformance.judge.run_record import Level
from cp_fast.movers.select_kernels import use

__all__ = ["Mutant", "loaded", "wrap", "wrap_operation"]

Package = Literal["cp_ref", "cp_fast"]


@dataclass(frozen=True)
class Mutant:
    """`change` makes the wrong variant of what `target` is: a dotted name, or several with spaces between.

    `tier` is the one that has to see it within the quick profile, at `level`; `text` says what is wrong. `where` names
    the function of the tier's level, or the entry of its table, that has to see it; without it the whole table may,
    and below the level "schedule" the function with the target's own name.
    """

    text: str
    target: str
    change: Callable[[Any], Any]
    tier: str
    level: Level = "schedule"
    where: str = ""

    @property
    def package(self) -> Package:
        """The package that the mutant is of: the one that its target lies in."""
        return "cp_fast" if self.target.startswith("cp_fast.") else "cp_ref"

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Inside, the package is wrong, for every thread. `cp_fast` computes with PyTorch's operators, which mutants
        of its kernels are of."""
        with ExitStack() as stack:
            if self.package == "cp_fast":
                stack.enter_context(use("torch"))
            for target in self.target.split():
                stack.enter_context(mock.patch(target, self.change(pkgutil.resolve_name(target))))
            yield


def loaded(package: Package) -> Implementation:
    """The implementation that mutants of a package are planted in."""
    return load("conformance.adapters.cp_fast:cpu" if package == "cp_fast" else package)


def wrap(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """A change of a function: `change(original, *arguments)` is called in its place."""

    def changed(original: Any) -> Any:
        def wrong(*arguments: Any, **named: Any) -> Any:
            return change(original, *arguments, **named)

        return wrong

    return changed


def wrap_operation(change: Callable[..., Callable[[Any], None]]) -> Callable[[Any], Any]:
    """A change of a function that makes operations (`cp_fast.runtime`): `change(buffers, one, operation)` yields what
    runs in the place of the operation that the function made of the instruction `one`.
    """

    def changed(original: Any) -> Any:
        def wrong(buffers: Any, one: Any, **named: Any) -> Any:
            return change(buffers, one, original(buffers, one, **named), **named)

        return wrong

    return changed
