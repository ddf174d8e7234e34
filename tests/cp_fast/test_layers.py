"""A new layer, as an engineer would add one: the mean of the keys that each row sees, in a causal batch the mean of the
document so far.

It takes five things, a file each: a declaration with its stub, two passes in each package, and the name in each
`__init__`. All else is there: the public functions, casts, checks that all ranks know of, known calls, the exchanges of
rows, autograd, `checked`, updated plans, torch.compile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from cp_fast.layers import layer_operators, layers
from cp_fast.layers.sparse_tables import KEYS, sparse_tables
from cp_ref import SimGroup
from cp_ref.batches.tensors import autocast, needs_grad, to_format, to_packed
from cp_ref.calls.layer import Layer, LayerCall, Operand, check_rows, public_function
from cp_ref.problems.call_checks import check_plan_owner
from cp_ref.reference import layer_calls
from cp_ref.reference.executor.play_schedule import run_rank_schedule
from cp_ref.reference.executor.rank_tensors import RankTensors
from cp_ref.reference.reference_attention import real_rows
from cp_ref.reference.simulator import RankScheduler, SimMember
from cp_ref.schedules.table import ranges

# ---- declared


@dataclass(frozen=True)
class MeanCall(LayerCall):
    """A checked call of `visible_mean`."""

    channels: int
    factor: float
    requires_grad: bool


def _read(cp: Any, plan: Any, package_plan: type, /, *, x: Any, factor: float) -> MeanCall:
    check_plan_owner(plan.problem, plan.rank, cp)
    check_rows(plan, "x", x, "channels")
    return MeanCall("visible_mean", x.shape[-1], factor, needs_grad(x))


MEAN = Layer("visible_mean", (Operand("x", autocast),), {"factor": "float"}, _read)


def visible_mean(x: torch.Tensor, *, cp: Any, plan: Any, factor: float = 1.0) -> torch.Tensor:  # pyright: ignore[reportReturnType]
    """`factor` times the mean of the rows that each row sees."""


# ---- cp_fast


class MeanLayer(layers.Layer):
    declared = MEAN
    tables = staticmethod(sparse_tables)

    def shapes(self, tensors: Any, qkv_format: str, options: Any) -> list[torch.Tensor]:
        return [tensors[0].new_empty(tensors[0].shape)]

    def weights(self, run: layers.Run, x: torch.Tensor) -> torch.Tensor:
        """What each own row takes of each gathered one."""
        tables = run.tables
        visible, keys = tables.by_rows.visible, tables.messages(KEYS).rows["kv"].gathered
        seen = x.new_zeros(len(tables.q.rows), keys.total)
        for row, (start, stop) in enumerate(zip(visible.starts.tolist(), visible.stops.tolist(), strict=True)):
            for first, last in zip(start, stop, strict=True):
                seen[row, first:last] = 1
        return run.call.factor * seen / seen.sum(1, keepdim=True).clamp(min=1)

    def forward(self, run: layers.Run, *tensors: Any) -> layers.Outputs:
        (x,), tables = tensors, run.tables
        (keys,) = run.gather(KEYS, tables.kv.take(x))
        return (tables.q.put(self.weights(run, x) @ keys, x),), ()

    def backward(self, run: layers.Run, tensors: Any, results: Any, hidden: Any, grads: Any) -> Any:
        (x,), tables = tensors, run.tables
        (dx,) = run.give_back(KEYS, self.weights(run, x).T @ tables.q.take(grads[0]))
        return [tables.kv.put(dx, x)]


FAST = layer_operators.registered(MeanLayer())

# ---- cp_ref


def _held(run: layer_calls.Run, x: torch.Tensor) -> tuple[RankTensors, torch.Tensor, torch.Tensor]:
    """The rows that this rank has met, what each row takes of them, and its own rows in the global buffer."""
    plan, cp, call = run
    held = RankTensors(plan.problem.workload, cp.rank, x.device)
    held.put_own("kv", to_packed(x, plan.problem.qkv_format)[:, None])
    seen = x.new_zeros(held.rows["q"], held.rows["kv"])

    def compute(tile: Any) -> None:
        _, q_start, q_stop, k_start, k_stop, *_ = tile
        seen[q_start:q_stop, k_start:k_stop] += held.visible(tile)

    run_rank_schedule("forward", plan.schedule.forward[cp.rank], held, cp.comm, compute)
    own = plan.problem.workload.ownership.q.of(cp.rank)
    there = torch.from_numpy(ranges(own.start, own.stop - own.start))
    return held, call.factor * seen / seen.sum(1, keepdim=True).clamp(min=1), there


def _forward(run: layer_calls.Run, x: torch.Tensor) -> layer_calls.Done:
    held, weights, there = _held(run, x)
    out = torch.zeros_like(to_packed(x, run.plan.problem.qkv_format))
    out[real_rows(run.plan, x.device)] = (weights @ held.tensors["kv"][0][:, 0].nan_to_num())[there]
    return layer_calls.Done((to_format(out, run.plan.problem.qkv_format, len(run.plan.problem.sequences)),))


def _backward(run: layer_calls.Run, tensors: Any, _: Any, __: Any, dout: torch.Tensor) -> list[torch.Tensor]:
    held, weights, there = _held(run, tensors[0])
    grads = to_packed(dout, run.plan.problem.qkv_format)[real_rows(run.plan, dout.device)]
    held.tensors["dkv"] = ((weights[there].T @ grads)[:, None],)
    run_rank_schedule("backward", run.plan.schedule.backward[run.cp.rank], held, run.cp.comm, lambda tile: None)
    dx = torch.zeros_like(to_packed(dout, run.plan.problem.qkv_format))[:, None]
    held.copy_out("dkv", dx)
    return [to_format(dx[:, 0], run.plan.problem.qkv_format, len(run.plan.problem.sequences))]


REFERENCE = layer_calls.Passes(MEAN, _forward, _backward)

# ---- tests

CALLED = {
    cp_fast: public_function(visible_mean, layer_operators.called, FAST, __name__),
    cp_ref: public_function(visible_mean, layer_calls.called, REFERENCE, __name__),
}
CU, TOTAL = torch.tensor([0, 7, 20]), 20


def planned(package: Any, member: Any, **more: Any) -> tuple[Any, Any]:
    cp = package.ContextParallel(member, "all_gather")
    sizes: dict[str, Any] = {"heads_q": 1, "heads_kv": 1, "d_qk": 4, "d_v": 4, "dtype": torch.float64, "device": "cpu"}
    return cp, package.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=CU, **sizes, **more)


def rows() -> torch.Tensor:
    return torch.randn(TOTAL, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def dense(x: torch.Tensor) -> torch.Tensor:
    parts = x.split([7, 13])
    return torch.cat([p.cumsum(0) / torch.arange(1, len(p) + 1)[:, None] for p in parts])


def test_a_new_layer_in_a_graph_under_checked_and_with_an_updated_plan() -> None:
    torch._dynamo.reset()
    cp, plan = planned(cp_fast, SimMember(0, 1, RankScheduler(1)), max_sequences=3, max_tokens_q=TOTAL)
    x, weight = rows().requires_grad_(), torch.ones((), dtype=torch.float64, requires_grad=True)

    def model(x: torch.Tensor) -> torch.Tensor:
        return CALLED[cp_fast](weight * x, cp=cp, plan=plan, factor=0.5) + 1

    wanted = 0.5 * dense(rows()) + 1
    for call in (torch.compile(model, fullgraph=True, backend="aot_eager"), model):  # the first call is compiled
        for checked in (False, True):
            with cp_fast.checked() if checked else torch.enable_grad():
                out = call(x)
                torch.testing.assert_close(out.detach(), wanted)
                (grad,) = torch.autograd.grad(out.sum(), weight)
                torch.testing.assert_close(grad, (wanted - 1).sum())
        out = call(x)
        plan.update(cp=cp, cu_seqlens_q=CU)
        with pytest.raises(RuntimeError, match=r"plan.* was updated"):
            out.sum().backward()


@pytest.mark.parametrize("package", CALLED)
def test_a_new_layer(package: Any) -> None:
    def one(member: SimMember) -> None:
        cp, plan = planned(package, member)
        whole = rows().requires_grad_()
        wanted = 2 * dense(whole)
        wanted.square().sum().backward()
        x = package.shard(rows(), cp=cp, plan=plan).requires_grad_()
        asked, gather = [], cp.comm.all_gather_object
        cp.comm.all_gather_object = lambda value: (asked.append(value), gather(value))[1]
        out, _ = (CALLED[package](x, cp=cp, plan=plan, factor=2.0) for _ in range(2))
        assert len(asked) == 1  # the ranks agree once about a kind of call
        torch.testing.assert_close(package.unshard(out.detach(), cp=cp, plan=plan), wanted.detach())
        out.square().sum().backward()
        torch.testing.assert_close(package.unshard(x.grad, cp=cp, plan=plan), whole.grad)
        with pytest.raises(ValueError, match="x has shape"):
            CALLED[package](x[:, 0], cp=cp, plan=plan, factor=2.0)
        if package is cp_fast:
            gather, give_back = plan.exchanges[KEYS].forward, plan.exchanges[KEYS].backward
            assert "-> rank 1" in str(gather) if member.rank == 0 else "<- rank 0" in str(gather)  # causal
            assert "accumulate" in str(give_back)

    SimGroup(2).run(one)
