"""Linear attention and causal convolutions over the simulated group: the suite's problems in float64."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings

import cp_fast
import cp_ref
from conformance.implementation import Implementation
from conformance.problems.linear import LinearCase, convolutions, linear_attentions
from tests.marks import examples

PACKAGES = {"cp_ref": Implementation(cp_ref), "cp_fast": Implementation(cp_fast)}


@pytest.mark.parametrize("package", PACKAGES)
@settings(max_examples=examples(int(os.environ.get("CP_LINEAR", "100")), fast=6))
@given(layer=linear_attentions(dtypes=("float64",)), convolution=convolutions(dtypes=("float64",)))
def test_random_problems(package: str, layer: LinearCase, convolution: LinearCase) -> None:
    for case in (layer, convolution):
        assert case.check(PACKAGES[package]) == [], str(case)
