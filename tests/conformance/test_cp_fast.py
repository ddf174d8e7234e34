"""`cp_fast` passes every tier, with half as many problems as `python -m conformance` draws, which CI runs."""

from __future__ import annotations

import os

import pytest

from tests.conformance.drawn import TIER_NAMES, check_tier


@pytest.mark.parametrize("tier", TIER_NAMES)
def test_tier(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFORMANCE_EXAMPLES", os.environ.get("CONFORMANCE_EXAMPLES", "30"))
    check_tier("cp_fast", tier)
