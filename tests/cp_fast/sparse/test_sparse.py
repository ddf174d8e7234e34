"""Sparse attention of cp_fast on a CPU: random problems against the oracle."""

from __future__ import annotations

import pytest
import torch

import cp_fast
from cp_ref import SimGroup
from cp_ref.batches.tensors import lse_from_packed, lse_to_packed, to_format, to_packed
from cp_ref.reference.simulator import SimMember
from cp_ref.reference.sparse_oracle import dense_index_loss, dense_select_keys, dense_sparse_attention
from cp_ref.schedules.problem import Problem
from tests.cp_fast.sparse.dense import (
    Drawn,
    Tensors,
    drawn,
    lse_slice,
    slices,
    whole,
)
from tests.marks import seeds

SCALE, TOLERANCE = 0.5, 1e-10


def inputs(problem: Problem, seed: int) -> Tensors:
    """Global tensors; of indices some are out of order, repeated, hidden, or beyond."""
    draw = torch.Generator().manual_seed(seed)
    rows = {"q": problem.starts("q")[-1], "kv": problem.starts("kv")[-1]}

    def some(side: str, *size: int) -> torch.Tensor:
        return torch.randn(rows[side], *size, generator=draw, dtype=torch.float64)

    def ints(side: str, *size: int) -> torch.Tensor:  # small, so that scores are often equal
        return torch.randint(-2, 3, (rows[side], *size), generator=draw).double()

    top_k, index_heads = 1 + seed % 5, problem.heads_kv if seed % 3 == 0 else 1
    shape = rows["q"], index_heads, top_k
    return {
        "q": some("q", problem.heads_q, problem.d_qk),
        "k": some("kv", problem.heads_kv, problem.d_qk),
        "v": some("kv", problem.heads_kv, problem.d_v),
        "indices": torch.randint(-2, 15, shape, generator=draw, dtype=torch.int32),
        "q_index": ints("q", 3, 5),
        "k_index": ints("kv", 5),
        "weights": ints("q", 3),
        "dout": some("q", problem.heads_q, problem.d_v),
        "dlse": some("q", problem.heads_q),
        "dloss": some("q"),
        "lse": some("q", problem.heads_q),
        "offset": torch.randn(problem.heads_q, generator=draw, dtype=torch.float64),
    }


def expected(problem: Problem, given: Tensors) -> Tensors:
    """All results and gradients by the oracle."""
    real = torch.zeros(problem.starts("q")[-1], dtype=torch.bool)
    for _, start, stop, _ in problem.workload.ownership.q.rows():
        real[start:stop] = True
    learnable = problem.softmax_type == "learnable"
    fmt, batch = problem.qkv_format, len(problem.sequences)

    def leaves(*names: str) -> Tensors:
        return {name: given[name].clone().requires_grad_() for name in names}

    def theirs(x: torch.Tensor) -> torch.Tensor:
        """Global rows in the user's format."""
        return to_format(x, fmt, batch)

    def gradients(loss: torch.Tensor, of: Tensors) -> Tensors:
        """Zeros where no row sees a key."""
        sums = loss + sum(0 * x.sum() for x in of.values())
        return {f"d{name}": x for name, x in zip(of, torch.autograd.grad(sums, tuple(of.values())), strict=True)}

    of_attention = leaves("q", "k", "v", *(["offset"] if learnable else []))
    q, k, v, indices = (theirs(x) for x in (*(of_attention[name] for name in "qkv"), given["indices"]))
    results = dense_sparse_attention(problem, q, k, v, indices, softmax_offset=of_attention.get("offset"))
    out, lse = to_packed(results[0], fmt), lse_to_packed(results[1], fmt)
    finite = lse.masked_fill((lse == float("-inf")) | ~real[:, None], 0)
    found = {"out": out, "lse": lse}
    found |= gradients((out * given["dout"]).sum() + (finite * given["dlse"]).sum(), of_attention)
    of_indexer = leaves("q_index", "k_index", "weights")
    q_index, k_index, weights = (theirs(x) for x in of_indexer.values())
    indexer = q_index.detach(), k_index.detach(), weights.detach()
    found["chosen"] = to_packed(dense_select_keys(problem, *indexer, top_k=4, scale=SCALE), fmt)
    lse_given, one_set = lse_from_packed(given["lse"], fmt, batch), theirs(given["indices"][:, 0])
    constants = lse_given, q.detach(), k.detach(), one_set
    loss = to_packed(dense_index_loss(problem, q_index, k_index, weights, *constants, scale=SCALE), fmt)
    found |= {"loss": loss} | gradients((loss * given["dloss"]).sum(), of_indexer)
    found["lse"] = lse.masked_fill(~real[:, None], float("-inf"))
    return {name: x.detach() for name, x in found.items()}


