"""Steps whose verdict is easily got wrong: values that are not finite, names, casts, what a step does to its batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import cp_fast
from conformance.step import StepError, StepReport, compare_step
from tests.meta.step.step_habits import HABITS, batch_of, build_of
from tests.meta.step.step_processes import StepProcesses

QUICK = ("GradScaler that skips", "autocast")  # in the default run


Judge = Callable[..., StepReport]


@pytest.fixture
def judged(steps: StepProcesses) -> Judge:
    """`judged(habit, change)`: the report of a habit's step, whose model `change(cp, model)` has changed."""
    return lambda habit, change=None, **how: steps.compare(
        partial(changed, habit=habit, change=change), batch_of, **how
    )


def changed(cp: Any, habit: str, change: Any) -> Any:
    built = build_of(cp, habit)
    if change is not None:
        change(cp, built[0])
    return built


@pytest.mark.parametrize(
    "habit", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in HABITS]
)
@pytest.mark.one_in(2)
def test_no_false_alarm(habit: str, judged: Judge) -> None:
    report = judged(habit, dp_size=2 if habit == "HSDP" else 1)
    assert report.right, report
    assert not report.findings
    assert bool(report.notes) == ("skips" in habit), report


def nan_in_a_block(cp: Any, model: Any) -> None:
    if cp is not None and cp.rank == 1:
        model.blocks[1].register_forward_hook(lambda *given: given[-1] * float("nan"))


def nan_everywhere(cp: Any, model: Any) -> None:
    model.blocks[1].register_forward_hook(lambda *given: given[-1] * float("nan"))


def infinite_gradient(cp: Any, model: Any) -> None:
    if cp is not None and cp.rank == 1:
        model.head.weight.register_hook(lambda grad: grad * float("inf"))


def infinite_gradients(cp: Any, model: Any) -> None:
    model.head.weight.register_hook(lambda grad: grad.abs() * float("inf"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (nan_in_a_block, "the loss is NaN or infinite on rank 1, first after blocks.1 (Block)"),
        pytest.param(
            *(nan_everywhere, "the loss is NaN or infinite on ranks 0, 1 and in one process, first after blocks.1"),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            *(infinite_gradient, "gradients are NaN or infinite on rank 1, first that of head.weight; the loss is"),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            *(infinite_gradients, "gradients are NaN or infinite on ranks 0, 1 and in one process, first that of"),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_what_is_not_finite_is_never_agreement(change: Any, said: str, judged: Judge) -> None:
    report = judged("plain", change)
    assert not report.right
    assert report.causes == ("not-finite",), report
    assert report.findings[0].text.startswith(said), report


def wrong_child(cp: Any, model: Any) -> None:
    model.head.module.weight.register_hook(lambda grad: grad * (1.0 if cp is None else 2.0))


@pytest.mark.thorough
def test_a_weight_beside_a_module_called_module_is_compared(judged: Judge) -> None:
    report = judged("a child called module", wrong_child)
    assert not report.right
    assert [row.name for row in report.rows if not row.ok and row.name.startswith("gradient of")] == [
        "gradient of head.module.weight"
    ]


class OneName(torch.nn.Module):
    """Two parameters of one name: as a wrapper that shortens names may give them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter([("weight", self.a), ("weight", self.b)])


def of_one_name(cp: Any) -> Any:
    model = OneName()
    return model, lambda _: (model.a + model.b).sum()


@pytest.mark.thorough
def test_two_parameters_of_one_name_are_refused() -> None:
    with pytest.raises(StepError, match="two parameters have the name 'weight'"):
        compare_step(of_one_name, None, 1)


def scaled(cp: Any, model: Any) -> None:
    if cp is not None and cp.rank == 1:
        model.blocks[1].register_forward_hook(lambda *given: given[-1] * 1.5)


@pytest.mark.thorough
def test_a_wrong_step_under_autocast_is_found(judged: Judge) -> None:
    report = judged("autocast", scaled)
    assert not report.right
    assert "bfloat16" in report.title
    assert "blocks.1 (Block)" in report.first, report


def never_backward(cp: Any) -> Any:
    model, _, optimizer = build_of(cp, "plain")
    return model, lambda _: torch.zeros(()), optimizer


class Uncopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies")


@pytest.mark.thorough
def test_the_true_reason_is_given() -> None:
    with pytest.raises(StepError, match="no parameter has a gradient after step"):
        compare_step(never_backward, batch_of, 2)
    with pytest.raises(StepError, match="batch, a Uncopied, cannot be copied for each step \\(no copies\\)"):
        compare_step(partial(build_of, habit="plain"), Uncopied(), 2)


class Average(torch.nn.Module):
    """A running mean of what a module gives, of this rank's tokens alone."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        mean = torch.zeros(width)
        if kind == "buffer":
            self.register_buffer("mean", mean)
        else:
            self.mean = torch.nn.Parameter(mean, requires_grad=False)

    def forward(self, module: Any, args: Any, out: torch.Tensor) -> None:
        self.mean.data.lerp_(out.detach().mean((0, 1)), 0.1)


def averaged(cp: Any, kind: str) -> Any:
    model, step, optimizer = build_of(cp, "plain")
    average = Average(model.embed.embedding_dim, kind)
    model.embed.register_forward_hook(average)
    if kind == "outside":
        return model, step, optimizer
    return torch.nn.ModuleDict({"model": model, "average": average}), step, optimizer


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("outside", ""),  # docs/conformance/detection.md says so
        ("buffer", "the buffer average.mean is not that of one process, and not the same on all ranks"),
        ("weight", "without a gradient, the weight average.mean is not that of one process, and not the same on all"),
    ],
)
def test_an_average_is_compared_where_build_returns_it(kind: str, said: str, steps: StepProcesses) -> None:
    report = steps.compare(partial(averaged, kind=kind), batch_of)
    assert report.right == (kind == "outside"), report
    assert report.causes == (() if report.right else ("buffers",)), report
    assert all(finding.text.startswith(said) for finding in report.findings), report


def of_a_linear_loss(cp: Any, factor: float = 1.0, precision: str = "bfloat16") -> Any:
    """A layer whose gradients do not depend on its weights: the last bias's is the sum of the batch's rows."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64)
    layer = layer.bfloat16() if precision == "bfloat16" else layer
    context = cp or cp_fast.ContextParallel(torch.distributed.group.WORLD)

    def step(batch: Any) -> Any:
        x, dy = (cp_fast.shard(z.to(layer.weight.dtype), cp=context) for z in batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            loss = (layer(x) * dy).sum(dtype=torch.float32)
        loss.backward()
        for weight in layer.parameters():
            assert weight.grad is not None
            weight.grad.mul_(1.0 if cp is None else factor)
            torch.distributed.all_reduce(weight.grad)
        torch.distributed.all_reduce(loss := loss.detach())
        return loss

    return layer, step, torch.optim.SGD(layer.parameters(), lr=0.1)


def of_rows() -> Any:
    chance = torch.Generator().manual_seed(1)
    return torch.randn(1, 96, 64, generator=chance), torch.randn(1, 96, 64, generator=chance)


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_a_gradient_that_no_weight_moves_has_the_roundings_of_its_dtype(precision: str, steps: StepProcesses) -> None:
    report = steps.compare(partial(of_a_linear_loss, precision=precision), of_rows)
    assert report.right, report
    assert "bfloat16" in report.title
    assert not steps.compare(partial(of_a_linear_loss, precision=precision, factor=1.03), of_rows).right
