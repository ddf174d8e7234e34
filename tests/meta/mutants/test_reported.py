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

__all__ = [
    "REPORTED",
]

REPORTED = {  # known case -> mutant
    "te-3331": "padding-counted-by-division",
    "te-1930": "last-real-token-lost",
    "te-2829": "wrong-half-of-a-block",
    "te-2186": "padding-in-the-gradients",
    "te-1557": "dq-of-the-last-step-lost",
    "te-1054": "dkv-copied-not-added",
    "te-909": "chunks-in-another-order",
    "te-716": "merge-without-a-maximum",
    "te-3528": "empty-rows-are-nan",
    "te-3532": "minus-one-taken-literally",
    "te-3551": "sink-dropped",
    "te-1467": "lse-heads-and-rows-exchanged",
    "te-821": "partial-outputs-in-bf16",
    "te-2892": "padding-is-attended",
    "te-3205": "tail-never-written",
    "rfa-42": "dq-in-bf16",
    "rfa-22": "partial-outputs-in-bf16",
    "rfa-87": "dq-always-bf16",
    "easycontext-14": "merge-without-a-maximum",
    "prime-rl-2828": "window-dropped",
    "prime-rl-3397": "sink-dropped",
    "prime-rl-3042": "replicated-kv-heads-not-summed",
    "usp-72": "merge-without-a-maximum",
    "megatron-1341": "a2a-rank-before-p2p-rank",
    "magi-239": "max-logit-of-one-rank",
    "torchtitan-3206": "batch-and-sequence-exchanged",
    "accelerate-4177": "window-dropped",
    "trl-6843": "documents-joined",
    "diffusers-14265": "stale-kv-in-the-backward",
    "automodel-3157": "dk-heads-rotated",
    "automodel-2384": "dout-strides-ignored",
    "deepspeed-5808": "batch-and-sequence-exchanged",
    "megatron-1464": "dq-of-the-last-step-lost",
    "megatron-1764": "empty-rows-are-nan",
    "megatron-5597": "halo-one-short",
}


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


def test_without_helpers_a_helper_report_is_unsupported() -> None:
    class NoHelpers:
        thd = None

    with pytest.raises(UnsupportedCase, match="thd"):
        KNOWN["bridge-1964"].play(NoHelpers())  # pyright: ignore[reportArgumentType]
