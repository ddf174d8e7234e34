"""The arguments of a launch with scores: a program, and the tensors and the number that it reads.

A program is made once for each function, dtypes of captured tensors, and kind of places. So other tensors, and other
lengths, compile no new kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cp_fast.kernels.attention.backend_protocol import LaunchScores
from cp_fast.kernels.attention.fa4.scores.trace_scores import TracedScores, trace_scores
from cp_ref.calls.scores import ScoreTensors
from cp_ref.schedules.problem import ScoreSpec
from cp_ref.schedules.words import Unsupported

__all__ = [
    "LaunchProgram",
    "ScoreProgram",
    "launch_program",
    "traced_scores",
]

# ---- what compiled kernels are kept by
#
# The static facts of a kernel's work on its scores. Compiled kernels are kept by them.


class PlaceTables(NamedTuple):
    """How a kernel finds the places of its pairs.

    by_segment: each segment has one row of a table: its sequence, and the places of its first rows. Without it each row
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


# ---- a launch's program and tensors


SLOPES = "alibi slopes"  # No argument of a function has this name.

Form = tuple[str, torch.dtype, tuple[int, ...]]  # A captured tensor: name, dtype, shape.


class LaunchProgram(NamedTuple):
    """The program of a launch, its tensors in `launch_tensors`' order, and its first query head."""

    program: ScoreProgram
    tensors: list[torch.Tensor]
    first_head: int


def launch_program(given: LaunchScores, options: ScoreSpec) -> LaunchProgram:
    """The program of a launch, and what it reads."""
    inputs, positions = given.inputs, given.positions
    captured = _captured(inputs)
    by_segment = positions.segment_places is not None
    places = PlaceTables(by_segment=by_segment, aligned=by_segment and positions.aligned and inputs.dropout_p > 0)
    traced = _traced(inputs.score_mod, options.softcap, _forms(captured))
    program = _program(traced, places, inputs.dropout_p, inputs.score_mod is not None)
    if positions.segment_places is not None:
        tensors = [positions.segment_places.flatten()]
    else:
        tensors = [positions.q_sequences, positions.q_positions, positions.q_diagonals, positions.k_positions]
    if inputs.dropout_seed is not None and inputs.dropout_p:
        tensors.append(inputs.dropout_seed.reshape(1).view(torch.int32))  # The low 32 bits, and the high ones.
    return LaunchProgram(program, [*tensors, *(_flat(captured[name]) for name in traced.captured)], given.first_head)


def traced_scores(inputs: ScoreTensors, softcap: float) -> TracedScores:
    """The scores of a call, traced.

    Raises:
        Unsupported: score_mod has an operation that no expression has.
    """
    return _traced(inputs.score_mod, softcap, _forms(_captured(inputs)))


def _captured(inputs: ScoreTensors) -> Mapping[str, torch.Tensor]:
    slopes = {} if inputs.alibi_slopes is None else {SLOPES: inputs.alibi_slopes}
    return {**slopes, **inputs.aux_tensors}


def _forms(captured: Mapping[str, torch.Tensor]) -> tuple[Form, ...]:
    for name, x in captured.items():
        if name != SLOPES and not 0 < x.numel() < 2**31:  # Slopes are empty where there is no sequence, so no launch.
            reason = f"aux_tensors[{name!r}] has shape {list(x.shape)}; it must have from 1 to 2**31 - 1 elements"
            raise Unsupported("score_mod on backend 'fa4'", {}, reason)
    return tuple((name, x.dtype, tuple(x.shape)) for name, x in captured.items())


def _flat(x: torch.Tensor) -> torch.Tensor:
    """All elements in one row: the kernel knows the sizes, so that strides decide nothing."""
    return x.contiguous().view(torch.uint8 if x.dtype == torch.bool else x.dtype).flatten()


@lru_cache(256)
def _traced(score_mod: Callable[..., torch.Tensor] | None, softcap: float, forms: tuple[Form, ...]) -> TracedScores:
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape in forms}
    name = getattr(score_mod, "__qualname__", "score_mod")
    return trace_scores(_whole(score_mod, softcap), tensors, f"score_mod {name}")


@lru_cache(256)
def _program(traced: TracedScores, places: PlaceTables, dropout_p: float, guarded: bool) -> ScoreProgram:
    return ScoreProgram(traced, places, dropout_p, guarded=guarded)


def _whole(score_mod: Callable[..., torch.Tensor] | None, softcap: float) -> Callable[..., torch.Tensor]:
    """All that happens to a score, from scale * q.k to the mask: `cp_ref.calls.scores`."""

    def modified(
        score: torch.Tensor,
        b: torch.Tensor,
        h: torch.Tensor,
        q_idx: torch.Tensor,
        kv_idx: torch.Tensor,
        diagonal: torch.Tensor,
        **captured: Any,
    ) -> torch.Tensor:
        slopes = captured.pop(SLOPES, None)
        if softcap > 0:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            slope = slopes[h] if slopes.dim() == 1 else slopes[b, h]
            score = score - slope * (diagonal - kv_idx).abs()
        return score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx, **captured)

    return modified
