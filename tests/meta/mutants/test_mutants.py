"""The quick profile sees every mutant, in the tier that the mutant names."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from conformance.case import Case
from conformance.runner.tiers import TIERS
from cp_ref.executor.tile_attention import visible_pairs
from tests.meta.mutants import MUTANTS, Mutant
from tests.meta.mutants.hunt import hunt, tier_names

thorough = pytest.mark.thorough

# what Python says of code that is called, or uses values, in another way than it was written for
BROKEN = re.compile(
    r"takes (from )?\d+ |positional argument|unexpected keyword|has no attribute|is not defined|dataclass instances|"
    r"not subscriptable|not iterable|unsupported operand|ImportError|local variable"
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_every_row_changes_what_is_there() -> None:
    for mutant in MUTANTS.values():
        mutant.check()


@thorough
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name: str) -> None:
    mutant = MUTANTS[name]
    found = hunt(name, mutant, mutant.tier)
    assert found.killed, f"the tier {mutant.tier} does not see the mutant {name} in {found.played} problems"
    assert not BROKEN.search(str(found.findings)), f"the mutant itself is broken: {found.findings}"


def test_the_documents_name_mutants_of_every_tier() -> None:
    page = Path(__file__).parents[3] / "docs" / "conformance" / "detection.md"
    text = page.read_text().partition("## Detection rates")[0]
    rows = dict(re.findall(r"^\| ([a-z-]+) \|.*\| (`.*`) \|$", text, re.MULTILINE))
    assert set(rows) == {mutant.tier for mutant in MUTANTS.values()}
    for tier, names in rows.items():
        assert {MUTANTS[name].tier for name in re.findall("`(.*?)`", names)} == {tier}


@thorough
@pytest.mark.parametrize("tier", [name for name, tier in TIERS.items() if tier.kind is Case and name != "pairs"])
def test_what_is_not_spoiled_passes(tier: str) -> None:
    nothing = Mutant("nothing", "cp_ref", tier, "", "nothing is wrong", ())
    found = hunt("nothing", nothing, tier, most=3)  # tests/conformance plays more
    assert not found.killed, (found.text, found.findings)
    assert found.played == 3


def test_mutants_are_of_every_kind() -> None:
    kinds = Counter((mutant.package, mutant.level) for mutant in MUTANTS.values())
    packages = Counter(mutant.package for mutant in MUTANTS.values())
    assert packages["cp_fast"] >= packages["cp_ref"]
    for package in ("cp_ref", "cp_fast"):
        assert kinds[package, "schedule"] >= 40
        assert kinds[package, "helpers"] >= 8
    assert kinds["cp_fast", "kernel"] >= 5
    assert kinds["cp_fast", "merge"] >= 3
    assert {mutant.tier for mutant in MUTANTS.values()} >= {
        name for name, tier in TIERS.items() if tier.level == "schedule"
    }
    for name, mutant in MUTANTS.items():
        assert mutant.tier in tier_names(mutant), name
        assert mutant.text
        assert mutant.tier in TIERS


def test_a_planted_bug_is_gone_afterwards() -> None:
    before = visible_pairs.__code__
    with MUTANTS["window-off-by-one"].planted():
        assert visible_pairs.__code__ is not before
    assert visible_pairs.__code__ is before
