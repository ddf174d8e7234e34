"""A context-parallel attention problem as integers: what is computed, with no tensor and no device in sight.

A `Problem` decides the visible pairs, the owners and the messages; two ranks that hold equal problems make equal
schedules. It has one canonical text, so a failing case can be printed, mailed and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING

from cp_ref.spec.arguments.argument_words import canonical_layout
from cp_ref.spec.arguments.single_values import parse_call
from cp_ref.spec.masks.read_areas import AttentionSliceRow
from cp_ref.spec.tables.diagonal_band import DiagonalBand
from cp_ref.spec.tables.score_options import ScoreOptions
from cp_ref.spec.tables.sequences import Sequence, Sequences

if TYPE_CHECKING:
    from cp_ref.spec.tables.ownership import Ownership
    from cp_ref.spec.tables.workload import Workload

__all__ = ["Problem", "Sequence", "Sequences"]


@dataclass(frozen=True)
class Problem:
    """One attention call over all ranks. Lengths in tokens, global (before sharding).

    `window_size` is (left, right) with -1 for unbounded, as the user gave it; `band` gives the resulting diagonal band
    of a sequence. `areas`, as the user gave them, replace mask and window, which then have their defaults and mean
    nothing. `a2a_size` is the size of the inner group of "a2a+p2p"; it is `cp_size` for "a2a" and 1 for the others.
    `layout` is one of `LAYOUTS` ("zigzag" becomes "dual_chunk"), or a table: rows (rank, sequence, start, stop), in the
    order of each rank's buffer. `score_mod` is the digest of a function (`cp_ref.common.scores`), "" for none.

    >>> p = Problem(cp_size=2, sequences=(Sequence(7, 7, 8, 8),), attn_mask_type="padding_causal")
    >>> p.band(p.sequences[0]), p.pairs
    (DiagonalBand(lo=None, hi=0), 28)
    >>> Problem.parse(str(p)) == p
    True
    """

    cp_size: int
    sequences: Seq[Sequence]
    cp_comm_type: str = "p2p"
    a2a_size: int = 1
    layout: str | tuple[tuple[int, int, int, int], ...] = "dual_chunk"
    qkv_format: str = "bshd"
    attn_mask_type: str = "causal"
    window_size: tuple[int, int] = (-1, -1)
    areas: tuple[AttentionSliceRow, ...] | None = None
    heads_q: int = 1
    heads_kv: int = 1
    d_qk: int = 8
    d_v: int = 8
    softmax_scale: float | None = None
    softcap: float = 0.0
    softmax_type: str = "vanilla"
    score_mod: str = ""
    dropout_p: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", canonical_layout(self.layout))

    @property
    def causal(self) -> bool:
        """Whether a query never sees a later key than its own (aligned) position."""
        return self.areas is None and "causal" in self.attn_mask_type

    @property
    def position_free_scores(self) -> bool:
        """Whether a score depends on its query, its key and a slope of its head alone, and no pair is dropped. If not,
        a kernel needs the number of each row's document and of each head.
        """
        return not self.score_mod and self.dropout_p == 0

    @property
    def bottom_right(self) -> bool:
        """Whether the diagonal is aligned to the last query and the last key."""
        return self.areas is None and self.attn_mask_type.endswith("bottom_right")

    @property
    def scale(self) -> float:
        """The factor of q.k: `softmax_scale`, or d_qk ** -0.5."""
        return self.d_qk**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def scores(self) -> ScoreOptions:
        """The options of scores, for the place where scores are computed."""
        return ScoreOptions(self.scale, self.softcap, self.score_mod, self.dropout_p)

    @property
    def group_size(self) -> int:
        """How many query heads share a kv head."""
        return self.heads_q // self.heads_kv

    @cached_property
    def lengths(self) -> Sequences:
        """The sequences as columns of integers."""
        return Sequences.of(self.sequences)

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that are equal for equal problems, and for no others; made from the columns in a millisecond."""
        digest = blake2b(repr([getattr(self, f.name) for f in fields(self) if f.name != "sequences"]).encode())
        columns = self.lengths.columns
        for number, column in enumerate(columns):  # of equal ones, ten thousand long, the first: of others its number
            same = next(n for n, other in enumerate(columns) if other is column or other == column)
            digest.update(bytes([same]))
            if same == number:
                digest.update(column.tobytes())
        return digest.digest()[:32]

    @cached_property
    def workload(self) -> Workload:
        """The problem as tables: attention slices and ownership."""
        from cp_ref.spec.tables.workload import workload_of

        return workload_of(self)

    @cached_property
    def slots(self) -> Ownership:
        """The owner of each slot, padding included: the layout."""
        from cp_ref.spec.layouts.named_layouts import slots_of

        return slots_of(self)

    @property
    def layout_name(self) -> str:
        """The layout in a word: "given" for a table."""
        return self.layout if isinstance(self.layout, str) else "given"

    @cached_property
    def starts_q(self) -> tuple[int, ...]:
        """Where each sequence's query slots begin in the packed global buffer, and their total:
        `cu_seqlens_q_padded`.
        """
        return tuple(accumulate(self.lengths.slots_q, initial=0))

    @cached_property
    def starts_kv(self) -> tuple[int, ...]:
        """The first slot of each sequence's keys in the global buffer, and the end: `cu_seqlens_kv_padded`."""
        return tuple(accumulate(self.lengths.slots_kv, initial=0))

    def starts(self, side: str) -> tuple[int, ...]:
        """`starts_q` or `starts_kv`; `side` is "q" or "kv"."""
        return self.starts_q if side == "q" else self.starts_kv

    def band(self, sequence: Sequence) -> DiagonalBand:
        """The visible pairs of one sequence (its real tokens), by DESIGN section 3. Not with attention slices, which
        know no sequences.
        """
        assert self.areas is None
        left, right = self.window_size
        if self.causal:
            right = 0
        shift = sequence.len_kv - sequence.len_q if self.bottom_right else 0
        return DiagonalBand(None if left < 0 else shift - left, None if right < 0 else shift + right)

    @cached_property
    def pairs(self) -> int:
        """How many (query, key) pairs are visible, over all sequences; for each query head."""
        return int(self.workload.areas.pairs.sum())

    def __str__(self) -> str:
        """The canonical text, one line: every field that differs from its default. `parse` reads it back."""
        words: list[str] = []
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "sequences":
                value = [(s.len_q, s.len_kv, s.slots_q, s.slots_kv) for s in value]
            elif value == f.default:
                continue
            words.append(f"{f.name}={value!r}")
        return f"Problem({', '.join(words)})"

    @staticmethod
    def parse(text: str) -> Problem:
        """The problem that `str` printed. Raises ValueError on anything else."""
        try:
            _, unnamed, values = parse_call(text, ["Problem"])
            if unnamed:
                raise ValueError("every field has to be named")
            if "sequences" not in values:
                raise ValueError("sequences is missing")
            values["sequences"] = tuple(Sequence(*lengths) for lengths in values["sequences"])
            return Problem(**values)
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"cannot read a problem from {text!r}: {error}") from error
