"""Linear layers of cp_fast: strong decays, and padding inside a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cp_fast
from conformance.problems.linear import LinearAttention
from cp_fast.layers.linear_plan import LinearTables
from cp_ref import SimGroup
from cp_ref.calls.linear_calls import LINEAR_KINDS
from cp_ref.reference.linear.recurrence import dense_linear_attention
from cp_ref.reference.simulator import SimMember
from cp_ref.schedules.problem import Problem, Sequence
from tests.layers.layer_table import LAYERS, local, made, whole
from tests.linear.problems import check_layer


@pytest.mark.parametrize("kind", LINEAR_KINDS)
@pytest.mark.parametrize("strongest", [1.0, 90.0])
@pytest.mark.one_in(3)
def test_strong_decays_lose_no_digit(strongest: float, kind: str) -> None:
    """Sums of g inside a chunk reach thousands. What counts are their small differences."""
    rows, draw = 200, torch.Generator().manual_seed(0)
    sizes = {"q": (1, 8), "k": (1, 8), "v": (2, 8), "dout": (2, 8)}
    given = {name: torch.randn(rows, *size, generator=draw) for name, size in sizes.items()}
    given["k"] = torch.nn.functional.normalize(given["k"], dim=-1)
    given["g"] = -strongest * torch.rand(rows, *((2, 8) if kind in ("kda", "mamba") else (2,)), generator=draw)
    if kind == "mamba":
        given["A"] = torch.rand(2, 8, 8, generator=draw)
    elif kind != "mamba2":
        given["beta"] = torch.rand(rows, 2, generator=draw)
    dout, cu = given.pop("dout"), torch.tensor([0, rows])
    wide: dict[str, Any] = {name: x.double().requires_grad_() for name, x in given.items()}
    out, _ = dense_linear_attention(**wide, kind=kind, qkv_format="thd", cu_seqlens=cu)
    wanted = [out.detach(), *torch.autograd.grad(out, list(wide.values()), dout.double())]

    def one(member: SimMember) -> list[torch.Tensor]:
        sequence: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_q_padded": None}
        module, cp, plan = made("cp_fast", member, **sequence)
        mine = local(module, LAYERS[kind], given, cp, plan)
        out = module.linear_attention(**mine, cp=cp, plan=plan, kind=kind)
        grads = torch.autograd.grad(out, list(mine.values()), module.shard(dout, cp=cp, plan=plan))
        found = dict(zip(("out", *mine), (out.detach(), *grads), strict=True))
        return list(whole(module, LAYERS[kind], found, cp, plan).values())

    for name, got, want in zip(("out", *given), SimGroup(2).run(one)[0], wanted, strict=True):
        assert (got - want).norm() <= 1e-6 * want.norm(), name


@pytest.mark.parametrize("kind", LINEAR_KINDS)
def test_little_padding_is_not_cut_out(kind: str) -> None:
    problem = Problem(2, tuple(Sequence(n, n, size, size) for n, size in ((41, 44), (30, 32))), qkv_format="thd")
    plan = LinearTables(problem, 0, torch.device("cpu"))
    assert [int(x) for x in plan.sequences.fragments.document] == [0, 0, -1, 1, 1]
    assert len(plan.rows.fragments.document) == 4
    check_layer(cp_fast, problem, LinearAttention(kind=kind, initial_state=True, output_final_state=True))
