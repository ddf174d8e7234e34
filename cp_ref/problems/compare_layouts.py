"""The costs of a batch under each layout and schedule, before anything is cut: on integers, with no group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cp_ref.problems.read_problem import DTYPES, Sizes, check_heads, check_layout, counted
from cp_ref.schedules.planners.make_schedule import SCHEDULES, make_schedule
from cp_ref.schedules.problem import Problem, Sequence, slice_rows
from cp_ref.schedules.schedule import RankSchedule
from cp_ref.schedules.values import check_choice, read_count, read_several, read_window
from cp_ref.schedules.verify.costs import report
from cp_ref.schedules.words import LAYOUTS, MASKS, AttnMaskType, Layout, ScheduleName, canonical_layout

__all__ = [
    "BatchCost",
    "compare_layouts",
]


@dataclass(frozen=True)
class BatchCost:
    """The costs of one layout and schedule; each is the highest of any rank.

    Attributes:
        work: the largest rank's visible pairs, times query heads, over the mean; 1 is perfect balance.
        kv_rows: the K/V rows that the rank receives that receives most, forward; a row of some heads counts in part.
        sent_bytes: the bytes of the rank that sends the most, both passes.
        tail: rows of all slices together that hold no token.
        refused: why not, where the schedule cannot have this problem; the numbers are then 0.
    """

    layout: str
    cp_comm_type: str
    work: float = 0.0
    kv_rows: float = 0.0
    sent_bytes: int = 0
    tail: int = 0
    refused: str = ""


def compare_layouts(
    lengths: Iterable[int],
    *,
    cp_size: int,
    attn_mask_type: AttnMaskType = "causal",
    window_size: tuple[int, int] = (-1, -1),
    heads_q: int = 32,
    heads_kv: int = 8,
    d_qk: int = 128,
    d_v: int = 128,
    dtype: str = "bfloat16",
    layouts: Iterable[Layout] = LAYOUTS,
    cp_comm_types: Iterable[ScheduleName] = ("p2p", "all_gather", "a2a"),
) -> tuple[BatchCost, ...]:
    """Compute the costs of a packed batch for each way to share it out. Sends nothing, and needs no group.

    Args:
        lengths: tokens of each document, [b]; any numbers from 0.
        cp_size: number of ranks.
        attn_mask_type, window_size, heads_q, heads_kv, d_qk, d_v: as in `make_plan`.
        dtype: by name, such as "bfloat16".
        layouts, cp_comm_types: which to compare ("zigzag" is "dual_chunk"); "a2a+p2p" has no a2a size here, and is
            refused.

    Returns:
        One cost for every layout and schedule, layouts first.

    Raises:
        ValueError, TypeError: naming the argument.

    >>> for cost in compare_layouts([48, 16, 16, 16], cp_size=2, heads_q=2, heads_kv=2, cp_comm_types=["p2p"]):
    ...     print(f"{cost.layout:<11} work {cost.work:.2f}, receives {cost.kv_rows:.0f} rows")
    dual_chunk  work 1.00, receives 48 rows
    contiguous  work 1.48, receives 0 rows
    balanced    work 1.00, receives 36 rows
    """
    sizes = [read_count("lengths", n, at_least=0) for n in read_several("lengths", lengths)]
    check_choice("attn_mask_type", attn_mask_type, MASKS)
    check_choice("dtype", dtype, DTYPES)
    each = counted(Sizes(heads_q, heads_kv, d_qk, d_v, dtype))
    check_heads(each, "p2p", 1)
    plain = Problem(
        read_count("cp_size", cp_size, at_least=1),
        tuple(Sequence(n, n, n, n) for n in sizes),
        qkv_format="thd",
        attn_mask_type=attn_mask_type,
        window_size=read_window(window_size),
        heads_q=heads_q,
        heads_kv=heads_kv,
        d_qk=d_qk,
        d_v=d_v,
        dtype=dtype,
    )
    found: list[BatchCost] = []
    comm_types = read_several("cp_comm_types", cp_comm_types)
    for layout in map(canonical_layout, read_several("layouts", layouts)):
        check_choice("layouts", layout, LAYOUTS)
        for comm in comm_types:
            check_choice("cp_comm_types", comm, tuple(SCHEDULES))
            found.append(_cost(replace(plain, layout=layout), comm, each))
    return tuple(found)


def _cost(problem: Problem, comm: str, sizes: Sizes) -> BatchCost:
    if SCHEDULES[comm].exchanging == "inner":
        why = f"{comm} needs the number of ranks that exchange heads"
        return BatchCost(problem.layout_name, comm, refused=why)
    problem = replace(problem, cp_comm_type=comm, a2a_size=SCHEDULES[comm].a2a_size(problem.cp_size, 1))
    try:
        check_heads(sizes, comm, problem.a2a_size)
    except ValueError as error:
        return BatchCost(problem.layout_name, comm, refused=str(error))
    check_layout(problem)
    schedule = make_schedule(problem)
    costs = report(problem, schedule)
    return BatchCost(
        problem.layout_name,
        comm,
        work=1 / costs.balance,
        kv_rows=max(_received(rank_schedule) / problem.heads_kv for rank_schedule in schedule.forward),
        sent_bytes=max(rank.forward_bytes + rank.backward_bytes for rank in costs.ranks),
        tail=slice_rows(problem, "q") * problem.cp_size - sum(problem.lengths.len_q),
    )


def _received(rank_schedule: RankSchedule) -> int:
    """Rows times heads of K and V that a rank receives in a pass."""
    return sum(message.pieces.row_heads for step in rank_schedule for message in step.recvs if message.kind == "kv")
