"""Small problems of linear layers: lengths with padding, empty documents, every layout, tables, every schedule."""

from __future__ import annotations

from hypothesis import strategies as st

from conformance.draw.strategies import tables
from cp_ref.spec import Problem, Sequence

__all__ = ["linear_problems"]

COMMS = ("p2p", "all_gather", "a2a", "a2a+p2p")


@st.composite
def linear_problems(draw: st.DrawFn, cp_sizes: tuple[int, ...] = (1, 2, 3, 4, 8), most: int = 24) -> Problem:
    """Self-attention problems of at most four documents, of at most `most` slots each."""
    cp_size = draw(st.sampled_from(cp_sizes))
    comm = draw(st.sampled_from(COMMS))
    divisors = [n for n in range(1, cp_size + 1) if cp_size % n == 0]
    a2a_size = {"a2a": cp_size, "a2a+p2p": draw(st.sampled_from(divisors))}.get(comm, 1)
    fmt = draw(st.sampled_from(["thd", "thd", "bshd", "sbhd"]))
    layout = draw(st.sampled_from(["dual_chunk", "contiguous", "balanced", "table"]))
    slots = draw(st.lists(st.integers(0, most), min_size=1, max_size=4))
    padded = draw(st.booleans())
    if fmt == "thd":
        sizes = [(draw(st.integers(0, n)) if padded else n, n) for n in slots]
        mask = "causal"
        given = tuple(n for _, n in sizes)
    else:
        longest = max(slots)
        padded |= layout in ("balanced", "table")
        sizes = [(n if padded else longest, longest) for n in slots]
        mask = "padding_causal" if padded else "causal"
        given = (longest,) * len(sizes)
    if layout == "table":
        layout = draw(tables(given, cp_size))
    sequences = tuple(Sequence(n, n, size, size) for n, size in sizes)
    return Problem(
        cp_size, sequences, comm, a2a_size, layout, fmt, mask, heads_q=cp_size, heads_kv=cp_size, dtype="float64"
    )
