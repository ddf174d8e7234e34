"""The table of special cases: complete, playable one by one, and able to fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance.checks.reference import UnsupportedCase
from conformance.implementation import Implementation, load
from conformance.problems.capabilities import EVERYTHING
from conformance.problems.special import SPECIAL, SpecialCase
from tests.meta.mutants import MUTANTS

# one entry for each kind of edge, and a bug that it has to see
SEEN_BY = {
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


@pytest.mark.parametrize("name", SEEN_BY)
def test_an_entry_sees_its_bug(name: str, reference: Implementation) -> None:
    with MUTANTS[SEEN_BY[name]].planted():
        assert SpecialCase(name).check(reference)


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
