"""The static facts of a kernel's work on its scores. Compiled kernels are kept by them."""

from __future__ import annotations

from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from cp_fast.backends.fa4.scores.tracing.trace_scores import TracedScores

__all__ = ["ScoreProgram"]


class PlaceTables(NamedTuple):
    """How a kernel finds the places of its pairs.

    by_segment: each segment has one row of a table: its document, and the places of its first rows. Without it each row
    has its own. aligned: these places are multiples of 16, and dropout, which alone asks, is on.
    """

    by_segment: bool
    aligned: bool


class ScoreProgram:
    """The scores of a kernel. The library takes it for a function, and only asks for its hash."""

    def __init__(self, traced: TracedScores, places: PlaceTables, dropout_p: float, *, guarded: bool) -> None:
        """guarded: scores and derivatives of masked pairs may be NaN or infinite."""
        self.traced, self.places, self.dropout_p, self.guarded = traced, places, dropout_p, guarded

    @cached_property
    def __cute_hash__(self) -> str:
        text = repr((_sources(), self.traced.digest, self.traced.captured, *self.places, self.dropout_p, self.guarded))
        return blake2b(text.encode(), digest_size=32).hexdigest()

    def __call__(self) -> None:
        """The library wants a callable; `score_kernels` reads the program instead."""
        raise TypeError("a ScoreProgram is data")


def _sources() -> str:
    """A digest of the code that makes kernels, so that a disk cache of another version is not used."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return blake2b(b"".join(one.read_bytes() for one in files), digest_size=16).hexdigest()
