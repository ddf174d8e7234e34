"""Compiler passes that a benchmark switches off, by the words of its option `--without`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from cp_fast.passes import PASSES, switched_off

__all__ = ["passes_of", "switched"]

_NAMES = tuple(one.name for one in PASSES)


def passes_of(words: str) -> tuple[str, ...]:
    """The words with commas; "each" stands for "-", every pass, and "all"."""
    return ("-", *_NAMES, "all") if words == "each" else tuple(words.split(","))


def switched(word: str) -> Callable[[], AbstractContextManager[None]]:
    """Plans are made, and called, inside this: "-" for all passes, "all" for none of them, or without one."""
    return partial(switched_off, *{"-": (), "all": _NAMES}.get(word, (word,)))
