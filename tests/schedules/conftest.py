"""The native operators are built before a problem's clock runs."""

from __future__ import annotations

import pytest

from cp_fast.movers.select_movers import movers_for


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    movers_for("cpu")
