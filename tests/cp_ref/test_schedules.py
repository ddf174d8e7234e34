"""Schedules that no planner has, made from the tables and run through the public API, against the oracle in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cp_ref import ContextParallel, SimGroup, attention, dense_attention, make_plan, shard, supports
from cp_ref.sim import SimMember
from cp_ref.spec import (
    InvalidSchedule,
    Message,
    Pieces,
    Problem,
    Program,
    Schedule,
    Sequence,
    Step,
    Tiles,
    Workload,
    make_schedule,
    tag,
    verify,
)
from cp_ref.spec.units import spans_by

THREE = (Sequence(11, 7, 12, 12), Sequence(0, 0, 0, 0), Sequence(6, 6, 6, 6))
PROBLEMS = {
    "padded, empty and full sequences": Problem(3, THREE, qkv_format="thd", heads_q=6, heads_kv=2, dtype="float64"),
    "window, contiguous": Problem(
        2, THREE, layout="contiguous", qkv_format="thd", window_size=(4, 0), heads_q=4, heads_kv=2, dtype="float64"
    ),
    "sink and softcap": Problem(
        4,
        (Sequence(16, 24, 16, 24),) * 2,
        attn_mask_type="causal_bottom_right",
        heads_q=4,
        softmax_type="learnable",
        softcap=2.0,
        dtype="float64",
    ),
}


def tiles_between(work: Workload, rank: int, owner: int, heads: list[tuple[int, int]]) -> Tiles:
    """A rank's queries against an owner's keys, uncropped, in one tile for every two fragments and range of heads."""
    rows: list[tuple[int, ...]] = []
    for area, (q_start, q_stop, k_start, k_stop, _, _) in enumerate(work.areas.rows()):
        for _, a, b, _ in work.ownership.q.of(rank).rows():
            for _, c, d, _ in work.ownership.kv.of(owner).rows():
                q, k = (max(a, q_start), min(b, q_stop)), (max(c, k_start), min(d, k_stop))
                if q[0] < q[1] and k[0] < k[1]:
                    rows += [(area, *q, *k, *some) for some in heads]
    return Tiles.of_rows(rows)


def own_rows(work: Workload, kind: str, rank: int, peer: int, step: int) -> tuple[Message, ...]:
    """A message of all rows that a rank owns."""
    rows, heads = work.ownership.side("kv" if "kv" in kind else "q").of(rank), (0, work.heads_q)
    pieces = Pieces.spans(rows.start, rows.stop, (0, work.heads_kv) if "kv" in kind else heads)
    return (Message(kind, peer % work.cp_size, tag(step, kind), pieces),) if len(pieces) else ()


def ring_backwards(problem: Problem) -> Schedule:
    """At step s every rank has the block of the rank s ahead, and hands it to the rank behind."""
    work, n = problem.workload, problem.cp_size

    def block(kind: str, rank: int, step: int, at: int) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """The block at this distance goes to the rank behind; the next one comes from the rank ahead."""
        here, next_one = (rank + at) % n, (rank + at + 1) % n
        return own_rows(work, kind, here, rank - 1, step), own_rows(work, kind, next_one, rank + 1, step)

    def program(rank: int, backward: bool) -> Program:
        steps: list[Step] = []
        for s in range(n + backward):
            kv = block("kv", rank, s, s) if s < n - 1 else ((), ())
            dkv = block("dkv", rank, s, s - 1) if backward and s > 0 else ((), ())
            tiles = [tiles_between(work, rank, (rank + s) % n, [(0, work.heads_q)])] if s < n else []
            steps.append(Step(kv[0] + dkv[0], kv[1] + dkv[1], Tiles.concat(tiles)))
        return tuple(steps)

    forward, backward = (tuple(program(rank, b) for rank in range(n)) for b in (False, True))
    return Schedule("backwards", (work.heads_q, work.heads_kv), forward, backward)


def queries_travel(problem: Problem) -> Schedule:
    """Keys stay: queries visit every rank, each head in a tile of its own, and partial results go home."""
    work, n = problem.workload, problem.cp_size
    heads = [(h, h + 1) for h in reversed(range(work.heads_q))]

    def partial(kind: str, rank: int, owner: int, peer: int) -> tuple[Message, ...]:
        """The results of a rank's queries that are computed at the owner of the keys."""
        tiles = tiles_between(work, rank, owner, heads)
        start, stop = spans_by(np.zeros(len(tiles), dtype=np.int64), tiles.q_start, tiles.q_stop).of(0)
        return (Message(kind, peer, tag(2, kind), Pieces.spans(start, stop, (0, work.heads_q))),) if len(start) else ()

    def program(rank: int, operands: tuple[str, ...], result: str) -> Program:
        peers = [peer for peer in range(n) if peer != rank]
        sends = tuple(m for kind in operands for peer in peers for m in own_rows(work, kind, rank, peer, 0))
        recvs = tuple(m for kind in operands for peer in peers for m in own_rows(work, kind, peer, peer, 0))
        away = Tiles.concat([tiles_between(work, peer, rank, heads) for peer in peers])
        back = tuple(m for peer in peers for m in partial(result, peer, rank, peer))
        home = tuple(m for peer in peers for m in partial(result, rank, peer, peer))
        return Step(sends, recvs), Step(tiles=away), Step(back, home, tiles_between(work, rank, rank, heads))

    forward = tuple(program(rank, ("q",), "out") for rank in range(n))
    backward = tuple(program(rank, ("q", "do"), "dq") for rank in range(n))
    return Schedule("queries", (work.heads_q, work.heads_kv), forward, backward)


