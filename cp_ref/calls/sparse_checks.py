"""Checks of the arguments of sparse layers. Their keys are tokens, or compressed keys (entries) of a rate."""

from __future__ import annotations

from typing import Any

from cp_ref.calls.layer import check_last, check_local, check_rows, check_same_rows
from cp_ref.calls.plan_arguments import Plan, check_sparse
from cp_ref.groups.context import ContextParallel
from cp_ref.problems.call_checks import check_plan_owner
from cp_ref.problems.read_problem import ROW_AXES
from cp_ref.schedules.compressed import entry_problem
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.values import check_dtype, dtype_of, kind_of, read_count, read_number

__all__ = [
    "check_lse",
    "check_queries",
    "check_sparse_plan",
    "check_values",
    "needed_rate",
    "read_indexer",
    "read_indices",
    "read_rate",
    "read_softmax_scale",
]


def check_sparse_plan(cp: ContextParallel, plan: Any, package_plan: type, what: str) -> None:
    """The package's plan, for this context, with messages that a sparse layer has."""
    if not isinstance(plan, package_plan) or not isinstance(plan, Plan):
        package = package_plan.__module__.split(".")[0]
        raise TypeError(f"plan is {kind_of(plan)}; it must be a {package}.Plan, as make_plan gives it")
    check_plan_owner(plan.problem, plan.rank, cp)
    check_sparse(what, plan.problem, plan.custom)


def read_rate(plan: Plan, rate: Any) -> int | None:
    """Read the number of tokens of a window; None for keys that are tokens."""
    return None if rate is None else needed_rate(plan, rate)


def needed_rate(plan: Plan, rate: Any) -> int:
    """Read the number of tokens of a window, for a batch that can be cut into windows."""
    if rate is None:
        raise TypeError("rate is None; it must be the number of tokens of a window")
    rate, problem = read_count("rate", rate, at_least=1), plan.problem
    lengths = problem.lengths
    if problem.areas is not None:
        raise ValueError(f"rate is {rate}, but the plan has areas; windows follow documents, from their first token")
    if not problem.causal:
        raise ValueError(
            f"rate is {rate}, but the plan's attn_mask_type is {problem.attn_mask_type!r}; a window is seen from its "
            "last token on, so the mask must be causal"
        )
    if lengths.len_q != lengths.len_kv or lengths.slots_q != lengths.slots_kv:
        raise ValueError(
            f"rate is {rate}, but the lengths of queries and keys differ; a window is seen from its last token on, so "
            "each token must be a query"
        )
    return rate


def read_indexer(plan: Plan, rate: int | None, q_index: Any, k_index: Any, weights: Any) -> tuple[int, int]:
    """h_i and d_i."""
    check_rows(plan, "q_index", q_index, "h_i, d_i")
    heads, d_index = q_index.shape[-2:]
    for name, size in (("h_i", heads), ("d_i", d_index)):
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    _check_keys(plan, rate, "k_index", k_index, "d_i", (d_index,), q_index)
    check_rows(plan, "weights", weights, "h_i", q_index, wide=True, first_name="q_index")
    check_last("weights", weights, (heads,))
    return heads, d_index


def check_queries(plan: Plan, q: Any) -> None:
    """Q is this rank's slice of the plan's problem."""
    problem = plan.problem
    check_rows(plan, "q", q, "h_q, d_qk")
    if dtype_of(q) != problem.dtype:
        raise TypeError(f"q has dtype {q.dtype}, but the plan was made for {problem.dtype}")
    check_last("q", q, (problem.heads_q, problem.d_qk))


def check_values(plan: Plan, rate: int | None, q: Any, **keys: Any) -> None:
    """Keys, or keys and then values, by name: this rank's slices of tokens, or its entries."""
    problem = plan.problem
    dims = ("d_qk", problem.d_qk), ("d_v", problem.d_v)
    for (name, x), (word, d) in zip(keys.items(), dims, strict=False):
        _check_keys(plan, rate, name, x, f"h_kv, {word}", (problem.heads_kv, d), q)
    if len(keys) == 2 and rate is None:
        (first, k), (name, v) = keys.items()
        check_same_rows(problem, name, v, first, k)


def _check_keys(plan: Plan, rate: int | None, name: str, x: Any, axes: str, last: tuple[int, ...], q: Any) -> None:
    if rate is None:
        check_rows(plan, name, x, axes, q, side="kv")
        check_last(name, x, last)
        return
    check_local(name, x, "q", q)
    check_dtype(name, x, dtype_of(q))
    own = entry_problem(plan.problem, rate).workload.ownership.kv.of(plan.rank).spans
    if tuple(x.shape) != (own.total, *last):
        raise ValueError(
            f"{name} has shape {list(x.shape)}; rank {plan.rank} owns {own.total} windows of {rate} tokens, so it must "
            f"be [n, {axes}] = {[own.total, *last]}, as compress_keys gives it"
        )


def read_indices(plan: Plan, indices: Any, q: Any, *, of_kv_heads: bool) -> tuple[int, int]:
    """top_k, and the number of heads that have their own indices; 0 and 0 for None."""
    if indices is None:
        return 0, 0
    problem = plan.problem
    check_local("indices", indices, "q", q)
    check_dtype("indices", indices, "int32", why=", as select_keys gives it")
    axes = ROW_AXES[problem.qkv_format]
    leading = len(axes.split(", "))
    by_head = len(indices.shape) == leading + 2 and of_kv_heads
    if len(indices.shape) != leading + 1 and not by_head:
        more = f" or [{axes}, h_kv, top_k]" if of_kv_heads else ""
        raise ValueError(
            f"indices has shape {list(indices.shape)}; qkv_format {problem.qkv_format!r} needs [{axes}, top_k]{more}"
        )
    check_same_rows(problem, "indices", indices, "q", q)
    if by_head:
        check_last("indices", indices, (problem.heads_kv, indices.shape[-1]))
    return read_count("top_k of indices", indices.shape[-1], at_least=1), problem.heads_kv if by_head else 1


def check_lse(problem: Problem, lse: Any, q: Any) -> None:
    """The lse of q's rows."""
    check_local("lse", lse, "q", q)
    wide = "float64" if dtype_of(q) == "float64" else "float32"
    check_dtype("lse", lse, wide, why=", as sparse_attention returns it")
    sizes = dict(zip(ROW_AXES[problem.qkv_format].split(", "), q.shape, strict=False))
    batch = [sizes["b"]] if "b" in sizes else []
    wanted = [*batch, problem.heads_q, sizes["s" if batch else "t"]]
    if list(lse.shape) != wanted:
        raise ValueError(f"lse has shape {list(lse.shape)}; it must be [{'b, ' if batch else ''}h_q, s] = {wanted}")


def read_softmax_scale(problem: Problem, softmax_scale: Any) -> float:
    """The factor of q.k, the plan's for None."""
    if softmax_scale is None:
        return problem.scale
    found = read_number("softmax_scale", softmax_scale, positive=True)
    if problem.softmax_scale not in (None, found):
        raise ValueError(
            f"softmax_scale is {softmax_scale!r}, but the plan was made for {problem.softmax_scale!r}; leave it out "
            "beside a plan"
        )
    return found
