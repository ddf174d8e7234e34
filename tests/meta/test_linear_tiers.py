"""The level `linear`: libraries without it miss it, texts replay, refusals count as such, wrong results are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cp_ref
from conformance import replay
from conformance.implementation import Implementation, load
from conformance.problems.capabilities import EVERYTHING
from conformance.problems.linear import CausalConv1d, LinearAttention
from conformance.record import RunRecord
from conformance.report.page import summary
from conformance.runner.play_problem import InProcess, Task, play_task, task_of
from conformance.runner.run_tiers import PROFILES, Profile, run_tier
from conformance.runner.suite_run import SuiteRun
from tests.meta.mutants import MUTANTS

TIERS = ("linear", "linear-convolution")
FEW = Profile(8, derandomize=True)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def like_the_reference(**changed: Any) -> Implementation:
    return Implementation(SimpleNamespace(**({name: getattr(cp_ref, name) for name in cp_ref.__all__} | changed)))


def test_a_library_without_linear_layers_misses_the_level() -> None:
    impl = like_the_reference(linear_attention=None)
    assert "linear" not in impl.levels
    run = SuiteRun(InProcess(impl), FEW, tiers=TIERS)
    (only,) = run.results()
    assert (only.run, only.count("missing"), only.smallest) == (1, 1, [])
    assert only.note == "the implementation does not offer the level linear"


def test_a_library_without_convolutions_misses_them() -> None:
    result = run_tier(like_the_reference(causal_conv1d=None), "linear-convolution", EVERYTHING, FEW)
    assert (result.run, result.count("missing")) == (1, 1)


def test_what_every_rank_refuses_is_unsupported() -> None:
    def no_kda(*tensors: torch.Tensor, kind: str, **arguments: Any) -> Any:
        if kind == "kda":
            raise NotImplementedError("kda")
        return cp_ref.linear_attention(*tensors, kind=kind, **arguments)  # type: ignore[call-overload]

    result = run_tier(like_the_reference(linear_attention=no_kda), "linear", EVERYTHING, Profile(12, True))
    assert result.passed == 12
    assert result.unsupported


def test_counts_and_group_sizes() -> None:
    run = SuiteRun(InProcess(load("cp_ref")), PROFILES["quick"], cp_sizes=(3,))
    assert [run.expected(tier) for tier in TIERS] == [60, 60]
    for tier, kind in zip(TIERS, (LinearAttention, CausalConv1d), strict=True):
        drawn = run_tier(load("cp_ref"), tier, EVERYTHING, FEW, cp_sizes=(3,)).played
        assert {kind.parse(played.text).cp_size for played in drawn} == {3}


@pytest.mark.parametrize("name", ["maps-in-reverse", "convolution-halo-one-short"])
def test_a_failure_replays_and_is_in_the_report(name: str) -> None:
    mutant, impl = MUTANTS[name], load("cp_ref")
    with mutant.planted():
        result = run_tier(impl, mutant.tier, EVERYTHING, Profile(60, derandomize=True, shrink_s=2.0))
        (smallest,) = result.smallest
        assert task_of(smallest.text) == [Task("linear", mutant.tier, smallest.text)]
        (again,) = replay(impl, smallest.text)
        assert again.count("wrong") == 1
    assert replay(impl, smallest.text)[0].passed == 1
    found = summary(RunRecord({"impl": "cp_ref"}, tuple(result.played)))
    assert smallest.text in [failure.text for failure in found.failures]
    assert found.by("level")["linear"][0]["wrong"]


@pytest.mark.parametrize(
    "text",
    [
        "LinearAttention(kind='rwkv')",
        "LinearAttention(heads=0)",
        "LinearAttention(cp_size=0)",
        "LinearAttention(documents=((9, 8),))",
        "LinearAttention(spoiled=1)",
        "LinearAttention(tail=1, qkv_format='bshd')",
        "CausalConv1d(activation='gelu')",
        "CausalConv1d(kernel_size=0)",
    ],
)
def test_a_mistyped_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read a problem of"):
        task_of(text)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda out: out * 1.001, "should be"),
        (lambda out: out.float(), "dtype"),
        (lambda out: out[..., :1], "shape"),
        (lambda out: torch.where(out == 0, 1.0, out), "not zero where there is no token"),
    ],
)
def test_wrong_results_are_named(spoil: Any, words: str) -> None:
    def layer(*tensors: torch.Tensor, **arguments: Any) -> Any:
        return spoil(cp_ref.linear_attention(*tensors, **arguments))

    text = str(LinearAttention(documents=((5, 8), (8, 8)), tail=2 if "zero" in words else 0))
    played = play_task(like_the_reference(linear_attention=layer), Task("linear", "linear", text))
    assert played.verdict == "wrong"
    assert words in " ".join(played.findings)
