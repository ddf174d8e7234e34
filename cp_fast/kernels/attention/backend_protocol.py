"""The interface of an attention kernel library: forward and backward launches of one batch of tiles (`VarlenBatch`).

A launch has n rows of q and m rows of k and v; h_q = g * h_kv.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_ref.calls.scores import ScoreTensors
from cp_ref.problems.arguments import features_of
from cp_ref.schedules.problem import ScoreSpec
from cp_ref.schedules.words import Feature

__all__ = [
    "FUSED_KERNELS",
    "Backend",
    "BackwardOperands",
    "Gradients",
    "LaunchOptions",
    "LaunchPositions",
    "LaunchScores",
    "Outs",
    "Partial",
    "check_scores",
]


class Backend(ABC):
    """One kernel library.

    Attributes:
        name: as `ContextParallel` takes it.
        features: of the kernel alone: heads, dims, scores, results, devices, dtypes.
        rounded_gradients: whether gradients always come in the inputs' dtype (`low_precision_grads`).
        shared_keys_tile: the rows of a tile, with the query heads of a kv head, if segments of a forward launch may
            share keys (`VarlenBatch.starts`); else 0.
        writes_rows: whether forward launches take operands with any strides, and write to `Outs`, in the head dims of
            the problem (`pads`).
        key_block: a multiple of the rows that the library's blocks of keys have, for all head dims. A row's bits depend
            on nothing but the keys that it sees and where blocks of keys begin, at such multiples of a segment:
            measured (docs/how_to/bits.md). 0: nothing is known.
        bits_of: the results of which this is known; gradients if they are deterministic.
    """

    name: str
    features: frozenset[Feature]
    rounded_gradients: bool = False
    shared_keys_tile: int = 0
    writes_rows: bool = False
    key_block: int = 0
    bits_of: tuple[str, ...] = ("out", "lse", "dq", "dk", "dv")

    @abstractmethod
    def why_not(self) -> str | None:
        """None if the library works on this machine, else the reason in one line. May import it, runs nothing."""

    def pads(self, d_qk: int, d_v: int) -> bool:
        """Whether the library runs these head dims with larger ones; then it writes to no `Outs`."""
        return False

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: VarlenBatch,
        options: LaunchOptions,
        outs: Outs | None = None,
    ) -> Partial:
        """Attention of q [n, h_q, d_qk] over k [m, h_kv, d_qk], v [m, h_kv, d_v], segment by segment.

        Args:
            outs: where the result is written; only a library with `writes_rows` is given it.
        """

    @abstractmethod
    def backward(self, given: list[BackwardOperands], segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        """The launch's share of the gradients.

        Args:
            given: a list of one, the operands. The library takes them out. So tensors that nobody else refers to can be
                freed once its kernels have read them, before it returns.

        Let s be the scores, p = exp(s - lse), dp = dout . v and delta = sum(dout * out) - dlse. Then:

            ds = p * (dp - delta), times the slope of s in scale * q.k
            dq = scale * ds @ k, dk = scale * ds^T @ q, dv = p^T @ dout

        With dropout p is multiplied by its factors in dv, and dp by the same factors.
        Every library computes delta itself, so it is not passed.
        """

    def check_score_inputs(self, scores: ScoreSpec, inputs: ScoreTensors) -> None:  # noqa: B027
        """Raise Unsupported for a score_mod that the library cannot compile; most run any function. It is asked for
        inputs with features alone.
        """


def check_scores(backend: Backend, options: LaunchOptions) -> None:
    """Raise ValueError for scores that the backend's features already exclude, rather than compute something else."""
    for feature in options.features - backend.features:
        raise ValueError(f"backend {backend.name!r} has no {feature}: choose by Feature.{feature.name}")


FUSED_KERNELS = frozenset(
    {
        Feature.GQA,
        Feature.ASYMMETRIC_DIMS,
        Feature.GQA_ASYMMETRIC_DIMS,
        Feature.HEAD_DIM_OVER_128,
        Feature.HEAD_DIM_ODD,
        Feature.LSE_GRADIENT,
        Feature.CUDA,
        Feature.FLOAT16,
        Feature.BFLOAT16,
    }
)
"""The features that every library of fused kernels has."""


