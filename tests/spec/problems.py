"""Whole problems as integers, for the tests of planning: no tensors, so they may be large and many.

Half of them have lengths that a layout cuts without a rest; layouts that are for self-attention alone get it.
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from cp_ref.spec import CP_COMM_TYPES, LAYOUTS, MASKS, QKV_FORMATS, Problem, Sequence

__all__ = ["SCHEDULES", "problems"]

SCHEDULES: list[dict[str, Any]] = [  # of four ranks
    {"cp_comm_type": "p2p"},
    {"cp_comm_type": "all_gather"},
    {"cp_comm_type": "a2a", "a2a_size": 4},
    {"cp_comm_type": "a2a+p2p", "a2a_size": 2},
]


@st.composite
def problems(draw: st.DrawFn, cp_sizes: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 12, 16)) -> Problem:
    """Problems of every schedule, with every factorisation of a2a+p2p."""
    cp_size = draw(st.sampled_from(cp_sizes))
    cp_comm_type = draw(st.sampled_from(CP_COMM_TYPES))
    a2a_size = {
        "a2a": cp_size,
        "a2a+p2p": draw(st.sampled_from([n for n in range(1, cp_size + 1) if cp_size % n == 0])),
    }
    size = a2a_size.get(cp_comm_type, 1)
    heads_kv = draw(st.sampled_from([n for n in range(1, 2 * size + 1) if n % size == 0 or size % n == 0]))
    heads_q = math.lcm(heads_kv, size) * draw(st.integers(1, 2))
    fmt, layout = draw(st.sampled_from(QKV_FORMATS)), draw(st.sampled_from(LAYOUTS))
    mask = draw(st.sampled_from(MASKS))
    member = 2 * cp_size
    slots = draw(st.sampled_from([st.integers(0, 4).map(lambda n: n * member), st.integers(0, 4 * member)]))
    sequences = []
    if fmt == "thd":
        for _ in range(draw(st.integers(0, 4))):
            slots_q, slots_kv = draw(slots), draw(slots)
            len_q, len_kv = draw(st.integers(0, slots_q)), draw(st.integers(0, slots_kv))
            sequences.append(Sequence(len_q, len_kv, slots_q, slots_kv))
    else:
        slots_q, slots_kv = draw(slots), draw(slots)
        padded = mask.startswith("padding")
        for _ in range(draw(st.integers(1, 3))):
            len_q = draw(st.integers(0, slots_q)) if padded else slots_q
            len_kv = draw(st.integers(0, slots_kv)) if padded else slots_kv
            sequences.append(Sequence(len_q, len_kv, slots_q, slots_kv))
    window = draw(st.tuples(st.integers(-1, 3 * member), st.integers(-1, 3 * member)))
    if layout == "balanced":
        mask = mask if fmt == "thd" or mask.startswith("padding") else "padding_causal"
        sequences = [Sequence(s.len_q, s.len_q, s.slots_q, s.slots_q) for s in sequences]
    return Problem(
        cp_size,
        tuple(sequences),
        cp_comm_type,
        size,
        layout=layout,
        qkv_format=fmt,
        attn_mask_type=mask,
        window_size=window,
        heads_q=heads_q,
        heads_kv=heads_kv,
    )
