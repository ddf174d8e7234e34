"""For test suites: one call that runs a tier and fails with what is wrong and how to play it again.

@pytest.mark.parametrize("tier", TIER_NAMES)
def test_my_attention(tier):
    check_tier("my.package", tier)
"""

from __future__ import annotations

import os
import shlex

import torch

from conformance.capabilities import probe
from conformance.implementation import load
from conformance.session import Profile, run_errors, run_tier
from conformance.tiers import TIER_NAMES

__all__ = ["TIER_NAMES", "check_tier"]

_DEFAULT_EXAMPLES = 150


def check_tier(impl_name: str, tier: str, *, device: str = "cpu") -> None:
    """Draw problems for one tier, the same ones every time (or play the table of `errors`).

    The environment variable CONFORMANCE_EXAMPLES says how many, 150 without it.

    Args:
        impl_name: pkg.module, or pkg.module:object.
        tier: one of `TIER_NAMES`.

    Raises:
        AssertionError: with the findings, and the command that plays the failing case again; also when most of what was
            drawn is unsupported, so that nothing was tested.
    """
    torch.set_num_threads(1)  # the tensors are tiny
    impl = load(impl_name)
    capabilities = probe(impl, device)
    if tier == "errors":
        result = run_errors(impl, capabilities)
    else:
        examples = int(os.environ.get("CONFORMANCE_EXAMPLES", str(_DEFAULT_EXAMPLES)))
        result = run_tier(impl, tier, capabilities, Profile(examples, derandomize=True))
    lines = []
    for failure in result.failures:
        command = f"python -m conformance --impl {impl_name} --tier {tier} --repro {shlex.quote(failure.text)}"
        lines += ["", *failure.findings, command]
    if lines:
        raise AssertionError("\n".join(lines))
    if result.unsupported > result.run / 2:
        raise AssertionError(f"{result.unsupported} of {result.run} problems are unsupported: too little was tested")
