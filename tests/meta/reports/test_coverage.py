"""The coverage table: what a case exercises, which pairs occurred, and which cannot."""

from __future__ import annotations

import pytest

from conformance.case import Case
from conformance.problems.features import CHOICES, FEATURE_AXES, IMPOSSIBLE, Choice, choices_of, why_impossible
from conformance.problems.strategies import CP_SIZES
from conformance.record import Played
from conformance.report.coverage import STATES, coverage
from cp_ref.schedules.problem import Problem, Sequence
from tests.meta.reports.report_records import drawn_cases

SQUARE = (Sequence(16, 16, 16, 16),)
PADDED = {"attn_mask_type": "padding"}


def _case(**changes: object) -> Case:
    """A plain case with some fields changed; those of Problem or those of Case."""
    problem = {"cp_size": 2, "sequences": SQUARE} | {k: v for k, v in changes.items() if hasattr(Problem, k)}
    problem |= {k: changes[k] for k in ("cp_size", "sequences") if k in changes}
    return Case(Problem(**problem), **{k: v for k, v in changes.items() if k not in problem})  # type: ignore[arg-type]


def _on(axis: str, case: Case) -> list[str]:
    return [choice.name for choice in choices_of(case) if choice.axis == axis]


def _played(case: Case, verdict: str = "right", **more: object) -> Played:
    return Played("schedule", "logic", str(case), verdict, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("axis", "changes", "names"),
    [
        ("window", {"window_size": (3, 5)}, ["left"]),  # causal: the right side is 0
        ("window", {"window_size": (3, 5), "attn_mask_type": "no_mask"}, ["both"]),
        ("window", {"window_size": (-1, 0), "attn_mask_type": "padding"}, ["right"]),
        ("window", {}, ["none"]),
        ("lengths", {}, ["plain"]),
        ("lengths", {"sequences": ()}, ["no sequences"]),
        ("lengths", {"sequences": (Sequence(0, 0, 8, 8),), **PADDED}, ["0 tokens", "padding"]),
        ("lengths", {"sequences": (Sequence(1, 16, 16, 16),), **PADDED}, ["1 token", "cross", "padding"]),
        (
            "lengths",
            {"sequences": (Sequence(5, 6, 16, 24),), **PADDED},
            ["chunk edge", "cross", "padding"],
        ),  # chunks of 4 and 6
        ("lengths", {"sequences": (Sequence(6, 6, 16, 16),), **PADDED}, ["padding"]),
        ("lengths", {"sequences": (Sequence(4, 4, 4, 4),) * 32, "qkv_format": "thd"}, ["many tiny"]),
        ("lengths", {"sequences": (Sequence(4, 4, 4, 4),) * 31, "qkv_format": "thd"}, ["plain"]),
        (
            "lengths",
            {"sequences": (*SQUARE, Sequence(256, 256, 256, 256)), "qkv_format": "thd"},
            ["one huge", "different"],
        ),
        ("lengths", {"qkv_format": "thd", "tail_kv": 2}, ["tail"]),
        ("a2a split", {"cp_comm_type": "a2a+p2p", "cp_size": 4, "a2a_size": 2}, ["both"]),
        ("a2a split", {"cp_comm_type": "a2a+p2p", "cp_size": 4, "a2a_size": 4}, ["all a2a"]),
        ("a2a split", {"cp_comm_type": "a2a", "a2a_size": 2}, ["not split"]),
        ("heads", {"heads_q": 4, "heads_kv": 2}, ["GQA"]),
        ("heads", {"cp_comm_type": "a2a", "a2a_size": 2, "heads_q": 4}, ["MQA", "kv < a2a size"]),
        ("heads", {"heads_q": 3, "heads_kv": 3}, ["MHA"]),
        ("dims", {"d_qk": 192, "d_v": 128}, ["d_v smaller", "192/128", "over 128"]),
        ("dims", {"d_qk": 128, "d_v": 192}, ["d_v larger", "128/192", "over 128"]),
        ("dims", {"d_qk": 24, "d_v": 16}, ["d_v smaller", "odd of 8"]),
        ("dims", {"d_qk": 5, "d_v": 5}, ["equal", "not of 8"]),
        ("dims", {"d_qk": 128, "d_v": 128}, ["equal", "128/128"]),
        ("cp_size", {"cp_size": 7}, []),
        ("results", {}, ["out alone"]),
        ("results", {"return_lse": True, "return_max_logit": True}, ["lse", "max_logit"]),
        ("gradients", {"grads": "o"}, ["none"]),
        ("gradients", {"grads": "o", "softmax_type": "learnable"}, ["offset alone"]),
        ("gradients", {"grads": "qo"}, ["q alone"]),
        ("gradients", {"grads": "qk"}, []),
        ("strides", {"strided": True}, ["odd"]),
        ("plan", {"use_plan": True}, ["with"]),
        ("softcap", {"softcap": 2.0}, ["on"]),
    ],
)
def test_what_a_case_exercises(axis: str, changes: dict[str, object], names: list[str]) -> None:
    assert _on(axis, _case(**changes)) == names


