"""Cases that users met in other systems, and every group size from 1 to 16, against the oracle in float64."""

from __future__ import annotations

from typing import Any

import pytest

import cp_fast
import cp_ref
from conformance.case import Case
from conformance.checks.values import check_logic
from cp_ref.schedules.problem import Problem, Sequence

IMPLEMENTATIONS: list[Any] = [cp_ref, cp_fast]


def schedules(cp_size: int) -> list[tuple[str, int]]:
    """Every cp_comm_type with its a2a_size; a2a+p2p in every factorisation."""
    pairs = [("a2a+p2p", n) for n in range(1, cp_size + 1) if cp_size % n == 0]
    return [("p2p", 1), ("all_gather", 1), ("a2a", cp_size), *pairs]


def uneven(cp_size: int) -> tuple[Sequence, ...]:
    """Three packed sequences: padded, empty, full."""
    unit = 2 * cp_size
    return (
        Sequence(2 * unit - 3, 2 * unit - 3, 2 * unit, 2 * unit),
        Sequence(0, 0, 0, 0),
        Sequence(unit, unit, unit, unit),
    )


def check(impl: Any, case: Case) -> None:
    assert check_logic(impl, case) == []


SIZES = [*((cp_ref, n) for n in range(1, 17)), *((cp_fast, n) for n in (5, 6, 12, 16))]


@pytest.mark.parametrize(
    ("impl", "cp_size"),
    [pytest.param(*size, marks=pytest.mark.thorough if size[1] > 4 else ()) for size in SIZES],
)
def test_every_group_size_and_factorisation(impl: Any, cp_size: int) -> None:
    for comm, a2a_size in schedules(cp_size):
        problem = Problem(
            cp_size,
            uneven(cp_size),
            comm,
            a2a_size,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            heads_q=a2a_size,
            heads_kv=1,
            d_qk=4,
            d_v=3,
            dtype="float64",
        )
        check(impl, Case(problem, tail_q=cp_size, tail_kv=2 * cp_size, return_lse=True, loss="out+lse"))


def dense(length: int, batch: int = 1) -> tuple[Sequence, ...]:
    return (Sequence(length, length, length, length),) * batch


MLA = {"d_qk": 192, "d_v": 128, "dtype": "float64"}
NAMED = {
    # TransformerEngine pull request 2901: out was viewed with the kv heads
    "64 heads over 4, 192/128, p2p": Problem(4, dense(16), heads_q=64, heads_kv=4, **MLA),
    "64 heads over 4, 192/128, a2a on 8 ranks": Problem(8, dense(16), "a2a", 8, heads_q=64, heads_kv=4, **MLA),
    # 2826: MLA under a2a, here with a window
    "MLA with a window, a2a": Problem(4, dense(16, 2), "a2a", 4, window_size=(5, 0), heads_q=4, heads_kv=4, **MLA),
    "MLA with a two-sided window, a2a+p2p, no_mask": Problem(
        4, dense(16), "a2a+p2p", 2, attn_mask_type="no_mask", window_size=(5, 3), heads_q=2, heads_kv=2, **MLA
    ),
    # 2829: thd under all_gather, with windows, padding and tails
    "thd all_gather": Problem(4, uneven(4), "all_gather", qkv_format="thd", dtype="float64"),
    "thd all_gather, window": Problem(
        4, uneven(4), "all_gather", qkv_format="thd", window_size=(5, 0), heads_q=2, heads_kv=2, dtype="float64"
    ),
    "thd all_gather, two-sided window, mixed lengths": Problem(
        2,
        tuple(Sequence(n, n, -(-n // 4) * 4, -(-n // 4) * 4) for n in (64, 30, 9)),
        "all_gather",
        qkv_format="thd",
        attn_mask_type="padding",
        window_size=(5, 5),
        dtype="float64",
    ),
    # 2629: V narrower than Q and K in thd
    "V padding": Problem(2, uneven(2), qkv_format="thd", d_qk=24, d_v=16, dtype="float64"),
    "V wider than Q": Problem(2, uneven(2), qkv_format="thd", d_qk=16, d_v=24, dtype="float64"),
}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS, ids=lambda impl: impl.__name__)
@pytest.mark.parametrize("name", NAMED)
def test_named_cases(impl: Any, name: str) -> None:
    problem = NAMED[name]
    tail = problem.cp_size if problem.qkv_format == "thd" else 0
    check(impl, Case(problem, tail, tail, return_lse=True, return_max_logit=True))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS, ids=lambda impl: impl.__name__)
@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
@pytest.mark.parametrize(("comm", "a2a_size"), schedules(4))
def test_both_sinks_with_softcap_under_every_schedule(impl: Any, softmax_type: str, comm: str, a2a_size: int) -> None:
    problem = Problem(
        4,
        uneven(4),
        comm,
        a2a_size,
        qkv_format="thd",
        attn_mask_type="causal_bottom_right",
        window_size=(6, 0),
        heads_q=4,
        heads_kv=2,
        softcap=3.0,
        softmax_type=softmax_type,
        dtype="float64",
    )
    check(impl, Case(problem, return_lse=True, return_max_logit=True, loss="out+lse"))
