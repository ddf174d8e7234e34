"""Problems with areas, as integers: documents with padding, cross attention, random disjoint areas, named masks."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from hypothesis import strategies as st

from conformance.problems.strategies import areas
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.words import CP_COMM_TYPES, LAYOUTS, SOFTMAX_TYPES

__all__ = ["problems"]


@st.composite
def problems(draw: st.DrawFn, cp_sizes: Seq[int] = (1, 2, 3, 4), layouts: Seq[str] = LAYOUTS) -> Problem:
    """Problems of every schedule, with few rows; of `layouts` where queries and keys lie in the same places."""
    cp_size, comm = draw(st.sampled_from(cp_sizes)), draw(st.sampled_from(CP_COMM_TYPES))
    inner = {"a2a": cp_size, "a2a+p2p": draw(st.sampled_from([n for n in (1, 2, 3, 4) if cp_size % n == 0]))}
    size = inner.get(comm, 1)
    heads_kv = draw(st.sampled_from([n for n in range(1, 2 * size + 1) if n % size == 0 or size % n == 0]))
    itself = draw(st.booleans())
    sequences: list[Sequence] = []
    for _ in range(draw(st.integers(0, 3))):
        slots_q, slots_kv = (draw(st.integers(0, 20)) for _ in range(2))
        len_q, len_kv = draw(st.integers(0, slots_q)), draw(st.integers(0, slots_kv))
        sequences.append(
            Sequence(len_q, len_q, slots_q, slots_q) if itself else Sequence(len_q, len_kv, slots_q, slots_kv)
        )
    return Problem(
        cp_size,
        tuple(sequences),
        comm,
        size,
        layout=draw(st.sampled_from(layouts if itself else ("dual_chunk", "contiguous"))),
        qkv_format="thd",
        areas=draw(areas(tuple(sequences))),
        heads_q=math.lcm(heads_kv, size) * draw(st.integers(1, 2)),
        heads_kv=heads_kv,
        d_qk=draw(st.sampled_from([3, 4])),
        d_v=draw(st.sampled_from([2, 4])),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        softmax_type=draw(st.sampled_from(SOFTMAX_TYPES)),
        dtype="float64",
    )
