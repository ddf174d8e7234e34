"""Gradients that are one launch's own travel as it rounded them: fewer bytes, the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.backends import Backend, BackwardOperands, Gradients
from cp_fast.compile.instruction_passes import low_precision_grads, of_one_launch
from cp_fast.compile.program import Recv, Send
from cp_ref import SimGroup
from cp_ref.contract.declared import replaced
from cp_ref.schedules.words import CPCommType
from cp_ref.simulator import SimMember


class Rounded(Backend):
    """A kernel library that yields gradients in q's dtype, as those for GPUs do."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.name, self.features = backend, backend.name, backend.features

    def why_not(self) -> str | None:
        return self._backend.why_not()

    def forward(self, *args: Any) -> Any:
        return self._backend.forward(*args)

    def backward(self, operands: BackwardOperands, *args: Any) -> Gradients:
        return Gradients(*(x.to(operands.dout.dtype) for x in self._backend.backward(operands, *args)))


def play(member: SimMember, comm: CPCommType, window: int, rounded: tuple[bool, ...]) -> tuple[list[torch.Tensor], int]:
    """Results, and how many messages of gradients are sent as one launch rounded them."""
    cp = cp_fast.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm)
    sizes: dict[str, Any] = {"heads_q": 4, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.bfloat16}
    cu = torch.tensor([0, 16 * cp.size, 24 * cp.size], dtype=torch.int32)
    how: dict[str, Any] = {"qkv_format": "thd", "window_size": (window, 0), "cu_seqlens_q": cu}
    plan = cp_fast.make_plan(cp=cp, device="cpu", **how, **sizes)
    single, wide = of_one_launch(plan.instructions.backward), plan.instructions.backward.buffers
    sent = {send.source.buffer for send in plan.instructions.backward.of(Send)}
    instructions = low_precision_grads(plan.instructions, cp.comm, rounded=rounded[cp.rank])
    made = [one for one in instructions.backward.instructions if one.made_by == "low_precision_grads"]
    assert all(isinstance(one, Send | Recv) for one in made)
    plan = replaced(plan, backend=Rounded(plan.backend), instructions=instructions)
    draw = torch.Generator().manual_seed(cp.rank)
    q, k, v, dout = (torch.randn(24, h, 8, generator=draw).bfloat16() for h in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = cp_fast.attention(*leaves, cp=cp, plan=plan)
    assert {one.source.buffer for one in made if isinstance(one, Send)} == (single if rounded[cp.rank] else set())
    low = sum(wide[number].dtype != instructions.backward.buffers[number].dtype for number in sent)
    assert low == (len(single) if rounded[cp.rank] else 0)
    results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    return results, low


@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize(("comm", "size"), [("p2p", 2), ("p2p", 3), ("all_gather", 3), ("a2a+p2p", 4)])
def test_the_bits_are_the_same(comm: Any, size: int, window: int) -> None:
    wide = SimGroup(size).run(lambda member: play(member, comm, window, (False,) * size))
    for rounded in ((True,) * size, (True, *(False,) * (size - 1))):
        found = SimGroup(size).run(lambda member, rounded=rounded: play(member, comm, window, rounded))
        for (mine, _), (its, _) in zip(found, wide, strict=True):
            assert all(map(torch.equal, mine, its)), (comm, window, rounded)
        if all(rounded) and window < 0:
            assert sum(low for _, low in found) > 0
