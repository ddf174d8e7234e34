"""A mean over the tokens of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.integrations.loss import count_tokens, token_mean
from cp_ref import SimGroup


def test_the_parts_add_up_to_the_mean() -> None:
    """With NaN where nothing counts, a rank that counts nothing, and gradients."""
    losses = torch.tensor([[1.0, 2.0, float("nan")], [float("nan")] * 3, [3.0, 4.0, 5.0]])
    counted = losses.isfinite()

    def one(member: Any) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        mine, cp = losses[member.rank].clone().requires_grad_(), cp_fast.ContextParallel(member)
        loss = token_mean(mine, counted[member.rank], over=cp, averaged_over=3)
        loss.backward()
        return loss.detach(), mine.grad, int(count_tokens(counted[member.rank], over=cp))

    parts = SimGroup(3).run(one)
    assert sum(float(loss) for loss, _, _ in parts) / 3 == pytest.approx(3.0)
    assert [count for _, _, count in parts] == [5, 5, 5]
    for (_, grad, _), seen in zip(parts, counted, strict=True):
        assert grad is not None
        torch.testing.assert_close(grad, seen.float() * 3 / 5)


def test_no_counted_token_is_no_loss() -> None:
    def one(member: Any) -> float:
        return token_mean(torch.ones(2), torch.zeros(2).bool(), over=cp_fast.ContextParallel(member)).item()

    assert SimGroup(2).run(one) == [0.0, 0.0]


def test_what_is_wrong_is_named() -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        with pytest.raises(ValueError, match=r"counted is torch.int64 \[2\]; it must be bool \[2\]"):
            token_mean(torch.ones(2), torch.ones(2).long(), over=cp)
        with pytest.raises(TypeError, match="over is a SimMember"):
            count_tokens(torch.ones(2).bool(), over=member)

    SimGroup(1).run(one)