def played(task: Drawn, given: Tensors, tail: int) -> Tensors:
    """The same by the ranks of a group."""

    def one(member: SimMember) -> tuple[Problem, Tensors]:
        cp, plan = task.made(member)
        problem, rank = plan.problem, member.rank
        learnable = problem.softmax_type == "learnable"

        def mine(name: str) -> torch.Tensor:
            return slices(problem, "kv" if name in ("k", "v", "k_index") else "q", rank, given[name], tail)

        leaves = {name: mine(name).requires_grad_() for name in ("q", "k", "v", "q_index", "k_index", "weights")}
        offset = given["offset"].clone().requires_grad_()
        indices = mine("indices")
        if indices.shape[-2] == 1:
            indices = indices.squeeze(-2)
        out, lse = cp_fast.sparse_attention(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            indices,
            cp=cp,
            plan=plan,
            softmax_offset=offset if learnable else None,
            return_lse=True,
        )
        dlse = lse_slice(problem, rank, given["dlse"], tail)
        torch.autograd.backward([out, lse], [mine("dout"), dlse])
        best = cp_fast.select_keys(
            leaves["q_index"], leaves["k_index"], leaves["weights"], cp=cp, plan=plan, top_k=4, scale=SCALE
        )
        of_loss = mine("indices")[..., 0, :]
        loss = cp_fast.index_loss(
            leaves["q_index"],
            leaves["k_index"],
            leaves["weights"],
            lse_slice(problem, rank, given["lse"], tail),
            leaves["q"],
            leaves["k"],
            of_loss,
            cp=cp,
            plan=plan,
            scale=SCALE,
        )
        loss.backward(mine("dloss"))
        found = {"out": out, "lse": lse, "chosen": best, "loss": loss}
        found |= {f"d{name}": x.grad for name, x in leaves.items() if x.grad is not None}
        if offset.grad is not None:
            found["doffset"] = offset.grad
        return problem, {name: x.detach() for name, x in found.items()}

    ranks = SimGroup(task.size).run(one)
    problem = ranks[0][0]
    found: Tensors = {}
    for name in ranks[0][1]:
        parts = [tensors[name] for _, tensors in ranks]
        if name == "doffset":
            found[name] = torch.stack(parts).sum(0)
            continue
        empty = {"lse": float("-inf"), "chosen": -1}.get(name, 0)
        side = "kv" if name in ("dk", "dv", "dk_index") else "q"
        found[name] = whole(problem, side, parts, empty, lse=name == "lse")
    return found


@pytest.mark.parametrize("seed", seeds(80))
def test_equals_the_definition(seed: int) -> None:
    task = drawn(seed)
    (_, plan), *_ = SimGroup(task.size).run(task.made)
    given = inputs(plan.problem, seed)
    tail = seed % 2 * (sum(plan.problem.starts_q[-1:] + plan.problem.starts_kv[-1:]) + 1)  # more than all ranks have
    wanted, got = expected(plan.problem, given), played(task, given, tail)
    assert wanted.keys() == got.keys()
    assert torch.equal(got.pop("chosen"), wanted["chosen"])
    for name, x in got.items():
        torch.testing.assert_close(
            x, wanted[name], atol=TOLERANCE, rtol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )
