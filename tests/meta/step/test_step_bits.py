"""`conformance step --bits`: what has the bits of one process, and where others begin."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cp_fast
from conformance.step.report import Bits, StepRecord, StepReport
from cp_fast.integrations.loss import token_mean
from tests.meta.step.step_processes import StepProcesses

WIDTH = 32


class Model(torch.nn.Module):
    """Two modules around attention, in one around them."""

    def __init__(self, context: Any, odd: str) -> None:
        super().__init__()
        self.context, self.odd = context, odd
        self.embed, self.qkv, self.head = (
            torch.nn.Embedding(50, WIDTH),
            torch.nn.Linear(WIDTH, 3 * WIDTH),
            torch.nn.Linear(WIDTH, 64),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.embed(ids)).unflatten(-1, (3, 4, WIDTH // 4)).unbind(-3)
        out = cp_fast.attention(*qkv, cp=self.context).flatten(-2)
        return self.head(out * (1 + 2.0**-23) if self.odd == "between" and self.context.size > 1 else out)


def moved(module: Any, given: Any, out: Any) -> Any:
    return out * (1 + 2.0**-23)


def built(cp: Any, odd: str = "") -> Any:
    context = cp or cp_fast.ContextParallel(dist.group.WORLD)
    torch.manual_seed(0)
    model = Model(context, odd)
    if odd == "in a module" and cp is not None:
        model.qkv.register_forward_hook(moved)

    def step(ids: torch.Tensor) -> Any:
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        mine, labels = cp_fast.shard(ids, cp=context), cp_fast.shard(labels, cp=context)
        losses = torch.nn.functional.cross_entropy(model(mine).transpose(1, 2), labels, reduction="none")
        loss = token_mean(losses, labels != -100, over=context)
        loss.backward()
        for weight in model.parameters():
            assert weight.grad is not None
            dist.all_reduce(weight.grad)
        dist.all_reduce(loss := loss.detach())
        return loss, losses.detach()

    return model, step


def batch() -> torch.Tensor:
    return torch.randint(0, 50, (2, 64), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("odd", "comm", "first"),
    [
        ("", "a2a", ""),
        ("in a module", "a2a", "qkv (Linear), first at document 0, position 0, on rank 0: "),
        ("between", "a2a", "what comes before head (Linear) in the model, first at document 0, position 0, on rank 0"),
        pytest.param("", "p2p", "what comes before head (Linear) in the model", marks=pytest.mark.thorough),
    ],
)
def test_where_other_bits_begin(odd: str, comm: str, first: str, steps: StepProcesses) -> None:
    report = steps.compare(partial(built, odd=odd), batch, cp_comm_type=comm, bits=True)
    assert report.right, report
    bits = report.bits
    assert bits is not None
    assert bits.modules == 4
    assert bits.forward == (not first)
    assert bits.same == (4 if not first else 1 if odd == "in a module" else 2)
    assert bits.losses.startswith("the same bits" if not first else "other bits, first at document 0")
    assert len(bits.left) == bool(first)
    assert all(each.startswith(first) for each in bits.left)
    assert str(report).endswith(str(bits))
    record = StepRecord({}, (report,))
    assert StepRecord.from_json(record.to_json()) == record


def test_a_report_without_bits_says_nothing_of_them() -> None:
    assert "bits" not in str(StepReport("2 ranks", ()))
    assert not Bits(3, 2, ("head (Linear)",), "", 1, 1).forward
    assert not Bits(0, 0, (), "", 1, 1).forward
