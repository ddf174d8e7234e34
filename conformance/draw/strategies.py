"""Hypothesis strategies: whole cases that an implementation should be able to run, small and quick to shrink.

Everything is drawn in one `@composite`, simplest choice first, so that a failing case shrinks to one short line of
text. How long sequences are, and how many, is in `draw_lengths`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from math import lcm
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from conformance.case import ALIBI, GRADS, Case
from conformance.draw.capabilities import EVERYTHING, Capabilities
from conformance.draw.case_features import SCORE_AXES
from conformance.draw.draw_areas import areas
from conformance.draw.draw_lengths import Units, batched, packed
from cp_ref.contract.read_problem import check_one_document
from cp_ref.schedules.layouts import divisor
from cp_ref.schedules.problem import Problem, Sequence

__all__ = ["CP_SIZES", "cases", "problems", "tables"]

CP_SIZES = (1, 2, 3, 4, 5, 6, 8)
_HEADS = ((1, 1), (2, 1), (2, 2), (4, 2), (3, 3), (6, 2), (4, 1), (8, 4), (6, 3), (12, 2))  # (h_q, h_kv).
_FEW_HEADS = ((1, 1), (2, 1), (2, 2))
_FEW_ROWS = 250  # Attention slices are drawn for at most this many queries and keys.
_DIMS = ((8, 8), (8, 16), (16, 8), (24, 16), (5, 5), (1, 3))  # (d_qk, d_v): cheap, and enough for most bugs.
_REAL_DIMS = ((64, 64), (128, 128), (96, 96), (192, 128), (128, 192), (256, 256), (128, 64))  # Those of models.
_OF_PLACES: dict[str, Any] = {"score_mod": "", "dropout_p": 0.0}  # Options of scores of places, and none of them.
_ODD_DIMS = ((24, 24), (40, 40), (72, 72), (88, 56), (104, 104), (33, 17), (20, 12), (248, 8))  # Those of no model.


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
    # The simplest choice is drawn most, and a failing case shrinks to it: a group of 2 tells more than one of 1.
    cp_size = draw(st.sampled_from(sorted(cp_sizes, key=lambda n: (n == 1, n))))
    comm = draw(_choice(capabilities, "cp_comm_type"))
    layout = draw(_choice(capabilities, "layout"))
    qkv_format = draw(_choice(capabilities, "qkv_format"))
    mask = draw(_choice(capabilities, "attn_mask_type"))
    a2a_size = draw(_a2a_sizes(comm, cp_size))
    dtype = draw(st.sampled_from([d for d in dtypes if has("dtype", d)] or list(capabilities.choices["dtype"])))
    long, cross = dtype in ("bfloat16", "float16"), has("lengths", "cross") and layout != "balanced"
    if layout == "balanced" and qkv_format != "thd" and not mask.startswith("padding"):
        mask = "padding" if mask == "no_mask" else f"padding_{mask}"
    whole = _units(layout, cp_size, uneven=has("lengths", "uneven") and draw(st.booleans()))
    if qkv_format == "thd":
        shape, sequences = draw(packed(whole, cp_size, cross=cross, long=long))
    else:
        padding = mask.startswith("padding")
        shape, sequences = draw(batched(whole, cp_size, padding=padding, cross=cross, long=long))
    big = shape in ("huge", "many")
    heads_q, heads_kv = draw(_heads(a2a_size, has("heads", "grouped"), _FEW_HEADS if big else _HEADS))
    d_qk, d_v = draw(_dims(capabilities, big))
    of_places = any(len(capabilities.choices[name]) > 1 for name in _OF_PLACES) and draw(st.booleans())
    problem = Problem(
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
        softmax_scale=draw(st.sampled_from([None, 1.0, 0.25])) if d_qk <= 24 else None,
        dtype=dtype,
        **{
            axis.option: draw(st.sampled_from([x for x in axis.drawn if has(axis.option, axis.choice_of(x))]))
            for axis in SCORE_AXES
            if of_places or axis.option not in _OF_PLACES
        },
    )
    few = sum(s.slots_q + s.slots_kv for s in sequences) <= _FEW_ROWS
    if qkv_format == "thd" and few and has("areas", "areas") and draw(st.integers(0, 7)) == 7:
        problem = replace(problem, areas=draw(areas(sequences)), attn_mask_type="causal", window_size=(-1, -1))
        if not _in_documents(problem):
            problem = replace(problem, **_OF_PLACES)
    return problem


def _in_documents(problem: Problem) -> bool:
    """Whether no attention slice connects two documents, so that pairs have places."""
    try:
        check_one_document(problem, "a score of places")
    except ValueError:
        return False
    return True


@st.composite
def cases(draw: DrawFn, capabilities: Capabilities = EVERYTHING, **narrowed: Any) -> Case:
    """A case of a problem from `problems`, which takes the other arguments."""
    problem = draw(problems(capabilities, **narrowed))
    tails = st.integers(0, 3).map(lambda part: part * problem.cp_size) if problem.qkv_format == "thd" else st.just(0)
    return_lse = draw(st.booleans())
    has_slopes = "alibi" in capabilities.wishes and _in_documents(problem) and draw(st.booleans())
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
        alibi=draw(st.sampled_from(ALIBI)) if has_slopes else "",
    )


@st.composite
def tables(draw: DrawFn, slots: Seq[int], cp_size: int) -> tuple[tuple[int, int, int, int], ...]:
    """A layout as a user gives it: every sequence cut anywhere, the parts on any rank, in any order.

    Args:
        slots: of each sequence.
    """
    rows: list[tuple[int, int, int, int]] = []
    for sequence, length in enumerate(slots):
        edges = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=4))})
        rows += [(draw(st.integers(0, cp_size - 1)), sequence, a, b) for a, b in pairwise(edges)]
    return tuple(sorted(draw(st.permutations(rows)), key=lambda row: row[0]))


def _units(layout: str, cp_size: int, *, uneven: bool) -> Units:
    """The divisor of all lengths, if the layout must cut them into equal parts."""
    if uneven or layout == "balanced":
        return Units(1, 1)
    return Units(divisor(layout, cp_size), 1) if layout == "dual_chunk" else Units(1, cp_size)


def _choice(capabilities: Capabilities, axis: str) -> SearchStrategy[str]:
    return st.sampled_from(capabilities.choices[axis])


def _a2a_sizes(comm: str, cp_size: int) -> SearchStrategy[int]:
    if comm == "a2a":
        return st.just(cp_size)
    if comm == "a2a+p2p":
        inner = [n for n in range(2, cp_size) if cp_size % n == 0]  # Two levels, both of several ranks.
        return st.sampled_from([*inner * 2, 1, cp_size])
    return st.just(1)


@st.composite
def _heads(draw: DrawFn, a2a_size: int, grouped: bool, choices: Seq[tuple[int, int]]) -> tuple[int, int]:
    """(h_q, h_kv). With an a2a, h_q is a multiple of its size, and h_kv a multiple or a divisor."""
    heads_q, heads_kv = draw(st.sampled_from([h for h in choices if grouped or h[0] == h[1]]))
    if heads_kv % a2a_size and a2a_size % heads_kv:
        heads_kv = 1
    heads_q = lcm(heads_q, heads_kv, a2a_size)
    return heads_q, heads_kv if grouped else heads_q


@st.composite
def _dims(draw: DrawFn, capabilities: Capabilities, big: bool) -> tuple[int, int]:
    """(d_qk, d_v): mostly small; those of models and odd ones with few tokens."""
    kind = "small" if big else draw(st.sampled_from(["small"] * 5 + ["real", "odd"]))
    choices = {"small": _DIMS[:3] if big else _DIMS, "real": _REAL_DIMS, "odd": _ODD_DIMS}[kind]
    return draw(st.sampled_from([dims for dims in choices if _has_dims(capabilities, *dims)] or [(8, 8)]))


def _has_dims(capabilities: Capabilities, d_qk: int, d_v: int) -> bool:
    needed = {"odd"} if d_qk % 8 or d_v % 8 else set()
    needed |= {"d_v smaller"} if d_v < d_qk else {"d_v larger"} if d_v > d_qk else set()
    return needed <= set(capabilities.choices["dims"])


def _chunk(sequences: tuple[Sequence, ...], cp_size: int) -> int:
    return max((max(s.slots_q, s.slots_kv) for s in sequences), default=0) // (2 * cp_size)


@st.composite
def _windows(draw: DrawFn, capabilities: Capabilities, causal: bool, chunk: int) -> tuple[int, int]:
    """(left, right): unbounded, 0, 1, at the border of a chunk, any size, beyond the sequence."""
    borders = [n for n in (chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk) if n >= 0]
    side = st.one_of(st.just(-1), st.sampled_from([0, 1, 200, *borders]), st.integers(0, 24))
    has = capabilities.has
    if causal:  # The right side is 0 for every argument.
        return (draw(side) if has("window", "left") else -1), draw(st.sampled_from([-1, 0, 5]))
    left = draw(side) if has("window", "left") else -1
    right = draw(side) if has("window", "both" if left >= 0 else "right") else -1
    return left, right
