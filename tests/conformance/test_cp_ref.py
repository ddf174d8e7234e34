"""`cp_ref` passes every tier. For more problems: `python -m conformance --impl cp_ref --profile ci`."""

from __future__ import annotations

import pytest

from tests.conformance.drawn import TIER_NAMES, check_tier

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("tier", TIER_NAMES)
def test_tier(tier: str) -> None:
    check_tier("cp_ref", tier)
