"""Traced expressions compute what the function and its autograd compute, and nothing else is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from cp_fast.backends.fa4.scores.expressions import BOOL, FLOAT, INT, LONG, Expression
from cp_fast.backends.fa4.scores.tracing.trace_scores import trace_scores
from cp_ref.spec import Unsupported
from tests.cp_fast.backends.fa4_scores.functions import FUNCTIONS, TABLE, places, refused

DTYPES = {FLOAT: torch.float64, INT: torch.int32, LONG: torch.int64, BOOL: torch.bool}
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "convert": lambda kind, x: torch.as_tensor(x).to(DTYPES[kind]),
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "mul": lambda _, a, b: a * b,
    "div": lambda _, a, b: a / b,
    "floor_div": lambda _, a, b: a // b,
    "mod": lambda _, a, b: a % b,
    "neg": lambda _, x: -x,
    "abs": lambda _, x: abs(x),
    "minimum": lambda _, a, b: torch.minimum(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b))),
    "maximum": lambda _, a, b: torch.maximum(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b))),
    "where": lambda kind, c, a, b: torch.where(
        c, torch.as_tensor(a).to(DTYPES[kind]), torch.as_tensor(b).to(DTYPES[kind])
    ),
    "eq": lambda _, a, b: a == b,
    "ne": lambda _, a, b: a != b,
    "lt": lambda _, a, b: a < b,
    "le": lambda _, a, b: a <= b,
    "gt": lambda _, a, b: a > b,
    "ge": lambda _, a, b: a >= b,
    "and": lambda _, a, b: a & b,
    "or": lambda _, a, b: a | b,
    "xor": lambda _, a, b: a ^ b,
    "not": lambda _, x: ~x,
    **{
        name: (lambda function: lambda _, x: function(x))(getattr(torch, name))
        for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid")
    },
}


def evaluated(
    expression: Expression,
    score: torch.Tensor,
    grad: torch.Tensor,
    at: list[torch.Tensor],
    captured: dict[str, torch.Tensor],
) -> torch.Tensor:
    """An expression's values, in float64."""

    def load(name: str, indices: list[Any]) -> torch.Tensor:
        x = captured[name] if captured[name].dim() else captured[name][None]
        x = x[tuple(one.long() if isinstance(one, torch.Tensor) else one for one in indices)]
        return x.double() if x.is_floating_point() else x

    names = ("score", "grad", "b", "h", "q_idx", "kv_idx", "diagonal")
    leaves = dict(zip(names, (score, grad, *at), strict=True))
    values: list[Any] = []
    for node in expression.nodes:
        inputs = [values[n] for n in node.inputs]
        if node.op == "leaf":
            values.append(leaves[node.value])
        elif node.op == "constant":
            values.append(node.value)
        else:
            values.append(load(node.value, inputs) if node.op == "load" else OPERATIONS[node.op](node.kind, *inputs))
    return torch.as_tensor(values[expression.result], dtype=torch.float64).expand(score.shape)


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
