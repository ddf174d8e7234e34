"""For test suites: one call that runs a tier and fails with what is wrong and how to play it again.

@pytest.mark.parametrize("tier", TIER_NAMES)
def test_my_attention(tier):
    check_tier("my.package", tier)

`conformance.suite` has the same as ready-made tests.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache

import torch

from conformance.implementation import Implementation, load
from conformance.problems.capabilities import EVERYTHING, Capabilities, probe
from conformance.record import replay_command
from conformance.runner.run_tiers import Profile, TierResult, run_tier
from conformance.runner.tiers import TIERS

__all__ = ["TIER_NAMES", "check_tier"]

TIER_NAMES = tuple(name for name, tier in TIERS.items() if tier.level == "schedule")

_DEFAULT_EXAMPLES = 60


def check_tier(impl_name: str, tier: str, *, device: str = "cpu") -> None:
    """Draw problems for one tier, the same ones every time (or play its table), in this process.

    The environment variable CONFORMANCE_EXAMPLES says how many, 60 without it.

    Args:
        impl_name: pkg.module, or pkg.module:object, or an entry point's name.
        tier: one of `conformance.runner.tiers.TIERS`.

    Raises:
        AssertionError: with the findings, and the command that plays the failing problem again; also when most of what
            was drawn is unsupported, so that nothing was tested.
    """
    torch.set_num_threads(1)  # the tensors are tiny
    result = _play(impl_name, tier, device)
    lines = []
    for played in result.smallest:
        lines += ["", *played.findings, replay_command({"impl": impl_name, "device": device}, played)]
    if lines:
        raise AssertionError("\n".join(lines))
    if result.unsupported > result.run / 2:
        raise AssertionError(f"{result.unsupported} of {result.run} problems are unsupported: too little was tested")


def _play(impl_name: str, tier: str, device: str) -> TierResult:
    profile = Profile(int(os.environ.get("CONFORMANCE_EXAMPLES", str(_DEFAULT_EXAMPLES))), derandomize=True)
    if TIERS[tier].level != "schedule":
        return run_tier(load(impl_name), tier, replace(EVERYTHING, device=device), profile)
    impl, capabilities = _probed(impl_name, device)
    return run_tier(impl, tier, capabilities, profile)


@lru_cache(maxsize=8)
def _probed(impl_name: str, device: str) -> tuple[Implementation, Capabilities]:
    impl = load(impl_name)
    return impl, probe(impl, device)
