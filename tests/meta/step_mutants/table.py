"""The planted mistakes, each with the model and the ranks that show it, and the name of its cause."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.meta.step_mutants.model import Shape

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    """A mistake by its name in `model.py`; `cause` is what the report should name, "" where it has no name."""

    bug: str
    cause: str
    shape: Shape = field(default_factory=Shape)
    how: dict[str, Any] = field(default_factory=lambda: {"cp_size": 2})
    first: str = ""  # a part of the report's first difference


_PADDED = Shape(packed=False)
MUTANTS = (
    Mutant("loss times ranks", "factor"),
    Mutant("loss over ranks", "factor", _PADDED, {"cp_size": 4, "cp_comm_type": "all_gather"}),
    Mutant("gradients averaged", "factor", Shape(), {"cp_size": 2, "dp_size": 2}),
    Mutant("loss averaged", "factor"),
    Mutant("loss of the rank", "factor"),
    Mutant("mean of each rank", "mean-per-rank", Shape(), {"cp_size": 2, "layout": "contiguous"}),
    Mutant("labels shifted after the cut", "labels"),
    Mutant("second labels shifted after the cut", "labels", Shape(mtp=True)),
    Mutant("labels not shifted", ""),
    Mutant("positions of the slice", "positions"),
    Mutant("positions off by the rank", "positions", Shape(), {"cp_size": 2, "layout": "balanced"}),
    Mutant("learned positions of the slice", "positions", Shape(packed=False, learned=True)),
    Mutant("sinks reduced twice", "sinks", Shape(sinks=True)),
    Mutant("sinks not reduced", "reduction", Shape(sinks=True)),
    Mutant("gradients not reduced", "reduction"),
    Mutant("one weight not reduced", "reduction"),
    Mutant("reduced over context parallel ranks alone", "reduction", Shape(), {"cp_size": 2, "dp_size": 2}),
    Mutant("tied weights reduced twice", "reduction", Shape(tied=True)),
    Mutant("a frozen parameter", "reduction"),
    Mutant("padding counts", "padding", _PADDED),
    Mutant("mask not applied", "padding"),
    Mutant("mask of the first slice", "padding", _PADDED),
    Mutant("one layer on its slice", "slice", Shape(layers=3, packed=False)),
    Mutant("all layers on their slices", "slice", _PADDED),
    Mutant("convolution of the slice", "slice", Shape(conv=True)),
    Mutant("linear layer of the slice", "slice", Shape(linear=True)),
    Mutant("states go on in one process", "leak", Shape(linear=True), first="blocks.0"),
    Mutant("", "random", Shape(dropout=0.2)),
    Mutant("", "random", Shape(noise=0.5)),
    Mutant("reduced for each micro-batch", "micro-batches", Shape(accumulate=2)),
    Mutant("mean of each micro-batch", "micro-batches", Shape(accumulate=2)),
    Mutant("loss over micro-batches", "micro-batches", Shape(accumulate=3)),
    Mutant("clipped before the sum", "clipping", Shape(clip=0.1)),
    Mutant("clipped by the rank's norm", "clipping", Shape(clip=0.1)),
    Mutant("NaN on one rank", "not-finite"),
    Mutant("tied in one process alone", "tied"),
    Mutant("a buffer of the rank's tokens", "buffers", Shape(tracked=True)),
    Mutant("ids of another layout", ""),
    Mutant(
        "a flag at the slice's start", "", Shape(flagged=True), first="what comes before blocks.0 (Block) in the model"
    ),
    Mutant("documents see each other", "", first="attention"),
    Mutant("window over ranks alone", "", first="attention"),
)