def arguments(problem: Problem) -> dict[str, Any]:
    """A problem as arguments of `attention`."""
    of_attention = ("qkv_format", "attn_mask_type", "window_size", "softcap", "softmax_type")
    found = {name: getattr(problem, name) for name in of_attention}
    if problem.qkv_format == "thd":
        for side, padded in (("q", problem.starts_q), ("kv", problem.starts_kv)):
            lengths = [0, *(getattr(s, f"len_{side}") for s in problem.sequences)]
            found[f"cu_seqlens_{side}"] = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
            found[f"cu_seqlens_{side}_padded"] = torch.tensor(padded, dtype=torch.int32)
    return found


def plan_arguments(problem: Problem) -> dict[str, Any]:
    """A problem as arguments of `make_plan`."""
    sizes = {name: getattr(problem, name) for name in ("heads_q", "heads_kv", "d_qk", "d_v")}
    if problem.qkv_format != "thd":
        slots = problem.sequences[0]
        sizes |= {"batch_size": len(problem.sequences), "seqlen_q": slots.slots_q, "seqlen_kv": slots.slots_kv}
    return arguments(problem) | sizes | {"dtype": torch.float64, "device": "cpu"}


def global_tensors(problem: Problem) -> list[torch.Tensor]:
    """q, k, v and the gradient of out, in positions of the global tensors; and a sink."""
    generator, p = torch.Generator().manual_seed(0), problem
    widths = ((p.heads_q, p.d_qk), (p.heads_kv, p.d_qk), (p.heads_kv, p.d_v), (p.heads_q, p.d_v))
    starts = (p.starts_q, p.starts_kv, p.starts_kv, p.starts_q)
    found = [
        torch.randn(x[-1], *w, generator=generator, dtype=torch.float64) for x, w in zip(starts, widths, strict=True)
    ]
    if p.qkv_format == "bshd":
        found = [x.unflatten(0, (len(p.sequences), -1)) for x in found]
    return [*found, torch.randn(p.heads_q, generator=generator, dtype=torch.float64)]


def assert_computes(problem: Problem, schedule: Schedule) -> None:
    """The public API plays the schedule: forward and backward it is the oracle, to 1e-10."""
    q, k, v, dout, sink = global_tensors(problem)
    offset = sink if problem.softmax_type == "learnable" else None
    padded = {"q": None, "kv": None}
    if problem.qkv_format == "thd":
        padded = {"q": torch.tensor(problem.starts_q), "kv": torch.tensor(problem.starts_kv)}

    def one_rank(member: SimMember) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
        cp = ContextParallel(member, layout=problem.layout)

        def mine(x: torch.Tensor, side: str) -> torch.Tensor:
            return shard(x, cp=cp, qkv_format=problem.qkv_format, cu_seqlens_padded=padded[side])

        plan = make_plan(cp=cp, **plan_arguments(problem), schedule=schedule)
        assert plan.schedule is schedule
        leaves = [x.requires_grad_() for x in (mine(q, "q"), mine(k, "kv"), mine(v, "kv"))]
        own_offset = None if offset is None else offset.clone().requires_grad_()
        out, top = attention(*leaves, cp=cp, plan=plan, softmax_offset=own_offset, return_max_logit=True)
        out.backward(mine(dout, "q"))
        want = [mine(x, side) for x, side in zip(exact[1:5], ("q", "q", "kv", "kv"), strict=True)]
        got = [out, *(x.grad for x in leaves), top, None if own_offset is None else own_offset.grad]
        return list(zip(got, [*want, exact[0], exact[5]], strict=True))

    wholes = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    out, _, top = dense_attention(
        *wholes[:3], **arguments(problem), softmax_offset=None if offset is None else wholes[3]
    )
    out.backward(dout)
    exact = [top, out.detach(), *(x.grad for x in wholes)]
    for pairs in SimGroup(problem.cp_size).run(one_rank):
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make", [ring_backwards, queries_travel])
@pytest.mark.parametrize("name", PROBLEMS)
def test_schedules_that_no_planner_has(name: str, make: Callable[[Problem], Schedule]) -> None:
    schedule = make(PROBLEMS[name])
    verify(PROBLEMS[name], schedule)
    assert_computes(PROBLEMS[name], Schedule.parse(str(schedule)))


