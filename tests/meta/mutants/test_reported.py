"""Known bugs: where one is planted in the reference, the case that carries its number sees it."""

from __future__ import annotations

import re

import pytest
import torch

from conformance.checks.reference import UnsupportedCase
from conformance.implementation import Implementation, load
from conformance.problems.capabilities import EVERYTHING
from conformance.problems.known_frameworks import KNOWN, KnownBug
from tests.meta.mutants import MUTANTS
from tests.meta.mutants.reported import REPORTED


@pytest.fixture(scope="module")
def reference() -> Implementation:
    torch.set_num_threads(1)
    return load("cp_ref")


def test_there_are_reports_of_every_project() -> None:
    assert len(KNOWN) >= 30
    assert len(REPORTED) >= 12
    projects = {known.where.split("#")[0] for known in KNOWN.values()}
    assert projects >= {
        "NVIDIA/TransformerEngine",
        "zhuzilin/ring-flash-attention",
        "feifeibear/long-context-attention",
        "pytorch/pytorch",
        "deepspeedai/DeepSpeed",
        "NVIDIA/Megatron-LM",
    }


@pytest.mark.parametrize("name", KNOWN)
def test_a_report_is_well_formed(name: str) -> None:
    known = KNOWN[name]
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", known.where)
    assert name.endswith(known.where.split("#")[1])
    assert known.text.endswith(".")
    assert known.cases or known.errors or known.by_hand
    assert name in KnownBug.items(EVERYTHING)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if n % 4 else ()) for n, name in enumerate(REPORTED)]
)
def test_the_case_sees_the_bug(name: str, reference: Implementation) -> None:
    with MUTANTS[REPORTED[name]].planted():
        assert KNOWN[name].play(reference)


@pytest.mark.parametrize("name", ["te-2868", "usp-120", "bridge-2667", "bridge-1964", "deepspeed-7384"])
def test_the_reference_passes(name: str, reference: Implementation) -> None:
    assert KnownBug(name).check(reference) == []


def test_a_report_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="te-0"):
        KnownBug("te-0")


def test_without_helpers_a_helper_report_is_unsupported() -> None:
    class NoHelpers:
        thd = None

    with pytest.raises(UnsupportedCase, match="thd"):
        KNOWN["bridge-1964"].play(NoHelpers())  # pyright: ignore[reportArgumentType]
