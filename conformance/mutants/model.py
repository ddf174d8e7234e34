"""A mutant: the reference with one bug planted."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from conformance.record import Level

__all__ = ["Mutant", "wrap"]


@dataclass(frozen=True)
class Mutant:
    """`spoil` makes the wrong variant of what `target` is: a dotted name, or several with spaces between.

    `tier` is the one that has to see it within the quick profile, at `level`; `text` says what is wrong. Below the
    level "schedule" the target is a member of the implementation ("thd.pad_v"), and the mutant a copy with that member
    spoiled: the reference itself, which judges there, stays right.
    """

    text: str
    target: str
    spoil: Callable[[Any], Any]
    tier: str
    level: Level = "schedule"

    @contextmanager
    def planted(self, impl: Any = None) -> Iterator[Any]:
        """Gives what to play: `impl`, with the reference wrong inside this context, or a wrong copy of it."""
        if self.level != "schedule":
            yield _with_member(impl, self.target.split("."), self.spoil)
            return
        with ExitStack() as stack:
            for target in self.target.split():
                stack.enter_context(mock.patch(target, self.spoil(pkgutil.resolve_name(target))))
            yield impl


def _with_member(owner: Any, path: list[str], spoil: Callable[[Any], Any]) -> Any:
    """A copy of an object's public members, with one of them, found by its path, spoiled."""
    copy = SimpleNamespace(**{name: getattr(owner, name) for name in dir(owner) if not name.startswith("_")})
    member = getattr(owner, path[0])
    setattr(copy, path[0], _with_member(member, path[1:], spoil) if path[1:] else spoil(member))
    return copy


def wrap(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """A spoil for a function: `change(original, *arguments)` is called in its place."""

    def spoil(original: Any) -> Any:
        def wrong(*arguments: Any, **named: Any) -> Any:
            return change(original, *arguments, **named)

        return wrong

    return spoil
