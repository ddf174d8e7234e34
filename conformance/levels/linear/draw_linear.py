"""Strategies of the level `linear`: documents that are empty, short, or longer than a kernel's chunk, in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from conformance.draw.strategies import tables
from conformance.levels.linear.linear_case import ACTIVATIONS, LINEAR_KINDS, CausalConv1d, LinearAttention
from cp_ref.schedules.words import CP_COMM_TYPES, LAYOUTS

__all__ = ["SIZES", "batches", "convolutions", "linear_attentions"]

SIZES = (2, 3, 4, 8, 1)
_LONG = (63, 64, 65, 100, 130)  # Around a kernel's chunk, and two.
_REAL_DIMS = ((64, 64), (64, 128), (128, 128))
_DTYPES = ("float64", "float64", "float32", "bfloat16", "float16")


@st.composite
def batches(
    draw: DrawFn, cp_sizes: Sequence[int] = SIZES, most: int = 16, long: tuple[int, ...] = _LONG
) -> dict[str, Any]:
    """The fields of a batch: at most four documents of at most `most` slots, or rarely one of `long`."""
    cp_size = draw(st.sampled_from(sorted(cp_sizes, key=lambda n: (n == 1, n))))
    comm = draw(st.sampled_from(CP_COMM_TYPES))
    divisors = [n for n in range(1, cp_size + 1) if cp_size % n == 0]
    a2a_size = {"a2a": cp_size, "a2a+p2p": draw(st.sampled_from(divisors))}.get(comm, 1)
    layout: Any = draw(st.sampled_from((*LAYOUTS, "table")))
    qkv_format = draw(st.sampled_from(["thd", "thd", "bshd", "sbhd"]))
    slots = draw(st.lists(st.integers(0, most), min_size=1, max_size=4))
    if long and draw(st.integers(0, 7)) == 7:
        slots[0] = draw(st.sampled_from(long))
    slots = slots if qkv_format == "thd" else [max(slots)] * (1 if max(slots) > most else len(slots))
    padded = draw(st.booleans())
    documents = tuple((draw(st.sampled_from([n, 0, 1]) | st.integers(0, n)) if padded and n else n, n) for n in slots)
    layout = draw(tables(slots, cp_size)) if layout == "table" else layout
    return {
        "cp_size": cp_size,
        "documents": documents,
        "qkv_format": qkv_format,
        "layout": layout,
        "cp_comm_type": comm,
        "a2a_size": a2a_size,
        "tail": draw(st.integers(0, 2)) if qkv_format == "thd" else 0,
    }


@st.composite
def _values(draw: DrawFn, documents: int, dtypes: Sequence[str]) -> dict[str, Any]:
    dtype = draw(st.sampled_from(dtypes))
    return {
        "dtype": dtype,
        "wide": dtype in ("bfloat16", "float16") and draw(st.booleans()),
        "spoiled": draw(st.sampled_from([-1, -1, *(range(documents) if documents > 1 else ())])),
        "seed": draw(st.integers(0, 999)),
    }


@st.composite
def linear_attentions(
    draw: DrawFn, cp_sizes: Sequence[int] = SIZES, dtypes: Sequence[str] = _DTYPES
) -> LinearAttention:
    """A problem of `linear_attention`; the dims of models are rare, for their kernels."""
    batch = draw(batches(cp_sizes))
    small = st.tuples(st.sampled_from([3, 2, 4, 1]), st.integers(1, 3))
    d_k, d_v = draw(st.sampled_from(_REAL_DIMS) if draw(st.integers(0, 7)) == 7 else small)
    return LinearAttention(
        **batch,
        **draw(_values(len(batch["documents"]), dtypes)),
        kind=draw(st.sampled_from(LINEAR_KINDS)),
        heads=draw(st.integers(1, 2)),
        shared=draw(st.integers(1, 2)),
        d_k=d_k,
        d_v=d_v,
        scale=draw(st.sampled_from([None, 0.5, -1])),
        initial_state=draw(st.booleans()),
        output_final_state=draw(st.booleans()),
    )


@st.composite
def convolutions(draw: DrawFn, cp_sizes: Sequence[int] = SIZES, dtypes: Sequence[str] = _DTYPES) -> CausalConv1d:
    """A problem of `causal_conv1d`."""
    batch = draw(batches(cp_sizes))
    return CausalConv1d(
        **batch,
        **draw(_values(len(batch["documents"]), dtypes)),
        channels=draw(st.integers(1, 3)),
        kernel_size=draw(st.integers(1, 6)),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from(ACTIVATIONS)),
    )
