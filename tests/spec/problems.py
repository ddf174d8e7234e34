"""Whole problems as integers, for the tests of planning: no tensors, so they may be large and many."""

from __future__ import annotations

from hypothesis import strategies as st

from cp_ref.spec import LAYOUTS, MASKS, QKV_FORMATS, Problem, Sequence

__all__ = ["problems"]


@st.composite
def problems(draw: st.DrawFn, cp_sizes: tuple[int, ...] = (1, 2, 3, 4, 5, 8)) -> Problem:
    """Problems of the p2p schedule."""
    cp_size = draw(st.sampled_from(cp_sizes))
    fmt, layout = draw(st.sampled_from(QKV_FORMATS)), draw(st.sampled_from(LAYOUTS))
    mask = draw(st.sampled_from(MASKS))
    unit = 2 * cp_size
    slots = st.integers(0, 4).map(lambda n: n * unit)
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
    window = draw(st.tuples(st.integers(-1, 3 * unit), st.integers(-1, 3 * unit)))
    return Problem(
        cp_size, tuple(sequences), layout=layout, qkv_format=fmt, attn_mask_type=mask, window_size=window, heads_q=2
    )
