"""The quick profile sees every mutant, in the tier that the mutant names, and lets the unmutated reference pass."""

from __future__ import annotations

import pytest
import torch

from conformance.capabilities import Capabilities, probe
from conformance.case import Case
from conformance.implementation import Implementation, load
from conformance.mutants import MUTANTS
from conformance.session import PROFILES, TierResult, replay, run_errors, run_tier
from conformance.tiers import TIER_NAMES


@pytest.fixture(scope="module")
def reference() -> Implementation:
    torch.set_num_threads(1)
    return load("cp_ref")


@pytest.fixture(scope="module")
def capabilities(reference: Implementation) -> Capabilities:
    return probe(reference)


def _quick(impl: Implementation, tier: str, capabilities: Capabilities) -> TierResult:
    if tier == "errors":
        return run_errors(impl, capabilities)
    return run_tier(impl, tier, capabilities, PROFILES["quick"], shrink=False)


@pytest.mark.parametrize("tier", TIER_NAMES)
def test_the_reference_itself_passes(tier: str, reference: Implementation, capabilities: Capabilities) -> None:
    result = _quick(reference, tier, capabilities)
    assert not result.failures, "\n".join(f"{f.text}: {finding}" for f in result.failures for finding in f.findings)
    assert result.passed


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name: str, reference: Implementation, capabilities: Capabilities) -> None:
    mutant = MUTANTS[name]
    before = len(_quick(reference, "errors", capabilities).failures) if mutant.tier == "errors" else 0
    with mutant.planted():
        result = _quick(reference, mutant.tier, capabilities)
    assert len(result.failures) > before, (
        f"the tier {mutant.tier} does not see the mutant {name} in {result.run} problems"
    )


def test_a_failure_shrinks_to_a_small_case_that_replays(reference: Implementation, capabilities: Capabilities) -> None:
    with MUTANTS["window-off-by-one"].planted():
        (failure,) = run_tier(reference, "probes", capabilities, PROFILES["quick"]).failures
        problem = Case.parse(failure.text).problem
        assert problem.cp_size <= 2
        assert problem.pairs <= 64
        (again,) = replay(reference, failure.text, ["probes"])
        assert again.failures == [failure]
    (healed,) = replay(reference, failure.text, ["probes"])
    assert healed.passed
