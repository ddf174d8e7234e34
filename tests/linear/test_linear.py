"""Linear attention and causal convolutions over the simulated group, against the oracle in float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cp_fast
import cp_ref
from cp_ref.common.linear.linear_calls import KINDS
from cp_ref.spec import Problem
from tests.linear.played import Convolution, Layer, check_convolution, check_layer
from tests.linear.random_problems import linear_problems
from tests.marks import examples

PACKAGES = {"cp_ref": cp_ref, "cp_fast": cp_fast}
LAYERS = st.builds(
    Layer,
    kind=st.sampled_from(KINDS),
    heads=st.integers(1, 2),
    shared=st.integers(1, 2),
    d_k=st.integers(1, 3),
    d_v=st.integers(1, 3),
    scale=st.sampled_from([None, 0.5, -1]),
    initial_state=st.booleans(),
    output_final_state=st.booleans(),
    tail=st.integers(0, 2),
)
CONVOLUTIONS = st.builds(
    Convolution,
    channels=st.integers(1, 3),
    kernel_size=st.integers(1, 6),
    bias=st.booleans(),
    activation=st.sampled_from([None, "silu", "swish"]),
    tail=st.integers(0, 2),
)
DRAWN = given(problem=linear_problems(most=9), layer=LAYERS, convolution=CONVOLUTIONS, seed=st.integers(0, 2**16))


def check(package: str, problem: Problem, layer: Layer, convolution: Convolution, seed: int) -> None:
    check_layer(PACKAGES[package], problem, layer, seed)
    check_convolution(PACKAGES[package], problem, convolution, seed)


@pytest.mark.parametrize("package", PACKAGES)
@settings(max_examples=examples(100), deadline=None)
@DRAWN
def test_a_few_random_problems(package: str, **drawn: Any) -> None:
    check(package, **drawn)


@pytest.mark.thorough
@pytest.mark.parametrize("package", PACKAGES)
@settings(max_examples=examples(int(os.environ.get("CP_LINEAR", "300"))), deadline=None)
@DRAWN
def test_random_problems(package: str, **drawn: Any) -> None:
    check(package, **drawn)
