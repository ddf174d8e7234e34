"""Tests on a GPU share it and its host with others, while kernel libraries compile: ranks get more time than usual.
And the three implementations of the kernels.
"""

import os

import pytest

from cp_fast.movers import why_not
from tests.cp_fast.kernels.checks.case import Where

os.environ.setdefault("CONFORMANCE_LIMIT_S", "300")


@pytest.fixture(params=["native", "numba", "torch"])
def where(request: pytest.FixtureRequest) -> Where:
    if (reason := why_not(request.param, "cuda")) is not None:
        pytest.skip(f"needs the kernels {request.param!r}: {reason}")
    return Where(request.param, "cuda")
