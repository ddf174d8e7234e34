"""Hypothesis strategies: whole cases that an implementation should be able to run, small and quick to shrink.

Everything is drawn in one `@composite`, simplest choice first, so that a failing case shrinks to one short line of
text. Lengths
favour what breaks: nothing at all, one token, one more or less than a chunk, padding, sequences of different lengths.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import lcm
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from conformance.capabilities import EVERYTHING, Capabilities
from conformance.case import GRADS, Case
from cp_ref.spec import Problem, Sequence, divisor

__all__ = ["CP_SIZES", "cases", "problems"]

CP_SIZES = (1, 2, 3, 4, 8)
_HEADS = ((1, 1), (2, 1), (2, 2), (4, 2), (3, 3), (6, 2), (4, 1))  # (h_q, h_kv)
_DIMS = ((8, 8), (8, 16), (16, 8), (24, 16), (5, 5), (1, 3))  # (d_qk, d_v)
_MOST_SLOTS = 48  # of one sequence, roughly: a chunk at least


@st.composite
def problems(
    draw: DrawFn,
    capabilities: Capabilities = EVERYTHING,
    *,
    cp_sizes: Seq[int] = CP_SIZES,
    dtypes: Seq[str] = ("float64", "float32"),
) -> Problem:
    """A problem with every feature inside `capabilities`; `dtypes` are further narrowed to what is supported."""
    has = capabilities.has
    cp_size = draw(st.sampled_from(list(cp_sizes)))
    comm = draw(_choice(capabilities, "cp_comm_type"))
    layout = draw(_choice(capabilities, "layout"))
    qkv_format = draw(_choice(capabilities, "qkv_format"))
    mask = draw(_choice(capabilities, "attn_mask_type"))
    a2a_size = draw(_a2a_sizes(comm, cp_size))
    if qkv_format == "thd":
        sequences = draw(_packed(layout, cp_size, has("lengths", "cross")))
    else:
        sequences = draw(_batched(layout, cp_size, mask.startswith("padding"), has("lengths", "cross")))
    heads_q, heads_kv = draw(_heads(a2a_size, has("heads", "grouped")))
    d_qk, d_v = draw(st.sampled_from([dims for dims in _DIMS if _has_dims(capabilities, *dims)] or [(8, 8)]))
    return Problem(
        cp_size=cp_size,
        sequences=sequences,
        cp_comm_type=comm,
        a2a_size=a2a_size,
        layout=layout,
        qkv_format=qkv_format,
        attn_mask_type=mask,
        window_size=draw(_windows(capabilities, "causal" in mask, _chunk(sequences, cp_size))),
        heads_q=heads_q,
        heads_kv=heads_kv,
        d_qk=d_qk,
        d_v=d_v,
        softmax_scale=draw(st.sampled_from([None, 1.0, 0.25])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.5, 30.0] if has("softcap", "softcap") else [0.0])),
        softmax_type=draw(_choice(capabilities, "softmax_type")),
        dtype=draw(st.sampled_from([d for d in dtypes if has("dtype", d)] or list(capabilities.choices["dtype"]))),
    )


@st.composite
def cases(draw: DrawFn, capabilities: Capabilities = EVERYTHING, **narrowed: Any) -> Case:
    """A case of a problem from `problems`, which takes the other arguments."""
    problem = draw(problems(capabilities, **narrowed))
    tails = st.integers(0, 3).map(lambda part: part * problem.cp_size) if problem.qkv_format == "thd" else st.just(0)
    return_lse = draw(st.booleans())
    return Case(
        problem,
        tail_q=draw(tails),
        tail_kv=draw(tails),
        seed=draw(st.integers(0, 999)),
        magnitude=draw(st.sampled_from([1.0, 1.0, 12.0])) if problem.dtype == "float64" else 1.0,
        return_lse=return_lse,
        return_max_logit=draw(st.booleans()),
        loss=draw(st.sampled_from(["out", "out+lse", "lse"])) if return_lse else "out",
        grads=draw(st.sampled_from(["qkvo"] * 8 + [g for g in GRADS if g != "qkvo"])),
        strided=draw(st.booleans()),
        use_plan=draw(st.booleans()),
        deterministic=draw(st.booleans()),
    )


def _rarely() -> SearchStrategy[bool]:
    """One time in eight; what it guards is left out when a case shrinks."""
    return st.sampled_from([*[False] * 7, True])


def _choice(capabilities: Capabilities, axis: str) -> SearchStrategy[str]:
    return st.sampled_from(capabilities.choices[axis])


def _a2a_sizes(comm: str, cp_size: int) -> SearchStrategy[int]:
    if comm == "a2a":
        return st.just(cp_size)
    if comm == "a2a+p2p":
        return st.sampled_from([n for n in range(1, cp_size + 1) if cp_size % n == 0])
    return st.just(1)


@st.composite
def _heads(draw: DrawFn, a2a_size: int, grouped: bool) -> tuple[int, int]:
    """(h_q, h_kv); with an a2a, h_q is a multiple of its size, and h_kv a multiple or a divisor."""
    heads_q, heads_kv = draw(st.sampled_from([h for h in _HEADS if grouped or h[0] == h[1]]))
    if heads_kv % a2a_size and a2a_size % heads_kv:
        heads_kv = 1
    heads_q = lcm(heads_q, heads_kv, a2a_size)
    return heads_q, heads_kv if grouped else heads_q


def _has_dims(capabilities: Capabilities, d_qk: int, d_v: int) -> bool:
    needed = {"odd"} if d_qk % 8 or d_v % 8 else set()
    needed |= {"d_v smaller"} if d_v < d_qk else {"d_v larger"} if d_v > d_qk else set()
    return needed <= set(capabilities.choices["dims"])


def _lengths(slots: int, chunk: int) -> SearchStrategy[int]:
    """Real tokens in `slots` slots: full, empty, one, or at the border of a chunk."""
    borders = {n * chunk + off for n in range(slots // chunk + 1) for off in (-1, 0, 1)} if chunk else set()
    special = sorted(n for n in borders | {0, 1, slots - 1} if 0 <= n <= slots)
    return st.one_of(st.just(slots), st.integers(0, slots), st.sampled_from(special))


@st.composite
def _batched(draw: DrawFn, layout: str, cp_size: int, padding: bool, cross: bool) -> tuple[Sequence, ...]:
    """bshd and sbhd: one number of slots for the whole batch."""
    unit = divisor(layout, cp_size)
    batch_size = draw(st.integers(1, 3))
    most = max(1, _MOST_SLOTS // (unit * batch_size))
    slots_q = 0 if draw(_rarely()) else unit * draw(st.integers(1, most))
    slots_kv = slots_q
    if cross and draw(st.booleans()):
        slots_kv = 0 if draw(_rarely()) else unit * draw(st.integers(1, most))
    if not padding:
        return (Sequence(slots_q, slots_kv, slots_q, slots_kv),) * batch_size
    sequences = []
    same = slots_kv == slots_q and (not cross or draw(st.booleans()))
    for _ in range(batch_size):
        len_q = draw(_lengths(slots_q, slots_q // (2 * cp_size)))
        len_kv = len_q if same else draw(_lengths(slots_kv, slots_kv // (2 * cp_size)))
        sequences.append(Sequence(len_q, len_kv, slots_q, slots_kv))
    return tuple(sequences)


@st.composite
def _packed(draw: DrawFn, layout: str, cp_size: int, cross: bool) -> tuple[Sequence, ...]:
    """thd: every sequence has its own number of slots, and its own padding."""
    count = 0 if draw(_rarely()) else draw(st.integers(1, 4))
    same = not cross or draw(st.booleans())
    sides = [draw(_packed_side(layout, cp_size, count)) for _ in range(1 if same else 2)]
    return tuple(Sequence(q[0], kv[0], q[1], kv[1]) for q, kv in zip(sides[0], sides[-1], strict=True))


@st.composite
def _packed_side(draw: DrawFn, layout: str, cp_size: int, count: int) -> list[tuple[int, int]]:
    """(length, slots) of every sequence."""
    padded = draw(st.booleans())
    found: list[tuple[int, int]] = []
    for _ in range(count):
        if layout == "dual_chunk":
            unit = 2 * cp_size
            slots = 0 if draw(_rarely()) else unit * draw(st.integers(1, max(1, _MOST_SLOTS // (unit * count))))
            found.append((draw(_lengths(slots, slots // unit)) if padded else slots, slots))
        else:  # only the whole buffer has to divide: sequences begin and end anywhere, also in the middle of a rank
            length = draw(
                st.one_of(st.integers(0, 2 * _MOST_SLOTS // count), st.sampled_from([0, 1, cp_size, cp_size + 1]))
            )
            found.append((length, length + (draw(st.integers(0, 3)) if padded else 0)))
    if layout == "contiguous" and found:
        rest = -sum(slots for _, slots in found) % cp_size
        length, slots = found[-1]
        found[-1] = (length if padded else length + rest, slots + rest)
    return found


def _chunk(sequences: tuple[Sequence, ...], cp_size: int) -> int:
    return max((max(s.slots_q, s.slots_kv) for s in sequences), default=0) // (2 * cp_size)


@st.composite
def _windows(draw: DrawFn, capabilities: Capabilities, causal: bool, chunk: int) -> tuple[int, int]:
    """(left, right): unbounded, nothing, one, at the border of a chunk, anything, more than there is."""
    borders = [n for n in (chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk) if n >= 0]
    side = st.one_of(st.just(-1), st.sampled_from([0, 1, 200, *borders]), st.integers(0, 24))
    has = capabilities.has
    if causal:  # the right side is 0, whatever is said
        return (draw(side) if has("window", "left") else -1), draw(st.sampled_from([-1, 0, 5]))
    left = draw(side) if has("window", "left") else -1
    right = draw(side) if has("window", "both" if left >= 0 else "right") else -1
    return left, right
