"""Random mutations of valid schedules are refused, or accepted and right on both packages; some in a short time."""

from __future__ import annotations

from random import Random

import pytest

from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem, Sequence
from tests.dist.workers import Processes
from tests.faults.attacks.attack_schedules import Attack, bases
from tests.faults.attacks.mutations import CHANGES


def attacked(seed: int, number: int, seconds: float, random: int, four: Processes, gloo: int) -> Attack:
    """What comes of so many mutations, or of those that the time is enough for."""
    attack = Attack()
    for how, base in attack.mutations(seed, bases(random), number, seconds):
        attack.play(how, base)
    attack.over_gloo(four, gloo)
    return attack


def test_some_mutations(four: Processes) -> None:
    attack = attacked(seed=0, number=150, seconds=15.0, random=3, four=four, gloo=2)
    assert attack.findings == []
    assert attack.counts["accepted"] > 0
    assert attack.counts["refused by parse"] + attack.counts["refused by verify"] > 0


@pytest.mark.thorough
def test_more_mutations(four: Processes) -> None:
    assert attacked(seed=1, number=500, seconds=15.0, random=10, four=four, gloo=5).findings == []


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_changes_something(name: str) -> None:
    two = Sequence(6, 6, 8, 8), Sequence(8, 8, 8, 8)
    problem = Problem(4, two, "a2a+p2p", 2, qkv_format="thd", heads_q=4, heads_kv=2)
    schedule = make_schedule(problem)
    assert any(CHANGES[name](Random(seed), schedule) != schedule for seed in range(20))
