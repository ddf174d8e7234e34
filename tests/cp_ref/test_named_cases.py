"""Group sizes from 1 to 16 against the oracle in float64; and the merge of partial results, with its sink."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cp_fast
import cp_ref
from conformance.case import Case
from conformance.checks.values import check_logic
from cp_ref import dense_attention
from cp_ref.reference.executor.merge_partials import add_sink, merge
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.words import SoftmaxType


def schedules(cp_size: int) -> list[tuple[str, int]]:
    """Every cp_comm_type with its a2a_size; a2a+p2p in every factorisation, of many ranks without those that are p2p
    and a2a.
    """
    pairs = [("a2a+p2p", n) for n in range(1, cp_size + 1) if cp_size % n == 0 and (cp_size < 9 or 1 < n < cp_size)]
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


SIZES = [*((cp_ref, n) for n in (*range(1, 11), 12, 16)), *((cp_fast, n) for n in (5, 6, 12, 16))]


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


INF = float("inf")
Part = tuple[torch.Tensor, torch.Tensor]  # out [t, h, d_v], lse [t, h]
T, H, D = 3, 2, 4


class Keys(NamedTuple):
    scores: torch.Tensor  # [t, h, m], -inf where hidden
    values: torch.Tensor  # [m, h, d_v]


def attend(keys: Keys, columns: list[int]) -> Part:
    """Attention over some of the keys, by the definition; a row that sees none of them: (0, -inf)."""
    scores, values = keys.scores[..., columns], keys.values[columns]
    lse = torch.logsumexp(torch.cat([scores, scores.new_full((T, H, 1), -INF)], dim=-1), dim=-1)
    weights = torch.exp(scores - lse[..., None]).masked_fill(scores == -INF, 0.0)
    return torch.einsum("thm,mhd->thd", weights, values), lse


def same(a: Part, b: Part) -> None:
    assert not a[0].isnan().any()
    assert not a[1].isnan().any()
    torch.testing.assert_close(a[0], b[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a[1], b[1], rtol=1e-12, atol=1e-12)


def bitwise(a: Part, b: Part) -> None:
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


@st.composite
def keys(draw: st.DrawFn) -> Keys:
    """Scores from -300 to 300, about a third of the pairs hidden, some rows altogether."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    m = draw(st.integers(0, 10))
    scores = draw(st.sampled_from([1.0, 30.0, 100.0])) * torch.randn(T, H, m, generator=generator, dtype=torch.float64)
    hidden = torch.rand(T, H, m, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.9]))
    hidden |= torch.rand(T, H, 1, generator=generator) < draw(st.sampled_from([0.0, 0.5]))
    return Keys(scores.masked_fill(hidden, -INF), torch.randn(m, H, D, generator=generator, dtype=torch.float64))


@given(keys(), st.data())
def test_any_order_and_grouping(all_keys: Keys, data: st.DataObject) -> None:
    """Deal the keys out (some parts get none), then merge any two parts until one is left."""
    count = data.draw(st.integers(1, 5))
    owners = [data.draw(st.integers(0, count - 1)) for _ in range(len(all_keys.values))]
    parts = [attend(all_keys, [j for j, owner in enumerate(owners) if owner == part]) for part in range(count)]
    while len(parts) > 1:
        one = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        other = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        parts.append(merge(*one, *other))
    same(parts[0], attend(all_keys, list(range(len(owners)))))


@given(keys(), keys())
def test_commutative(a: Keys, b: Keys) -> None:
    one, other = (attend(x, list(range(len(x.values)))) for x in (a, b))
    bitwise(merge(*one, *other), merge(*other, *one))


@given(keys(), keys(), keys())
def test_associative(a: Keys, b: Keys, c: Keys) -> None:
    x, y, z = (attend(each, list(range(len(each.values)))) for each in (a, b, c))
    same(merge(*merge(*x, *y), *z), merge(*x, *merge(*y, *z)))


@given(keys())
def test_nothing_is_neutral(a: Keys) -> None:
    """Also twice, and also with itself."""
    part = attend(a, list(range(len(a.values))))
    nothing = torch.zeros(T, H, D, dtype=torch.float64), torch.full((T, H), -INF, dtype=torch.float64)
    bitwise(merge(*part, *nothing), part)
    bitwise(merge(*nothing, *part), part)
    bitwise(merge(*nothing, *nothing), nothing)


@given(keys(), st.integers(0, 10**6))
def test_the_sink_is_one_more_key(a: Keys, seed: int) -> None:
    """Once, when all is merged: as a key of value 0 among the others; an empty row gets the sink's logit, output 0."""
    sink = torch.randn(H, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    m = len(a.values)
    with_it = Keys(
        torch.cat([a.scores, sink[None, :, None].expand(T, H, 1)], dim=-1),
        torch.cat([a.values, a.values.new_zeros(1, H, D)]),
    )
    halves = merge(*attend(a, list(range(m // 2))), *attend(a, list(range(m // 2, m))))
    got = add_sink(*halves, sink)
    same(got, attend(with_it, list(range(m + 1))))
    empty = halves[1] == -INF
    assert torch.equal(got[1][empty], sink.expand(T, H)[empty])
    assert got[0][empty].eq(0).all()


def test_the_sink_belongs_to_the_whole_not_to_a_part() -> None:
    out, lse, sink = torch.ones(1, 1, 1), torch.zeros(1, 1), torch.zeros(1)
    once = add_sink(*merge(out, lse, out, lse), sink)
    twice = merge(*add_sink(out, lse, sink), *add_sink(out, lse, sink))
    assert once[0].item() == pytest.approx(2 / 3)
    assert twice[0].item() == pytest.approx(2 / 4)


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_the_sink_against_the_oracle(softmax_type: SoftmaxType) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, H, D, dtype=torch.float64) for n in (T, 6, 6))
    sink = torch.zeros(H) if softmax_type == "off-by-one" else torch.randn(H)
    offset = None if softmax_type == "off-by-one" else sink
    want, want_lse, _ = dense_attention(
        q, k, v, attn_mask_type="no_mask", softmax_type=softmax_type, softmax_offset=offset
    )
    all_keys = Keys(torch.einsum("nhd,mhd->nhm", q[0], k[0]) * D**-0.5, v[0])
    got = add_sink(*merge(*attend(all_keys, [0, 3]), *attend(all_keys, [1, 2, 4, 5])), sink)
    same(got, (want[0], want_lse[0].t()))


def test_extreme_scores_do_not_overflow() -> None:
    """float32, LSEs 10,000 apart, of both signs."""
    a = torch.full((T, H, D), 2.0), torch.full((T, H), 5000.0)
    b = torch.full((T, H, D), 3.0), torch.full((T, H), -5000.0)
    bitwise(merge(*a, *b), a)
    bitwise(merge(*b, *a), a)
