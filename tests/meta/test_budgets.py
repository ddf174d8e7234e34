"""Budgets let correct results pass, and see rounding in the wrong place, NaN, and infinities that are not alike."""

from __future__ import annotations

import pytest
import torch

from conformance.case import Case
from conformance.checks import budgets
from conformance.checks.baselines import rounded_results
from conformance.checks.budgets import Row, compare
from conformance.checks.reference import exact_results
from conformance.checks.values import eager_results
from conformance.tensors import GlobalTensors, build
from cp_ref.schedules.problem import Problem, Sequence
from tests.meta.calibration import measured, needed

_RESULTS = ("out", "lse", "dq", "dk", "dv")


def _case(dtype: str, softmax_type: str = "vanilla") -> Case:
    problem = Problem(
        4,
        (Sequence(250, 250, 256, 256), Sequence(30, 17, 32, 32)),
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right",
        window_size=(20, -1),
        heads_q=4,
        heads_kv=2,
        d_qk=16,
        d_v=16,
        softmax_type=softmax_type,
        dtype=dtype,
    )
    return Case(problem, tail_q=4, seed=5, return_lse=True, loss="out+lse")


def _all_three(dtype: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Results as good as the dtype allows, exact ones, and the baseline's."""
    case = _case(dtype)
    tensors: GlobalTensors = build(case)
    exact, eager = exact_results(case, tensors), eager_results(case, tensors)
    fast = {name: exact[name].to(eager[name].dtype) for name in _RESULTS}
    return fast, exact, eager


def _rows(
    fast: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], eager: dict[str, torch.Tensor]
) -> dict[str, Row]:
    return {row.name: row for row in compare(fast, exact, eager, eager["out"].dtype)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_rounded_exact_results_and_the_baseline_itself_pass(dtype: str) -> None:
    fast, exact, eager = _all_three(dtype)
    for results in (fast, {name: eager[name] for name in _RESULTS}):
        rows = _rows(results, exact, eager)
        assert list(rows) == list(_RESULTS)
        assert all(row.ok for row in rows.values()), [str(row) for row in rows.values()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_lse_in_low_precision_fails(dtype: str) -> None:
    fast, exact, eager = _all_three(dtype)
    fast["lse"] = fast["lse"].to(eager["out"].dtype).float()
    assert not _rows(fast, exact, eager)["lse"].ok


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_an_error_within_the_largest_but_beyond_the_mean_fails(name: str) -> None:
    fast, exact, eager = _all_three("bfloat16")
    worse = exact[name] + 1.8 * (eager[name].double() - exact[name])
    rows = _rows(fast | {name: worse}, exact, eager)
    assert rows[name].max_error <= rows[name].max_bound
    assert not rows[name].ok
    assert sum(row.ok for row in rows.values()) == len(_RESULTS) - 1


def test_partial_sums_in_low_precision_fail_by_the_careful_reference_alone() -> None:
    """What a ring of eight makes of out when it keeps the running output in bfloat16."""
    problem = Problem(1, (Sequence(256, 256, 256, 256),), attn_mask_type="no_mask", d_qk=32, d_v=32, dtype="bfloat16")
    case = Case(problem, return_lse=True)
    tensors = build(case)
    exact, eager, rounded = (f(case, tensors) for f in (exact_results, eager_results, rounded_results))
    good = {name: rounded[name] for name in ("out", "dq", "dk", "dv")}
    assert all(row.ok for row in compare(good, exact, eager, torch.bfloat16, rounded))
    rough = exact["out"].float()
    for step in range(1, 8):  # each rounding at another place
        rough = (rough * 1.07**step).bfloat16().float() / 1.07**step
    bad = good | {"out": rough.bfloat16()}
    assert all(row.ok for row in compare(bad, exact, eager, torch.bfloat16))
    assert [row.name for row in compare(bad, exact, eager, torch.bfloat16, rounded) if not row.ok] == ["out"]


@pytest.mark.thorough
def test_the_allowances_are_at_least_what_the_careful_reference_needs() -> None:
    problems = measured(80)
    assert all(row.ok for problem in problems for row in compare(*problem))
    assert needed("_NOISE", problems[:40]) <= budgets._NOISE / 2


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
def test_the_careful_reference_in_float64_is_the_oracle(softmax_type: str) -> None:
    case = _case("float64", softmax_type)
    tensors = build(case)
    exact, rounded = exact_results(case, tensors), rounded_results(case, tensors)
    assert set(rounded) == set(exact)
    for name in exact:
        same = torch.where(exact[name] == rounded[name], 0.0, exact[name] - rounded[name])
        assert same.abs().max() < 1e-12, name


def test_nan_infinities_and_shapes_fail() -> None:
    fast, exact, eager = _all_three("float32")
    out = fast["out"].clone()
    out[3, 1, 2] = torch.nan
    assert "NaN" in _rows(fast | {"out": out}, exact, eager)["out"].note
    lse = fast["lse"].nan_to_num(neginf=0.0)  # the padding's -inf lost
    assert "infinite" in _rows(fast | {"lse": lse}, exact, eager)["lse"].note
    assert "shape" in _rows(fast | {"dq": fast["dq"][1:]}, exact, eager)["dq"].note


def test_a_wrong_baseline_proves_nothing() -> None:
    fast, exact, eager = _all_three("bfloat16")
    row = _rows(fast, exact, eager | {"out": torch.zeros_like(eager["out"])})["out"]
    assert not row.ok
    assert "baseline" in row.note


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
def test_the_baseline_in_float64_is_the_oracle(softmax_type: str) -> None:
    case = _case("float64", softmax_type)
    tensors = build(case)
    exact, eager = exact_results(case, tensors), eager_results(case, tensors)
    for name in exact:
        same_infinities = torch.where(exact[name] == eager[name], 0.0, exact[name] - eager[name])
        assert same_infinities.abs().max() < 1e-12, name


@pytest.mark.parametrize("ranks", [2, 3, 5, 16])
def test_partial_gradients_may_be_rounded_once_but_not_their_running_sum(ranks: int) -> None:
    """dv where every query sees one key: sums of dout, of which plain PyTorch rounds the total alone."""
    generator = torch.Generator().manual_seed(0)
    dout = torch.randn(4000, 72, ranks, 2, generator=generator).bfloat16().double()
    exact = dout.sum((2, 3))
    parts, eager = dout.sum(3).bfloat16(), exact.bfloat16()
    running = parts[..., 0]
    for rank in range(1, ranks):
        running = running + parts[..., rank]

    def verdict(got: torch.Tensor) -> bool:
        references = {"dv": eager}
        return compare({"dv": got}, {"dv": exact}, references, torch.bfloat16, references)[0].ok

    assert verdict(parts.double().sum(2).bfloat16())
    assert verdict(running) == (ranks == 2)  # of two parts both are the same
