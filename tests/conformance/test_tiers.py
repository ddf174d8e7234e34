"""Both packages pass the tiers of the suite. For more problems: `python -m conformance --impl cp_ref --profile ci`.

What the gradient of softmax_offset is said to be, a share or the total, is what the suite looks for; and a sink is
added to a row in the same way whatever other rows there are.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from conformance.case import Case
from conformance.checks.metamorphic import check_metamorphic
from conformance.checks.play import play
from conformance.checks.values import check_logic
from conformance.implementation import Implementation, load
from conformance.problems.capabilities import Capabilities, probe
from conformance.problems.special import SPECIAL, SpecialCase
from conformance.record import replay_command
from conformance.runner.run_tiers import Profile, run_tier
from conformance.runner.tiers import TIERS
from conformance.tensors import build
from cp_ref.schedules.problem import Problem, Sequence
from tests.marks import HANGS_S

SCHEDULES = [name for name, tier in TIERS.items() if tier.level == "schedule"]
LAYERS = [name for name, tier in TIERS.items() if tier.level in ("linear", "sparse")]  # cp_ref: tests/meta
SLOW = ("special", "known", "torch", "pairs")  # the next ones play each problem several times
SLOW += ("budget", "metamorphic", "spellings", "hygiene", "determinism", "errors")


@lru_cache
def probed(name: str) -> tuple[Implementation, Capabilities]:
    impl = load(name)
    return impl, probe(impl)


def check_tier(name: str, tier: str, examples: int) -> None:
    """Draw problems for a tier, the same ones every time, or play its table, in this process. CONFORMANCE_EXAMPLES says
    how many in place of `examples`.
    """
    torch.set_num_threads(1)  # the tensors are tiny
    profile = Profile(int(os.environ.get("CONFORMANCE_EXAMPLES", examples)), derandomize=True)
    impl, capabilities = probed(name)
    result = run_tier(impl, tier, capabilities, profile)
    lines = []
    for played in result.smallest:
        lines += ["", *played.findings, replay_command({"impl": name, "device": "cpu"}, played)]
    assert not lines, "\n".join(lines)
    assert result.unsupported <= result.run / 2, f"{result.unsupported} of {result.run} problems are unsupported"


@pytest.mark.thorough
@pytest.mark.parametrize("tier", [tier for tier in SCHEDULES if tier != "special"])
def test_cp_ref_passes(tier: str) -> None:
    check_tier("cp_ref", tier, 60)


@pytest.mark.thorough
def test_cp_ref_passes_special_under_schedules_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry under every second of its schedules: `verify` proves the schedules, and the reference plays them all
    by the same code. Those of cp_fast are played under all.
    """
    torch.set_num_threads(1)
    monkeypatch.setenv("CONFORMANCE_LIMIT_S", str(HANGS_S))
    impl, capabilities = probed("cp_ref")
    for number, name in enumerate(SpecialCase.items(capabilities)):
        entry = SPECIAL[name]
        found = replace(entry, cases=entry.cases[number % 2 :: 2] or entry.cases).play(impl)
        assert not found, "\n".join((name, *found))


@pytest.mark.parametrize(
    "tier", [pytest.param(t, marks=pytest.mark.thorough if t in SLOW else ()) for t in (*SCHEDULES, *LAYERS)]
)
def test_cp_fast_passes(tier: str) -> None:
    """A few problems each: CI plays all tiers by `python -m conformance`."""
    check_tier("cp_fast", tier, 5)


# ---- sinks


PACKAGES = pytest.mark.parametrize("package", [cp_ref, cp_fast])
CASE = Case(Problem(4, (Sequence(16, 16, 16, 16),), qkv_format="thd", heads_q=2, softmax_type="learnable"))


def implementation(package: Any, gives: str, says: str) -> Any:
    """The package, whose contexts ask for one kind of gradient, and which says what kind it is."""
    context = partial(package.ContextParallel, softmax_offset_grad=gives)
    members = {name: getattr(package, name) for name in ("attention", "supports", "Unsupported", "make_plan", "shard")}
    return SimpleNamespace(ContextParallel=context, softmax_offset_grad=says, **members)


@PACKAGES
@pytest.mark.parametrize("kind", ["share", "total"])
def test_both_kinds_are_right(package: Any, kind: str) -> None:
    assert check_logic(implementation(package, kind, kind), CASE, "cpu") == []


@PACKAGES
def test_a_total_taken_for_a_share_is_seen(package: Any) -> None:
    assert any("d_offset" in finding for finding in check_logic(implementation(package, "total", "share"), CASE, "cpu"))


@PACKAGES
def test_shares_taken_for_totals_are_seen(package: Any) -> None:
    played = play(implementation(package, "share", "total"), CASE, build(CASE, "cpu"))
    assert any("d_offset differs between ranks" in finding for finding in played.findings)


@pytest.mark.thorough
def test_a_sink_has_the_same_bits_whatever_else_is_in_the_batch() -> None:
    problem = Problem(
        8, (Sequence(16, 16, 16, 16),) * 3, cp_comm_type="a2a", a2a_size=8, heads_q=8, heads_kv=8, d_qk=64, d_v=64,
        softmax_type="learnable",
    )  # fmt: skip
    assert check_metamorphic(load("cp_fast"), Case(problem, seed=2, deterministic=True)) == []
