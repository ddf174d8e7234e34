"""The native operators are built before a problem's clock runs."""

from __future__ import annotations

import pytest

from cp_fast.movers.select_movers import kernels


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    kernels("cpu")