# ---- what a launch is given


class LaunchOptions(NamedTuple):
    """The options of launches. All launches of a pass share them, except `score_inputs`."""

    scores: ScoreSpec
    deterministic: bool = False  # Equal bits from equal backward launches: only for a backend with DETERMINISTIC.
    score_inputs: LaunchScores | None = None  # Where scores depend on the places of their rows and heads.

    @property
    def features(self) -> frozenset[Feature]:
        """The features that the scores require."""
        more = frozenset[Feature]() if self.score_inputs is None else self.score_inputs.inputs.features
        return features_of(self.scores) | more


class BackwardOperands(NamedTuple):
    """The inputs of a backward launch. out, lse and dlse are the *whole* problem's for these rows, over all tiles of
    all ranks, sinks included.
    """

    dout: torch.Tensor  # [n, h_q, d_v], in q's dtype, as all up to out.
    q: torch.Tensor  # [n, h_q, d_qk].
    k: torch.Tensor  # [m, h_kv, d_qk].
    v: torch.Tensor  # [m, h_kv, d_v].
    out: torch.Tensor  # [n, h_q, d_v].
    lse: torch.Tensor  # [h_q, n], float32, float64 for float64.
    dlse: torch.Tensor | None  # [h_q, n], as lse; None for zero; only a backend with LSE_GRADIENT takes one.


class Outs(NamedTuple):
    """Where a forward launch writes the results of its segments' rows, with any strides. Other rows stay."""

    out: torch.Tensor  # [n, h_q, d_v], in q's dtype.
    lse: torch.Tensor  # [h_q, n], float32, or float64 for float64 inputs.


# ---- what a launch gives


class Partial(NamedTuple):
    """The result of one launch for its q rows, contiguous."""

    out: torch.Tensor  # [n, h_q, d_v], normalised over the launch's own columns, with dropout; any float dtype.
    lse: torch.Tensor  # [h_q, n], natural logarithm; float32, or float64 for float64 inputs.
    max_logit: torch.Tensor | None  # [h_q], largest visible score after score_mod; None without Feature.MAX_LOGIT.


class Gradients(NamedTuple):
    """One launch's addition to the gradients of its q rows and kv rows, contiguous; any float dtype."""

    dq: torch.Tensor  # [n, h_q, d_qk].
    dk: torch.Tensor  # [m, h_kv, d_qk].
    dv: torch.Tensor  # [m, h_kv, d_v].


# ---- places of a launch's rows and heads
#
# The places of a launch's rows and heads, for ALiBi, score_mod and dropout.


class LaunchPositions(NamedTuple):
    """A number for each row of a launch, in the order in which the launch reads its rows.

    Positions count the slots of a sequence from its first one. All rows of a segment are of one sequence. In a plan
    updated in place the tables are as long as the tensors, and 0 behind the last segment.

    Most launches have consecutive positions in each segment. They have a shorter table too, of which a kernel may make
    use: `segment_places`. `aligned`: whether it is there, and all its positions are multiples of 16.
    """

    q_sequences: torch.Tensor  # int32 [n]: the number of each query's sequence in the batch.
    q_positions: torch.Tensor  # int32 [n]: its position inside the sequence.
    q_diagonals: torch.Tensor  # int32 [n]: its position + len_kv - len_q: the key that it is aligned to.
    k_positions: torch.Tensor  # int32 [m]: the position of each key.
    segment_places: torch.Tensor | None = None  # int32 [4, segments]: sequence, first q position, diagonal, k position.
    aligned: bool = False


class LaunchScores(NamedTuple):
    """The inputs of a call's scores, and where the rows and heads of one launch are."""

    positions: LaunchPositions
    first_head: int  # The number of the launch's first query head, of all query heads.
    inputs: ScoreTensors  # Of the call: slopes of all heads.
