"""Traced expressions compute what the function and its autograd compute, and nothing else is traced."""

from __future__ import annotations

import pytest
import torch

from cp_fast.backends.fa4.scores.trace_scores import trace_scores
from cp_ref.schedules.words import Unsupported
from tests.cp_fast.backends.fa4_scores.functions import FUNCTIONS, TABLE, places, refused
from tests.fa4_dry import evaluated


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_and_derivative(name: str) -> None:
    function, captured = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(1)
    score, grad = (3 * torch.randn(400, generator=generator, dtype=torch.float64) for _ in range(2))
    at = places(400)
    traced = trace_scores(function, captured)
    leaf = score.clone().requires_grad_()
    doubles = {key: x.double() if x.is_floating_point() else x for key, x in captured.items()}
    expected = function(leaf.clone(), *at, **doubles)
    torch.testing.assert_close(evaluated(traced.modified, score, grad, at, captured), expected.detach().double())
    if expected.requires_grad:
        (slope,) = torch.autograd.grad(expected, leaf, grad)
        torch.testing.assert_close(evaluated(traced.pulled_back, score, grad, at, captured), slope)


@pytest.mark.parametrize("name", refused())
def test_refused_by_name(name: str) -> None:
    function, captured, word = refused()[name]
    with pytest.raises(Unsupported, match="score_mod on backend 'fa4'") as caught:
        trace_scores(function, captured)
    assert word in str(caught.value)


def test_equal_functions_have_equal_digests() -> None:
    def of(factor: float, rows: int) -> str:
        captured = {"t": torch.zeros(rows, 7)}
        return trace_scores(lambda s, b, h, i, j, d, t: s * factor + t[h, 0], captured).digest

    assert of(2.0, 4) == of(2.0, 5) != of(3.0, 4)


def test_levels_say_what_rows_and_columns_share() -> None:
    traced = trace_scores(lambda s, b, h, i, j, d, t: s + t[h, i % 7] * (j // 2), {"t": TABLE})
    levels = dict(zip((node.op for node in traced.modified.nodes), traced.modified.levels, strict=True))
    assert (levels["load"], levels["floor_div"], levels["mul"], levels["add"]) == (1, 2, 3, 3)
