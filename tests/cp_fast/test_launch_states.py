"""Opaque states of launches: a backward launch gets the state that its forward launch returned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import cp_fast
from cp_fast.backends import Backend, BackwardOperands, Gradients, Partial, by_name
from cp_ref import SimGroup, Unsupported
from cp_ref.common.declared import replaced
from cp_ref.simulator.sim_group import SimMember

SCHEDULES = ("p2p", "all_gather", "a2a", "a2a+p2p")
SIZES: dict[str, Any] = {"heads_q": 8, "heads_kv": 4, "d_qk": 4, "d_v": 4, "dtype": torch.float64, "device": "cpu"}


class Remembers(Backend):
    """The library "cpu", whose forward launches return a fingerprint of their rows. `launches` has the states that
    backward launches got, and those that they should get.
    """

    keeps_states = True

    def __init__(self) -> None:
        self.library = by_name("cpu")
        self.name, self.features = "remembers", self.library.features
        self.launches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def why_not(self) -> str | None:
        return None

    def forward(self, q: torch.Tensor, k: torch.Tensor, *others: Any) -> Partial:
        return self.library.forward(q, k, *others)._replace(state=fingerprint(q, k))

    def backward(self, operands: BackwardOperands, *others: Any) -> Gradients:
        assert operands.state is not None
        self.launches.append((operands.state, fingerprint(operands.q, operands.k)))
        return self.library.backward(operands._replace(state=None), *others)


def fingerprint(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The rows as bytes."""
    return torch.cat([q.flatten(), k.flatten()]).view(torch.uint8)


def planned(member: SimMember, comm: Any, **more: Any) -> tuple[Any, Any, Remembers]:
    """A context, and a plan with this library."""
    cp = cp_fast.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm)
    library = Remembers()
    plan = cp_fast.make_plan(cp=cp, batch_size=1, seqlen_q=32, **SIZES, **more)
    return cp, replaced(plan, backend=library), library


def leaves(rank: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(1, 8, h, 4, generator=draw, dtype=torch.float64).requires_grad_() for h in (8, 4, 4)]


def recomputes_nothing(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("comm", SCHEDULES)
def test_every_backward_launch_gets_the_state_of_its_forward_launch(comm: str, selective: bool) -> None:
    def one(member: SimMember) -> None:
        cp, plan, library = planned(member, comm)
        q, k, v = leaves(member.rank)
        if selective:
            contexts = lambda: create_selective_checkpoint_contexts(recomputes_nothing)  # noqa: E731
            out = checkpoint(
                lambda *x: cp_fast.attention(*x, cp=cp, plan=plan), q, k, v, use_reentrant=False, context_fn=contexts
            )
        else:
            out = cp_fast.attention(q, k, v, cp=cp, plan=plan)
        out.sum().backward()
        assert len(library.launches) == plan.instructions.states > 0
        for got, wanted in library.launches:
            assert torch.equal(got, wanted)

    SimGroup(4).run(one)


@pytest.mark.parametrize("comm", SCHEDULES)
def test_operators_for_the_compiler_tell_of_states(comm: str) -> None:
    """Their number, dtype and number of axes."""

    def one(member: SimMember) -> None:
        _, plan, library = planned(member, comm)
        assert plan.kept.count("s") == plan.instructions.states
        assert replaced(plan, backend=library.library).kept == plan.kept.replace("s", "")

    SimGroup(4).run(one)


def test_passes_with_different_tiles_are_refused() -> None:
    def one(member: SimMember) -> None:
        cp, plan, library = planned(member, "p2p")
        schedule = plan.schedule
        rank_schedules = [
            tuple(step._replace(tiles=in_two(step.tiles)) if len(step.tiles) else step for step in rank_schedule)
            for rank_schedule in schedule.backward
        ]
        other = cp_fast.make_plan(
            cp=cp, batch_size=1, seqlen_q=32, **SIZES, schedule=replace(schedule, backward=tuple(rank_schedules))
        )
        with pytest.raises(Unsupported, match="other tiles than the forward pass"):
            replaced(other, backend=library)

    SimGroup(2).run(one)


def in_two(tiles: Any) -> Any:
    """The tiles, each for half of the query heads."""
    first, last = (replace(tiles, **{name: tiles.head_start + 4}) for name in ("head_stop", "head_start"))
    return type(tiles).concat([first, last])
