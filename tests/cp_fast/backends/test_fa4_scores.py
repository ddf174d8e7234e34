"""Scores on backend fa4 without it: expressions of a score_mod, the program of a launch, and the library's hooks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from cp_fast.kernels.attention.backend_protocol import LaunchPositions, LaunchScores
from cp_fast.kernels.attention.fa4 import fa4_backend
from cp_fast.kernels.attention.fa4.fa4_backend import changed_hook
from cp_fast.kernels.attention.fa4.scores.launch_program import launch_program, traced_scores
from cp_fast.kernels.attention.fa4.scores.trace_scores import trace_scores
from cp_ref.calls.scores import ScoreTensors
from cp_ref.schedules.problem import ScoreSpec
from cp_ref.schedules.words import Unsupported
from tests.fa4_dry import evaluated

__all__ = [
    "FUNCTIONS",
    "SLOPES",
    "TABLE",
    "places",
    "refused",
]

SLOPES = torch.linspace(-1, 1, 4)
TABLE = torch.sin(torch.arange(28.0)).reshape(4, 7)
KINDS = torch.arange(100) % 3
FLAGS = torch.arange(100) % 2 == 0

FUNCTIONS: dict[str, tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]] = {
    "arithmetic": (lambda s, b, h, i, j, d: -(s * 2 - 1) / 3 + (i - j) * 0.5 + b + 7, {}),
    "slopes": (lambda s, b, h, i, j, d, slopes: s - slopes[h] * (d - j).abs(), {"slopes": SLOPES}),
    "bfloat16": (lambda s, b, h, i, j, d, slopes: s + slopes[h], {"slopes": SLOPES.bfloat16()}),
    "halves": (lambda s, b, h, i, j, d, t: s * t[h].abs() - t[b].float() * 2, {"t": SLOPES.half()}),
    "waves": (lambda s, b, h, i, j, d: torch.cos(s).expand(s.shape) + torch.sin(s * (i - j)), {}),
    "table": (lambda s, b, h, i, j, d, t: s * t[h, (i - j).clamp(-3, 3) + 3], {"t": TABLE}),
    "first row": (lambda s, b, h, i, j, d, t: s * t[1][h] + t[-1, 2] + t[:, 3][h], {"t": TABLE}),
    "from the end": (lambda s, b, h, i, j, d, t: s + t[-1 - h, -1 - b], {"t": TABLE}),
    "kinds": (lambda s, b, h, i, j, d, k: torch.where(k[i] == k[j], s, -float("inf")), {"k": KINDS}),
    "flags": (lambda s, b, h, i, j, d, f: torch.where(f[i] & ~f[j] | (f[j] ^ f[i]), s, s / 2), {"f": FLAGS}),
    "one element": (lambda s, b, h, i, j, d, c, e: s * c + e, {"c": torch.tensor(0.5), "e": torch.tensor([2.0])}),
    "doubles": (lambda s, b, h, i, j, d, c: s * c, {"c": torch.tensor(0.3, dtype=torch.float64)}),
    "whole numbers": (lambda s, b, h, i, j, d: s + (i - j) // 3 + (i - j) % 5 + (i - j) % -4 + (j - i) // -7, {}),
    "bits": (lambda s, b, h, i, j, d, k: s + ((i ^ j) & 21).float() + (~(i | 8) ^ k[j] | h) * 0.5, {"k": KINDS}),
    "long": (lambda s, b, h, i, j, d, k: s + (k[i] * 1000 - j) // 7 % 11, {"k": KINDS}),
    "floats": (lambda s, b, h, i, j, d: s % 1.5 + i.float() % -2.5 + i.float() // 4, {}),
    "softcap": (lambda s, b, h, i, j, d: 30 * torch.tanh(s / 30), {}),
    "curves": (lambda s, b, h, i, j, d: torch.exp(-s.abs()) + torch.log(s * s + 1) + torch.sigmoid(s) * 2.0**s, {}),
    "roots": (lambda s, b, h, i, j, d: (s * s + 1).sqrt() + (s.square() + 1).rsqrt() + (s.abs() + 1) ** -0.5, {}),
    "powers": (lambda s, b, h, i, j, d: s**3 - s**2 + (s.abs() + 1) ** -2 + s**0 + s**1, {}),
    "limits": (lambda s, b, h, i, j, d: torch.maximum(s, -s / 2) + torch.minimum(s, s * s) + s.clamp(-1, 1), {}),
    "one limit": (lambda s, b, h, i, j, d: s.clamp(min=-0.5) + s.clamp(max=0.5) + s.relu(), {}),
    "logic": (lambda s, b, h, i, j, d: torch.where(torch.logical_not(i > j) & (h != 1) | (s > 1), s, s * 0.1), {}),
    "masked": (lambda s, b, h, i, j, d: s.masked_fill(i < j, -3.0) * (i >= j) + (i == j).float() * s, {}),
    "in place": (lambda s, b, h, i, j, d: s.mul_(2).add_(i), {}),
    "softplus": (
        lambda s, b, h, i, j, d: torch.nn.functional.softplus(s) + torch.log1p(s.abs()) + torch.expm1(-s * s),
        {},
    ),
    "logarithms": (
        lambda s, b, h, i, j, d: torch.log2(s.abs() + 1) - torch.log10(s.abs() + 2) + torch.exp2(-s.abs()),
        {},
    ),
    "constants": (lambda s, b, h, i, j, d: torch.where(i > j, torch.tensor(2.0), torch.ones_like(s)) * s, {}),
    "constant": (lambda s, b, h, i, j, d: torch.zeros_like(s) + i, {}),
    "alpha": (lambda s, b, h, i, j, d: torch.sub(torch.add(s, i, alpha=2), j, alpha=0.5), {}),
    "sign": (lambda s, b, h, i, j, d: s * torch.sign(s) + torch.sign(i - j), {}),
    "unchanged": (lambda s, b, h, i, j, d: s, {}),
}


def refused() -> dict[str, tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor], str]]:
    """Functions that cannot be compiled, and a word of the error."""
    table: Any = {"t": TABLE}
    return {
        "a sum": (lambda s, b, h, i, j, d: s - s.sum(), {}, "aten.sum"),
        "a matrix product": (lambda s, b, h, i, j, d: s @ s.T @ s, {}, "aten.permute"),
        "erf": (lambda s, b, h, i, j, d: torch.erf(s), {}, "aten.erf"),
        "random": (lambda s, b, h, i, j, d: s + torch.rand_like(s), {}, "aten.rand"),
        "a branch": (lambda s, b, h, i, j, d: s if s.max() > 0 else -s, {}, "without values"),
        "a host read": (lambda s, b, h, i, j, d: s * float(s[0, 0]), {}, "without values"),
        "too few indices": (lambda s, b, h, i, j, d, t: s + t[h][..., 0], table, "fewer indices"),
        "no index": (lambda s, b, h, i, j, d, t: s + t[:2, :3], table, "aten.slice"),
        "a half's arithmetic": (
            lambda s, b, h, i, j, d, t: s + t[h] * 2,
            {"t": SLOPES.bfloat16()},
            "torch.bfloat16",
        ),
        "a double's arithmetic": (lambda s, b, h, i, j, d, t: s + t[h], {"t": SLOPES.double()}, "torch.float64"),
        "a tensor of its own": (lambda s, b, h, i, j, d: s + torch.arange(3.0)[h], {}, "aten"),
        "a large power": (lambda s, b, h, i, j, d: s**9, {}, "the power 9"),
        "a power of tensors": (lambda s, b, h, i, j, d: s.abs() ** s, {}, "power"),
        "moved elements": (lambda s, b, h, i, j, d: s.flip(0), {}, "aten.flip"),
    }


def places(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Random b, h, q_idx, kv_idx, diagonal: int32 [count]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, most, (count,), generator=generator).int() for most in (2, 4, 60, 60, 60)]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.one_in(3)
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
@pytest.mark.one_in(3)
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


DROPOUT = ScoreTensors(dropout_p=0.5, dropout_seed=torch.tensor(3))


def biased(
    score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor, t: torch.Tensor
) -> torch.Tensor:
    return score / 3 + t[h, (q_idx - kv_idx) % 7]


def key(inputs: ScoreTensors, *, by_segment: bool = True, aligned: bool = True, rows: int = 8) -> str:
    """What compiled kernels of a launch are kept by."""
    table = torch.zeros(rows, dtype=torch.int32)
    places = torch.zeros(4, 2, dtype=torch.int32) if by_segment else None
    launch = LaunchScores(LaunchPositions(table, table, table, table, places, aligned), 0, inputs)
    return launch_program(launch, ScoreSpec(0.5)).program.__cute_hash__


def of_score_mod() -> str:
    """The key of a function with a captured tensor."""
    return key(ScoreTensors(score_mod=biased, aux_tensors={"t": TABLE}))


@pytest.mark.thorough
def test_a_kernel_on_disk_has_the_same_key_in_another_process() -> None:
    code = f"from {__name__} import of_score_mod; print(of_score_mod())"
    other = {**os.environ, "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", code], env=other, capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == of_score_mod()


@pytest.mark.parametrize("inputs", [ScoreTensors(alibi_slopes=SLOPES), DROPOUT], ids=["alibi", "dropout"])
def test_what_is_another_kernel(inputs: ScoreTensors) -> None:
    """Lengths are not; places by row are; aligned ones are for dropout alone, whose random words they share."""
    assert key(inputs) == key(inputs, rows=80) != key(inputs, by_segment=False, aligned=False)
    assert (key(inputs) != key(inputs, aligned=False)) == (inputs.dropout_p > 0)
    assert key(inputs) != key(inputs._replace(dropout_p=0.25, dropout_seed=DROPOUT.dropout_seed))


def test_slopes_of_no_document_are_none_to_read() -> None:
    """A call without documents has slopes [0, h], and no launch. A captured tensor must have an element."""
    assert traced_scores(ScoreTensors(alibi_slopes=torch.zeros(0, 4)), 0.0).captured
    nothing = ScoreTensors(score_mod=biased, aux_tensors={"t": torch.zeros(0, 7)})
    with pytest.raises(Unsupported, match=r"aux_tensors\['t'\] has shape \[0, 7\]; it must have from 1"):
        traced_scores(nothing, 0.0)


def release(changes: dict[str, str | None]) -> ModuleType:
    """A module with all methods; changes: other parameters of a method, or None for no method."""
    module = ModuleType("stand-in")
    for name, methods in fa4_backend._HOOKS.items():
        bodies: dict[str, Any] = {}
        for method, wanted in methods.items():
            parameters = changes.get(f"{name}.{method}", ", ".join(("self", *sorted(wanted))))
            if isinstance(wanted, tuple) and f"{name}.{method}" not in changes:
                parameters = ", ".join(("self", *wanted))
            if parameters is not None:
                bodies[method] = eval(f"lambda {parameters}: None")
        vars(module)[name] = type(name, (), bodies)
    return module


def test_all_methods_are_there() -> None:
    assert changed_hook(release({})) is None


@pytest.mark.parametrize("parameters", [None, "self, acc_S"])
@pytest.mark.parametrize(
    "hook", [f"{name}.{method}" for name, methods in fa4_backend._HOOKS.items() for method in methods]
)
def test_another_method_is_named(hook: str, parameters: str | None) -> None:
    assert changed_hook(release({hook: parameters})) == hook


def test_methods_whose_parameters_are_in_another_order_are_other_methods() -> None:
    hook = "FlashAttentionForwardSm90.apply_score_mod"
    wanted = fa4_backend._HOOKS["FlashAttentionForwardSm90"]["apply_score_mod"]
    assert changed_hook(release({hook: ", ".join(("self", *reversed(tuple(wanted))))})) == hook
