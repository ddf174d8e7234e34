"""The interface of an attention kernel library: a batch of diagonal band tiles, forward and backward.

Every tile of every schedule is, after cropping, a rectangle of query rows and key columns crossed by a diagonal band.
One `VarlenBatch` is a batch of such rectangles that share a diagonal band, packed one after the other: what a varlen
kernel does in one launch.

    legend   n = rows of q in the launch, m = rows of k and v, h_q = g * h_kv
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, overload

import numpy as np
import torch

from cp_ref.calls.scores import ScoreTensors
from cp_ref.problems.arguments import features_of
from cp_ref.schedules.problem import ScoreSpec
from cp_ref.schedules.words import Feature

__all__ = [
    "FUSED_KERNELS",
    "Backend",
    "BackwardOperands",
    "Cumulative",
    "Gradients",
    "LaunchOptions",
    "LaunchPositions",
    "LaunchScores",
    "Outs",
    "Partial",
    "SegmentStarts",
    "VarlenBatch",
    "check_scores",
    "longest",
]

# ---- lengths on the host
#
# Cumulative lengths of a launch on the host: a tuple in use, stored as the array that planning made.


class Cumulative(Sequence[int]):
    """Cumulative lengths [n + 1]. The Python numbers are made when a backend first needs all of them. Most never do,
    and a plan has hundreds of launches of thousands of sequences.

    `bound`: the upper bound of all lengths, if they will be replaced by others; it then counts as the longest.

    >>> cu = Cumulative(np.array([0, 3, 5]))
    >>> cu == (0, 3, 5), cu[-1], cu[0:2], len(cu), cu.longest, Cumulative(np.array([0, 3, 5]), bound=8).longest
    (True, 5, (0, 3), 3, 3, 8)
    """

    def __init__(self, values: np.ndarray, bound: int | None = None) -> None:
        self.values = values
        self.bound = bound

    @cached_property
    def longest(self) -> int:
        """The largest difference of neighbours, 0 without any; or the bound."""
        return int(np.diff(self.values).max(initial=0)) if self.bound is None else self.bound

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        return tuple(self.values.tolist())

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return tuple(self.values[index].tolist()) if isinstance(index, slice) else int(self.values[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __eq__(self, other: object) -> bool:
        return self._numbers == (other._numbers if isinstance(other, Cumulative) else other)

    def __hash__(self) -> int:
        return hash(self._numbers)  # equal to a tuple, so its hash too

    def __repr__(self) -> str:
        return repr(self._numbers)


def longest(cumulative: Sequence[int]) -> int:
    """The longest of the lengths.

    >>> longest((0, 3, 5))
    3
    """
    if isinstance(cumulative, Cumulative):
        return cumulative.longest
    return max((b - a for a, b in pairwise(cumulative)), default=0)


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


# ---- launches and kernel libraries


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


class SegmentStarts(NamedTuple):
    """Where the segments of a batch lie, in any order: the first row of each, and on the device its number of rows too.
    Segments have no common rows of q, but may have common rows of k and v. Rows of q between them may be padding: what
    they hold, and what their results are, does not matter. Rows of k and v between them are tokens.
    """

    q: Sequence[int]  # [segments].
    kv: Sequence[int]  # [segments].
    device_q: torch.Tensor  # int32 [segments + 1]; the last number is not used.
    device_rows: torch.Tensor  # int32 [segments].
    device_kv: torch.Tensor  # int32 [segments + 1]; the last number is not used.
    device_columns: torch.Tensor  # int32 [segments].


@dataclass(frozen=True, slots=True)
class VarlenBatch:
    """Rectangles packed one after the other: segment s is q rows `cu_q[s]:cu_q[s+1]` by kv rows `cu_kv[s]:cu_kv[s+1]`.

    With lq and lk the segment's two lengths, row i sees column j (both from 0 inside the segment) iff

        (left is None or j >= i + lk - lq - left) and (right is None or j <= i + lk - lq + right)

    which is the bottom-right aligned window of the flash-attention family, with None for unbounded. No segment is
    empty, and every row sees at least one column. So right >= lq - lk, negative only if no row sees the last column.
    And left >= 0, since the last row's diagonal ends in the last column. Rows lie side by side, cu from 0 to the
    tensors' lengths: a kernel may read a neighbour's rows and multiply them by zero, so no row may hold a NaN that does
    not belong to the problem.

    With `starts`, the segments do not lie side by side: cu_q and cu_kv then have their lengths alone.

    A plan updated in place (`Plan.update`) has wider rules. Segments of length zero come last. Tensors have more
    rows after cu[-1]: they are finite if there is any segment, and their results are not read. `max_q` and `max_kv` are
    upper bounds. The lengths on the host are those of the current batch. A CUDA graph captured with them is replayed
    with others, so a GPU kernel reads lengths from the device only.
    """

    cu_q: Sequence[int]  # A tuple, or a lazy one: `Cumulative`.
    cu_kv: Sequence[int]
    left: int | None
    right: int | None
    device_cu_q: torch.Tensor  # int32 [segments + 1], on the tiles' device.
    device_cu_kv: torch.Tensor  # int32 [segments + 1].
    starts: SegmentStarts | None = None  # For a forward launch of a backend that has `shared_keys_tile`.
    max_q: int = field(init=False)  # The longest segment's query rows.
    max_kv: int = field(init=False)  # The longest segment's key columns.

    @property
    def first_rows(self) -> tuple[Sequence[int], Sequence[int]]:
        """The first row of each segment, of q and of kv.

        >>> VarlenBatch.pack([2, 3], [4, 3], None, 0).first_rows
        ((0, 2), (0, 4))
        """
        return (self.cu_q[:-1], self.cu_kv[:-1]) if self.starts is None else self.starts[:2]

    @property
    def updated_in_place(self) -> bool:
        """Whether the device's lengths may be replaced; those on the host are of one batch only."""
        return isinstance(self.cu_q, Cumulative) and self.cu_q.bound is not None

    def __post_init__(self) -> None:
        """Find the longest segments once: every layer's launches ask for them."""
        object.__setattr__(self, "max_q", longest(self.cu_q))
        object.__setattr__(self, "max_kv", longest(self.cu_kv))

    @staticmethod
    def pack(
        lengths_q: Sequence[int],
        lengths_kv: Sequence[int],
        left: int | None,
        right: int | None,
        device: torch.device | str = "cpu",
    ) -> VarlenBatch:
        """Segments of these lengths, one after the other from row 0 and column 0.

        >>> VarlenBatch.pack([2, 3], [4, 3], None, 0).cu_q
        (0, 2, 5)
        """
        cu_q, cu_kv = tuple(accumulate(lengths_q, initial=0)), tuple(accumulate(lengths_kv, initial=0))
        on_device_q = torch.tensor(cu_q, dtype=torch.int32, device=device)
        return VarlenBatch(cu_q, cu_kv, left, right, on_device_q, torch.tensor(cu_kv, dtype=torch.int32, device=device))

    def alone(self, s: int) -> VarlenBatch:
        """Segment s as a separate launch, its rows and columns counted from 0.

        >>> VarlenBatch.pack([2, 3], [4, 3], None, 0).alone(1).device_cu_q
        tensor([0, 3], dtype=torch.int32)
        """
        cu_q, cu_kv = self.cu_q[s : s + 2], self.cu_kv[s : s + 2]
        on_device_q, on_device_kv = self.device_cu_q[s : s + 2], self.device_cu_kv[s : s + 2]
        return VarlenBatch(
            (0, cu_q[1] - cu_q[0]),
            (0, cu_kv[1] - cu_kv[0]),
            self.left,
            self.right,
            on_device_q - on_device_q[:1],
            on_device_kv - on_device_kv[:1],
        )


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
    def backward(self, operands: BackwardOperands, segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        """The launch's share of the gradients.

        Let s be the scores, p = exp(s - lse), dp = dout . v and delta = sum(dout * out) - dlse. Then:

            ds = p * (dp - delta), times the slope of s in scale * q.k
            dq = scale * ds @ k, dk = scale * ds^T @ q, dv = p^T @ dout

        With dropout p is multiplied by its factors in dv, and dp by the same factors.
        Every library computes delta itself, so it is not passed.
        """

    def backward_freeing(
        self, given: list[BackwardOperands], segments: VarlenBatch, options: LaunchOptions
    ) -> Gradients:
        """`backward` of the operands in a list, which it empties. A library may free operands without another reference
        once its kernels have read them, before it returns.
        """
        return self.backward(given.pop(), segments, options)

    def check_score_inputs(self, scores: ScoreSpec, inputs: ScoreTensors) -> None:  # noqa: B027
        """Raise Unsupported for a score_mod that the library cannot compile; most run any function. It is asked for
        inputs with features alone.
        """


def check_scores(backend: Backend, options: LaunchOptions) -> None:
    """Raise ValueError for scores that the backend's features already exclude, rather than compute something else."""
    for feature in options.features - backend.features:
        raise ValueError(f"backend {backend.name!r} has no {feature}: choose by Feature.{feature.name}")
