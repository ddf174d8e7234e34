"""Whole problems as integers, for the tests of planning: no tensors, so they may be large and many.

Half of them have lengths that a layout cuts without a rest; layouts that are for self-attention alone get it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any

from hypothesis import strategies as st

from conformance.problems.strategies import areas
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.words import CP_COMM_TYPES, LAYOUTS, MASKS, QKV_FORMATS, SOFTMAX_TYPES, CPCommType

__all__ = ["SCHEDULES", "problems", "problems_of_areas", "small_problems"]

SCHEDULES: list[dict[str, Any]] = [  # of four ranks
    {"cp_comm_type": "p2p"},
    {"cp_comm_type": "all_gather"},
    {"cp_comm_type": "a2a", "a2a_size": 4},
    {"cp_comm_type": "a2a+p2p", "a2a_size": 2},
]


@st.composite
def problems(
    draw: st.DrawFn,
    cp_sizes: Seq[int] = (1, 2, 3, 4, 5, 6, 8, 12, 16),
    comms: Seq[CPCommType] = CP_COMM_TYPES,
    most: int = 4,
) -> Problem:
    """Problems of every format, layout and mask, with every factorisation of a2a+p2p, padding, windows and groups of
    query heads.

    most: slots of a sequence, in chunks of all ranks.
    """
    cp_size, comm = draw(st.sampled_from(cp_sizes)), draw(st.sampled_from(comms))
    divisors = [n for n in range(1, cp_size + 1) if cp_size % n == 0]
    a2a_size = {"a2a": cp_size, "a2a+p2p": draw(st.sampled_from(divisors))}.get(comm, 1)
    heads_kv = draw(st.sampled_from([n for n in range(1, 2 * a2a_size + 1) if n % a2a_size == 0 or a2a_size % n == 0]))
    fmt, layout, mask = (draw(st.sampled_from(choices)) for choices in (QKV_FORMATS, LAYOUTS, MASKS))
    if layout == "balanced" and fmt != "thd" and not mask.startswith("padding"):
        mask = "padding_causal"
    chunks = 2 * cp_size
    slots = draw(st.sampled_from([st.integers(0, most).map(lambda n: n * chunks), st.integers(0, most * chunks)]))
    batch = draw(slots), draw(slots)
    sequences: list[Sequence] = []
    for _ in range(draw(st.integers(0, 4) if fmt == "thd" else st.integers(1, 3))):
        slots_q, slots_kv = (draw(slots), draw(slots)) if fmt == "thd" else batch
        full = fmt != "thd" and not mask.startswith("padding")
        len_q, len_kv = (n if full else draw(st.integers(0, n)) for n in (slots_q, slots_kv))
        if layout == "balanced":
            len_kv, slots_kv = len_q, slots_q
        sequences.append(Sequence(len_q, len_kv, slots_q, slots_kv))
    side = st.just(-1) | st.integers(0, 3 * chunks)
    return Problem(
        cp_size,
        tuple(sequences),
        comm,
        a2a_size,
        layout=layout,
        qkv_format=fmt,
        attn_mask_type=mask,
        window_size=(draw(side), draw(side)),
        heads_q=math.lcm(heads_kv, a2a_size) * draw(st.integers(1, 3)),
        heads_kv=heads_kv,
    )


def small_problems(cp_sizes: Seq[int] = (1, 2, 3, 4)) -> st.SearchStrategy[Problem]:
    """Problems with few rows; other schedules than p2p are drawn for them, or none."""
    return problems(cp_sizes, ("p2p",), most=2)


@st.composite
def problems_of_areas(draw: st.DrawFn, cp_sizes: Seq[int] = (1, 2, 3, 4), layouts: Seq[str] = LAYOUTS) -> Problem:
    """Problems with areas: documents with padding, cross attention, random disjoint areas. They have every schedule and
    few rows; of `layouts` where queries and keys lie in the same places."""
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
