"""An outsider's ring with three planted bugs: set up in under 30 lines, each found, each shrunk to 8 tokens at most."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from conformance.case import Case
from conformance.problems.capabilities import Capabilities, probe
from conformance.runner.run_tiers import Profile, run_tier
from tests.meta.zoo.naive_ring import Flaws
from tests.meta.zoo.naive_setup import Naive

pytestmark = pytest.mark.thorough

TIERS = ("probes", "logic")
SIZES = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def capabilities() -> Capabilities:
    torch.set_num_threads(1)
    return probe(Naive())


def test_the_setup_is_short() -> None:
    text = Path(__file__).with_name("naive_setup.py").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) < 30
    ring = Path(__file__).with_name("naive_ring.py").read_text()
    assert len([line for line in ring.splitlines() if line.strip()]) < 80


@pytest.mark.parametrize("tier", TIERS)
def test_without_bugs_it_is_right_in_all_that_it_claims(tier: str, capabilities: Capabilities) -> None:
    result = run_tier(Naive(), tier, capabilities, Profile(80, derandomize=True), cp_sizes=SIZES)
    assert not result.smallest, result.smallest
    assert result.passed >= 40


@pytest.mark.parametrize("flaw", [field.name for field in fields(Flaws)])
def test_every_bug_is_found_and_shrunk(flaw: str, capabilities: Capabilities, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Naive, "flaws", Flaws(**{flaw: True}))
    smallest = [
        failure
        for tier in TIERS
        for failure in run_tier(Naive(), tier, capabilities, Profile(80, derandomize=True), cp_sizes=SIZES).smallest
    ]
    assert smallest, f"nothing was found of {flaw}"
    tokens = [sum(max(s.slots_q, s.slots_kv) for s in Case.parse(f.text).problem.sequences) for f in smallest]
    assert min(tokens) <= 8, smallest