def test_pairs_are_counted_by_hand() -> None:
    window, thd, causal = Choice("window", "left"), Choice("format", "thd"), Choice("mask", "causal")
    played = [
        _played(_case(window_size=(2, -1))),
        _played(_case(window_size=(2, -1)), "wrong"),
        _played(_case(window_size=(2, -1)), "wrong", shrunk=True),  # was not drawn
        _played(_case(window_size=(2, -1), qkv_format="thd"), "unsupported"),
        _played(_case(qkv_format="thd")),
        Played("helpers", "helpers", "helper thd_read_half_tensor", "right"),
        Played("schedule", "special", "special one", "right", cases=((str(_case(qkv_format="thd")), "right"),)),
    ]
    found = coverage(played)
    assert (found.problems, found.refusals) == (4, 1)
    assert found.count(window, causal) == 2
    assert found.count(thd, causal) == found.count(thd, thd) == 2
    assert found.count(window, thd) == 0
    assert found.state(window, thd) == found.state(thd, window) == "refused"
    assert found.state(thd, Choice("mask", "padding")) == "never"
    assert found.state(causal, Choice("window", "right")) == "impossible"
    assert "right side" in why_impossible(Choice("window", "right"), causal)
    assert (thd, Choice("lengths", "tail")) in found.never
    assert (Choice("format", "bshd"), Choice("lengths", "tail")) not in found.never


@pytest.mark.thorough
def test_all_that_is_drawn_is_counted_and_nothing_impossible_is_drawn() -> None:
    cases = drawn_cases(500)
    found = coverage([_played(case) for case in cases])
    assert found.problems == len(cases)
    for a, b in found.pairs:
        assert not (found.count(a, b) and why_impossible(a, b)), (a, b)
    for axis in FEATURE_AXES:
        assert sum(found.count(c, c) for c in CHOICES if c.axis == axis) >= 0.9 * len(cases), axis
    assert sum(found.totals.values()) == len(found.pairs)
    assert found.totals["played"] > 0.5 * len(found.pairs)


def test_rules_name_choices_that_exist() -> None:
    for rule in IMPOSSIBLE:
        for axis, names in ((rule.axis, rule.choices), (rule.other, rule.other_choices)):
            assert set(names) <= set(FEATURE_AXES[axis][0]), rule
        assert rule.reason


def test_a_case_has_no_choice_that_is_not_listed() -> None:
    for case in drawn_cases(200):
        assert set(choices_of(case)) <= set(CHOICES)


def test_the_data_say_what_was_counted() -> None:
    found = coverage([_played(case) for case in drawn_cases(200)])
    data = found.to_json()
    totals = found.totals
    assert data["pairs"] == totals
    assert tuple(data["pairs"]) == STATES
    others = data["pairs that did not run"]
    assert len(others) == sum(totals.values()) - totals["played"]
    assert all(len(row) == 4 for row in others if row[2] == "impossible")


def test_nothing_played() -> None:
    found = coverage([])
    assert found.problems == 0
    assert found.totals["played"] == 0


def test_every_group_size_that_is_drawn_is_an_entry() -> None:
    assert {str(size) for size in CP_SIZES} <= set(FEATURE_AXES["cp_size"][0])


def test_a_broken_case_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot read a case"):
        coverage([Played("schedule", "logic", "Case(", "right")])
