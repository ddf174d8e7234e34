"""The tables of known bugs and of special cases: complete, playable one by one, and able to fail. Where a bug is
planted in the reference, the case that carries its number, or its kind of edge, sees it.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from conformance.checks.reference import UnsupportedCase
from conformance.implementation import Implementation, load
from conformance.problems.capabilities import EVERYTHING
from conformance.problems.known_bugs import KNOWN, PROJECTS, KnownBug
from conformance.problems.named import NamedCases
from conformance.problems.special import SPECIAL, SpecialCase
from tests.meta.mutants import MUTANTS

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
SEEN_BY = {  # special case, one for each kind of edge -> mutant
    "no-keys": "empty-rows-are-nan",
    "bottom-right-fewer-keys": "bottom-right-taken-for-top-left",
    "window-of-itself": "window-off-by-one",
    "window-one-short-of-all": "window-dropped",
    "a-rank-of-padding": "padding-is-attended",
    "tail-after-padding": "tail-never-written",
    "fewer-kv-heads-than-ranks": "replicated-kv-heads-not-summed",
    "head-dim-192-128": "scale-of-d-v",
    "very-positive-scores": "merge-without-a-maximum",
    "softcap-saturated": "softcap-divides-twice",
    "no-keys-learnable": "sink-dropped",
    "lse-gradient-alone": "lse-gradient-lost",
    "max-logit-on-one-rank": "max-logit-of-one-rank",
    "padding-mask-in-sbhd": "batch-and-sequence-exchanged",
    "one-key-too-few": "one-key-lost-in-long-rows",
}


@pytest.fixture(scope="module")
def reference() -> Implementation:
    torch.set_num_threads(1)
    return load("cp_ref")


def test_there_are_reports_of_every_project() -> None:
    assert len(KNOWN) >= 30
    assert len(REPORTED) >= 12
    assert {name.rpartition("-")[0] for name in KNOWN} == {*PROJECTS}


@pytest.mark.parametrize("name", KNOWN)
def test_a_report_is_well_formed(name: str) -> None:
    known = KNOWN[name]
    assert re.fullmatch(r"[\w-]+-\d+", name)
    assert known.text.endswith(".")
    assert known.cases or known.errors or known.by_hand
    assert name in KnownBug.items(EVERYTHING)


@pytest.mark.parametrize(
    ("case", "mutant"),
    [
        *(
            pytest.param(KnownBug(name), mutant, marks=pytest.mark.thorough if n % 4 else (), id=name)
            for n, (name, mutant) in enumerate(REPORTED.items())
        ),
        *(
            pytest.param(SpecialCase(name), mutant, marks=pytest.mark.thorough if n % 4 else (), id=name)
            for n, (name, mutant) in enumerate(SEEN_BY.items())
        ),
    ],
)
@pytest.mark.one_in(2)
def test_a_case_sees_the_bug(case: NamedCases, mutant: str, reference: Implementation) -> None:
    with MUTANTS[mutant].planted():
        assert case.check(reference)


@pytest.mark.parametrize("name", ["te-2868", "usp-120", "bridge-2667", "bridge-1964", "deepspeed-7384"])
def test_the_reference_passes(name: str, reference: Implementation) -> None:
    assert KnownBug(name).check(reference) == []


def test_without_helpers_a_helper_report_is_unsupported() -> None:
    class NoHelpers:
        thd = None

    with pytest.raises(UnsupportedCase, match="thd"):
        KNOWN["bridge-1964"].play(NoHelpers())  # pyright: ignore[reportArgumentType]


def test_the_table_is_complete() -> None:
    assert len(SPECIAL) >= 40
    for name, entry in SPECIAL.items():
        assert entry.cases, name
        assert entry.text, name
    schedules = {case.problem.cp_comm_type for entry in SPECIAL.values() for case in entry.cases}
    assert schedules == {"p2p", "all_gather", "a2a", "a2a+p2p"}
    assert sum(len({c.problem.cp_comm_type for c in entry.cases}) >= 3 for entry in SPECIAL.values()) > 70
    on_gpus = replace(EVERYTHING, device="cuda:0")
    assert SpecialCase.items(on_gpus) == list(SPECIAL)
    assert SpecialCase.items(EVERYTHING) == [name for name in SPECIAL if name != "positions-beyond-65536"]


def test_an_entry_that_is_not_supported_says_why(reference: Implementation) -> None:
    class NoSoftcap:
        """`cp_ref`, which refuses a softcap everywhere."""

        def __getattr__(self, name: str) -> object:
            return getattr(reference, name)

        def supports(self, **arguments: object) -> tuple[bool, str]:
            return (False, "no softcap") if arguments["softcap"] else (True, "")

        def attention(self, *tensors: torch.Tensor, softcap: float = 0.0, **arguments: object) -> object:
            if softcap:
                raise reference.Unsupported("softcap", {"here": set()})
            return reference.attention(*tensors, **arguments)

    with pytest.raises(UnsupportedCase, match="no softcap"):
        SpecialCase("softcap-saturated").check(NoSoftcap())  # pyright: ignore[reportArgumentType]
