"""A part of the attack on calls (`attack_calls`); and that it reaches every public function."""

from __future__ import annotations

import random

import pytest

from tests.faults.attacks.attack_calls import attacks, run
from tests.faults.attacks.attack_kinds import KINDS
from tests.faults.attacks.attack_targets import NOT_ATTACKED, TARGETS, public_functions


def test_every_public_function_is_attacked() -> None:
    assert public_functions() <= {*TARGETS, *NOT_ATTACKED}
    assert len(KINDS) >= 40


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.thorough)])
def test_wrong_values_are_refused_on_all_ranks_or_change_nothing(count: int) -> None:
    chosen = random.Random(0).sample(attacks(), count)
    counts, wrong = run(chosen)
    assert wrong == []
    assert sum(counts.values()) == count
    assert sum(n for (_, outcome), n in counts.items() if outcome == "refused") > count / 2
