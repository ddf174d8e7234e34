"""`SCHEDULES` is the one list of schedules: a fifth one is a planner and an entry."""

from __future__ import annotations

import re
from dataclasses import replace
from inspect import signature
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from typer.testing import CliRunner

from cp_ref import ContextParallel, SimGroup, attention, dense_attention, shard, unshard
from cp_ref.cli import app
from cp_ref.cli.plan import Request
from cp_ref.schedules.planners.make_schedule import SCHEDULES, Planner, make_schedule
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import KINDS, Schedule
from cp_ref.schedules.verify.proof import InvalidSchedule, verify
from cp_ref.schedules.words import CPCommType
from cp_ref.simulator import SimMember
from tests.marks import examples
from tests.spec.other_schedules.other_rings import plan_bidirectional_rank
from tests.spec.problems import problems

FIFTH = "bidirectional"


@pytest.fixture
def fifth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, FIFTH, Planner(plan_bidirectional_rank, "Keys travel both ways round the ring."))


def test_signatures_have_the_same_names() -> None:
    assert tuple(SCHEDULES) == get_args(CPCommType)
    assert all(set(planner.saved) < set(KINDS) for planner in SCHEDULES.values())


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems(comms=("p2p",)))
def test_a_fifth_schedule_verifies(problem: Problem, fifth: None) -> None:
    problem = replace(problem, cp_comm_type=FIFTH)
    schedule = make_schedule(problem)
    verify(problem, schedule)
    assert schedule.name == FIFTH
    assert Schedule.parse(str(schedule)) == schedule


def test_a_fifth_schedule_has_half_the_steps_of_a_ring(fifth: None) -> None:
    ring = Problem(8, (Sequence(64, 64, 64, 64),))
    for name, forward, backward in (("p2p", 8, 9), (FIFTH, 5, 6)):
        schedule = make_schedule(replace(ring, cp_comm_type=name))
        assert {len(steps) for steps in schedule.forward} == {forward}
        assert {len(steps) for steps in schedule.backward} == {backward}


def test_verify_refuses_a_fifth_schedule_that_is_wrong(fifth: None) -> None:
    problem = Problem(4, (Sequence(32, 32, 32, 32),), FIFTH)
    right = make_schedule(problem)
    forward = tuple((*steps[:-1], steps[-1]._replace(tiles=steps[0].tiles)) for steps in right.forward)
    with pytest.raises(InvalidSchedule):
        verify(problem, replace(right, forward=forward))


def test_attention_takes_a_fifth_schedule(fifth: None) -> None:
    q, k, v, dout = (torch.randn(1, 24, 2, 4, dtype=torch.float64, generator=torch.manual_seed(n)) for n in range(4))

    def rank(member: SimMember) -> list[torch.Tensor]:
        name: Any = FIFTH
        cp = ContextParallel(member, name)
        x = [shard(t, cp=cp).requires_grad_() for t in (q, k, v)]
        out = attention(*x, cp=cp)
        out.backward(shard(dout, cp=cp))
        return [unshard(t, cp=cp) for t in (out, *(t.grad for t in x if t.grad is not None))]

    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    out, _, _ = dense_attention(*whole)
    out.backward(dout)
    for found, wanted in zip(SimGroup(3).run(rank)[1], (out, *(t.grad for t in whole)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_explain_explains_a_fifth_schedule(fifth: None) -> None:
    runner = CliRunner(env={"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"})
    done = runner.invoke(app, ["explain", "--cp-comm-type", FIFTH])
    assert done.exit_code == 0, done.output
    assert re.search("The schedule: bidirectional.*both ways round the ring", done.output, re.DOTALL)


def test_the_option_names_all_schedules() -> None:
    *others, last = SCHEDULES
    (option,) = signature(Request, eval_str=True).parameters["cp_comm_type"].annotation.__metadata__
    assert option.help == f"The schedule: {', '.join(others)} or {last}."


def test_a_name_that_is_no_schedule_is_refused_with_those_that_are(fifth: None) -> None:
    wrong: Any = "ring"
    with pytest.raises(ValueError, match=r"cp_comm_type is 'ring'.*a2a\+p2p.*bidirectional"):
        SimGroup(2).run(lambda member: ContextParallel(member, wrong))
