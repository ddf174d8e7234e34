"""Training steps that are right are reported right: schedules, layouts, models, frameworks, and the examples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from conformance.step import StepReport, compare_step
from tests.meta.step import step_variations as of
from tests.meta.step.step_mutants import Shape, batch_of, build_of
from tests.meta.step.step_processes import StepProcesses

WIDE = torch.float32
SHAPES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "p2p": (Shape(dtype=WIDE), {"cp_size": 4}),
    "all_gather": (Shape(dtype=WIDE), {"cp_size": 2, "cp_comm_type": "all_gather"}),
    "a2a": (Shape(dtype=WIDE), {"cp_size": 4, "cp_comm_type": "a2a"}),
    "a2a+p2p": (Shape(dtype=WIDE), {"cp_size": 4, "cp_comm_type": "a2a+p2p"}),
    "p2p contiguous": (Shape(dtype=WIDE), {"cp_size": 2, "layout": "contiguous"}),
    "p2p balanced": (Shape(dtype=WIDE), {"cp_size": 2, "layout": "balanced"}),
    "a2a contiguous padded": (Shape(packed=False), {"cp_size": 2, "cp_comm_type": "a2a", "layout": "contiguous"}),
    "all_gather balanced padded": (
        Shape(packed=False),
        {"cp_size": 2, "cp_comm_type": "all_gather", "layout": "balanced"},
    ),
    "padded": (Shape(packed=False, dtype=WIDE), {"cp_size": 2}),
    "three ranks": (Shape(), {"cp_size": 3}),
    "one rank": (Shape(dtype=WIDE), {"cp_size": 1}),
    "data parallel": (Shape(dtype=WIDE), {"cp_size": 2, "dp_size": 2}),
    "data parallel, padded": (Shape(packed=False), {"cp_size": 2, "dp_size": 2}),
    "sinks": (Shape(sinks=True), {"cp_size": 2}),
    "sinks, all_gather": (Shape(sinks=True, dtype=WIDE), {"cp_size": 2, "cp_comm_type": "all_gather"}),
    "tied": (Shape(tied=True), {"cp_size": 2}),
    "learned positions": (Shape(learned=True, dtype=WIDE), {"cp_size": 2}),
    "second head": (Shape(mtp=True, dtype=WIDE), {"cp_size": 2}),
    "convolution": (Shape(conv=True, dtype=WIDE), {"cp_size": 2}),
    "linear layers": (Shape(linear=True, dtype=WIDE), {"cp_size": 4, "layout": "balanced"}),
    "no mask": (Shape(causal=False, packed=False, dtype=WIDE), {"cp_size": 2}),
    "accumulated": (Shape(accumulate=3, dtype=WIDE), {"cp_size": 2}),
    "accumulated and clipped": (Shape(accumulate=2, clip=0.1, dtype=WIDE, learned=True), {"cp_size": 2}),
    "bfloat16": (Shape(dtype=torch.bfloat16), {"cp_size": 2}),
    "shares of the loss": (Shape(dtype=WIDE), {"cp_size": 2, "loss": "sum"}),
    "a buffer of all tokens": (Shape(tracked=True), {"cp_size": 2}),
    "no optimizer": (Shape(optimizer=False), {"cp_size": 2}),
}
QUICK = ("p2p balanced", "accumulated and clipped")  # in the default run
FRAMEWORKS: dict[str, tuple[Callable[..., Any], Callable[[], Any], dict[str, Any]]] = {
    "DDP": (partial(of.wrapped_step, wrapper="ddp"), of.ids_of, {"dp_size": 2}),
    "FSDP2": (partial(of.wrapped_step, wrapper="fsdp"), of.ids_of, {}),
    "FSDP2 over a mesh of two axes": (partial(of.wrapped_step, wrapper="hsdp", clip=0.1), of.ids_of, {"dp_size": 2}),
    "checkpointing": (partial(of.wrapped_step, wrapper="checkpoint"), of.ids_of, {}),
    "torch.compile": (partial(of.wrapped_step, wrapper="compile ddp"), of.ids_of, {}),
    "accumulation under DDP": (partial(of.wrapped_step, wrapper="ddp", accumulate=2), of.ids_of, {}),
    "transformers": (of.transformers_step, of.transformers_batch, {}),
    "transformers, packed": (of.transformers_step, of.packed_batch, {}),
    "transformers, packed, balanced": (of.transformers_step, of.packed_batch, {"layout": "balanced"}),
    "transformers, padded, balanced": (of.transformers_step, of.transformers_batch, {"layout": "balanced"}),
    "accelerate": (partial(of.transformers_step, accelerated=True), of.transformers_batch, {}),
    "Trainer": (of.trainer_step, of.rows_of, {}),
    "Megatron": (of.megatron_step, of.megatron_batch, {"cp_comm_type": "all_gather"}),
}
OF_THEIR_OWN = ("accelerate", "Trainer", "Megatron")  # processes, whose state these frameworks keep
NEEDED = {
    "transformers": "transformers",
    "accelerate": "accelerate",
    "Trainer": "accelerate",
    "Megatron": "megatron.core",
}


def check(report: StepReport) -> None:
    assert report.right, report
    assert not report.findings
    assert not report.first


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in SHAPES]
)
@pytest.mark.one_in(2)
def test_a_right_step_is_called_right(name: str, steps: StepProcesses) -> None:
    shape, how = SHAPES[name]
    bug, batch = "shares" if name == "shares of the loss" else "", partial(batch_of, shape, how.get("dp_size", 1))
    check(steps.compare(partial(build_of, shape=shape, bug=bug), batch, **how))


@pytest.mark.thorough
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_s_step_is_called_right(name: str, steps: StepProcesses) -> None:
    for framework, module in NEEDED.items():
        if name.startswith(framework):
            pytest.importorskip(module, reason=f"needs {module}: pip install '.[test-integrations]'")
    build, batch, how = FRAMEWORKS[name]
    compare = compare_step if name in OF_THEIR_OWN else steps.compare
    check(compare(build, batch, **{"cp_size": 2, **how}))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("example", "module"),
    [("train_gpt", "torch"), ("finetune_transformers", "transformers"), ("megatron_layer", "megatron.core")],
)
def test_the_examples_are_right(example: str, module: str) -> None:
    pytest.importorskip(module, reason=f"needs {module}: pip install '.[test-integrations]'")
    check(compare_step(f"examples.{example}:build", f"examples.{example}:batch", cp_size=2))


def test_there_are_enough() -> None:
    assert len(SHAPES) + len(FRAMEWORKS) + 3 >= 30


@pytest.mark.thorough
def test_a_wrong_step_under_fsdp_is_found() -> None:
    """Where gradients cannot be seen before they are reduced."""

    def build(cp: Any) -> Any:
        model, step, optimizer = of.wrapped_step(cp, "fsdp")
        scale = 1.0 if cp is None else 2.0

        def doubled(ids: Any) -> Any:
            loss = step(ids)
            for weight in model.parameters():
                weight.grad.mul_(scale)
            return loss

        return model, doubled, optimizer

    report = compare_step(build, of.ids_of, cp_size=2)
    assert report.causes == ("factor",), report
