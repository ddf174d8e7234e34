"""`cp_fast` passes the fast tiers, with a few problems each. CI plays all of them by `python -m conformance`."""

from __future__ import annotations

import os

import pytest

from tests.conformance.drawn import TIER_NAMES, check_tier

SLOW = ("special", "known", "torch", "pairs")


@pytest.mark.parametrize("tier", [pytest.param(t, marks=pytest.mark.thorough if t in SLOW else ()) for t in TIER_NAMES])
def test_tier(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFORMANCE_EXAMPLES", os.environ.get("CONFORMANCE_EXAMPLES", "10"))
    check_tier("cp_fast", tier)
