"""Linear attention and causal convolutions over the simulated group: the suite's problems in float64."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings

import cp_fast
import cp_ref
from conformance.implementation import Implementation
from conformance.levels.linear.draw_linear import convolutions, linear_attentions
from conformance.levels.linear.linear_case import LinearCase
from conformance.levels.linear.play_linear import check
from tests.marks import examples

PACKAGES = {"cp_ref": Implementation(cp_ref), "cp_fast": Implementation(cp_fast)}
DRAWN = given(layer=linear_attentions(dtypes=("float64",)), convolution=convolutions(dtypes=("float64",)))


def check_both(package: str, *cases: LinearCase) -> None:
    for case in cases:
        assert check(PACKAGES[package], case) == [], str(case)


@pytest.mark.parametrize("package", PACKAGES)
@settings(max_examples=examples(40), deadline=None)
@DRAWN
def test_a_few_random_problems(package: str, layer: LinearCase, convolution: LinearCase) -> None:
    check_both(package, layer, convolution)


@pytest.mark.thorough
@pytest.mark.parametrize("package", PACKAGES)
@settings(max_examples=examples(int(os.environ.get("CP_LINEAR", "100"))), deadline=None)
@DRAWN
def test_random_problems(package: str, layer: LinearCase, convolution: LinearCase) -> None:
    check_both(package, layer, convolution)
