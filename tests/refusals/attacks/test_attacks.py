"""A part of the attack on calls (`attack_calls`); and that it reaches every public function."""

from __future__ import annotations

import random
from random import Random

import pytest

from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem, Sequence
from tests.dist.workers import Processes
from tests.refusals.attacks.attack_calls import attacks, run
from tests.refusals.attacks.attack_kinds import KINDS
from tests.refusals.attacks.attack_schedules import Attack, bases
from tests.refusals.attacks.attack_targets import NOT_ATTACKED, TARGETS, public_functions
from tests.refusals.attacks.mutations import CHANGES


def test_every_public_function_is_attacked() -> None:
    assert public_functions() <= {*TARGETS, *NOT_ATTACKED}
    assert len(KINDS) >= 40


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.thorough)])
def test_wrong_values_are_refused_on_all_ranks_or_change_nothing(count: int) -> None:
    chosen = random.Random(0).sample(attacks(), count)
    counts, wrong = run(chosen)
    assert wrong == []
    assert sum(counts.values()) == count
    assert sum(n for (_, outcome), n in counts.items() if outcome == "refused") > count / 2


def attacked(seed: int, number: int, seconds: float, random: int, four: Processes, gloo: int) -> Attack:
    """What comes of so many mutations, or of those that the time is enough for."""
    attack = Attack()
    for how, base in attack.mutations(seed, bases(random), number, seconds):
        attack.play(how, base)
    attack.over_gloo(four, gloo)
    return attack


def test_some_mutations(four: Processes) -> None:
    attack = attacked(seed=0, number=60, seconds=15.0, random=3, four=four, gloo=2)
    assert attack.findings == []
    assert attack.counts["accepted"] > 0
    assert attack.counts["refused by parse"] + attack.counts["refused by verify"] > 0


@pytest.mark.thorough
def test_more_mutations(four: Processes) -> None:
    assert attacked(seed=1, number=300, seconds=8.0, random=10, four=four, gloo=5).findings == []


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_changes_something(name: str) -> None:
    two = Sequence(6, 6, 8, 8), Sequence(8, 8, 8, 8)
    problem = Problem(4, two, "a2a+p2p", 2, qkv_format="thd", heads_q=4, heads_kv=2)
    schedule = make_schedule(problem)
    assert any(CHANGES[name](Random(seed), schedule) != schedule for seed in range(20))