def errors(problem: Problem, of_rank: Callable[[SimMember], Any], comm: str = "p2p", **more: Any) -> list[Exception]:
    """What make_plan raises on every rank when it is given a schedule."""

    def one_rank(member: SimMember) -> Exception:
        cp = ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm)
        with pytest.raises((ValueError, TypeError)) as caught:
            make_plan(cp=cp, **plan_arguments(problem), schedule=of_rank(member), **more)
        return caught.value

    return SimGroup(problem.cp_size).run(one_rank)


def test_an_invalid_schedule_raises_on_every_rank() -> None:
    problem = PROBLEMS["padded, empty and full sequences"]
    schedule = ring_backwards(problem)
    first, *others = schedule.forward[1]
    program = (first._replace(tiles=first.tiles.take(slice(1, None))), *others)
    wrong = Schedule("wrong", schedule.heads, (schedule.forward[0], program, schedule.forward[2]), schedule.backward)
    found = errors(problem, lambda member: wrong)
    assert {type(error) for error in found} == {InvalidSchedule}
    assert "computed never" in str(found[0])
    by_one = errors(problem, lambda member: wrong if member.rank == 2 else schedule)
    assert [type(error) for error in by_one] == [ValueError, ValueError, InvalidSchedule]
    assert "rank 2 refused its arguments" in str(by_one[0])
    assert "InvalidSchedule" in str(by_one[0])


def test_the_ranks_agree_on_the_schedule() -> None:
    problem = PROBLEMS["padded, empty and full sequences"]
    backwards, queries = ring_backwards(problem), queries_travel(problem)
    found = errors(problem, lambda member: backwards if member.rank else queries)
    assert all("the ranks have different problems: " in str(error) and "schedule=" in str(error) for error in found)
    found = errors(problem, lambda member: backwards if member.rank else None)
    assert str(found[0]).startswith("the ranks have different problems: rank 0 has nothing where rank 1 has schedule=")


def test_refusals() -> None:
    problem = PROBLEMS["padded, empty and full sequences"]
    schedule = ring_backwards(problem)
    (error, *_) = errors(problem, lambda member: str(schedule))
    assert str(error).startswith("schedule is a str; it must be a cp_ref.spec.Schedule")
    (error, *_) = errors(problem, lambda member: schedule, max_sequences=3)
    assert str(error).startswith("schedule is given, but max_sequences is 3")
    (error, *_) = errors(PROBLEMS["sink and softcap"], lambda member: schedule)
    assert "programs for 3 forward and 3 backward ranks, but cp_size is 4" in str(error)


def test_messages_stay_inside_the_two_groups() -> None:
    """Neighbours in the ring of 4 are rank 1 and rank 2, too, which share no group of 2 x 2."""
    problem = PROBLEMS["sink and softcap"]
    (error, *_) = errors(problem, lambda member: ring_backwards(problem), "a2a+p2p")
    assert "have neither their a2a group nor their p2p group in common" in str(error)


def test_supports_takes_a_schedule() -> None:
    problem = PROBLEMS["padded, empty and full sequences"]

    def one_rank(member: SimMember) -> tuple[bool, str]:
        return supports(cp=ContextParallel(member), **plan_arguments(problem), schedule=make_schedule(problem))

    assert SimGroup(3).run(one_rank) == [(True, "")] * 3
