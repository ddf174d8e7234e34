"""What a schedule is lowered to: few launches, slices where rows are contiguous, buffers that do not grow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cp_fast.program import OWN, Contribution, Launch, LoweredProgram, LoweredStep, Operand

from cp_fast.compile.link import upload
from cp_fast.compile.pipeline import lowered
from cp_fast.packing import Packing
from cp_fast.rows import Rows
from cp_ref.spec import Problem, Schedule, Sequence, make_program, make_schedule, saved_kinds
from tests.spec.other_rings import backward_ring
from tests.spec.problems import SCHEDULES

CPU = torch.device("cpu")


def same(*lengths: int) -> tuple[Sequence, ...]:
    return tuple(Sequence(n, n, n, n) for n in lengths)


def program_of(problem: Problem, rank: int, schedule: Schedule | None = None) -> LoweredProgram[Rows]:
    """A rank's lowered program with its tables on the CPU; of the problem's own schedule, or of another."""
    if schedule is None:
        draft = lowered(Packing(problem), rank, make_program(problem, rank), saved_kinds(problem))
    else:
        steps = schedule.forward[rank], schedule.backward[rank]
        draft = lowered(Packing(problem, may_fold=False), rank, steps, schedule.saved)
    return upload(draft, CPU)


def steps_of(program: LoweredProgram[Rows]) -> tuple[LoweredStep[Rows], ...]:
    return program.forward + program.backward


def operands(launch: Launch[Rows]) -> list[Operand[Rows]]:
    return [x for x in (launch.q, launch.kv, launch.do, launch.res) if x is not None]


def rows_in(x: Any) -> Iterator[Rows]:
    """Everything that a step reads and writes, as rows."""
    if isinstance(x, slice | torch.Tensor):
        yield x
    elif isinstance(x, Launch):
        for part in (*operands(x), *x.results, *x.results_kv):
            yield from rows_in(part)
    elif isinstance(x, Operand):
        yield x.rows
    elif isinstance(x, Contribution):
        yield from (x.rows, x.into)


@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize("lengths", [(64,), (64, 16, 160)])
def test_a_causal_ring_is_one_launch_a_step(cp_size: int, lengths: tuple[int, ...]) -> None:
    """Both chunks, all documents: the own step is a batch of causal squares, the others are full rectangles."""
    for rank in range(cp_size):
        program = program_of(Problem(cp_size, same(*lengths), qkv_format="thd"), rank)
        for steps in (program.forward, program.backward):
            counts = [len(step.launches) for step in steps]
            assert counts[:cp_size] == [1] * cp_size
            assert not any(counts[cp_size:])  # the last gradients travel home
            first, *others = (launch.segments for step in steps for launch in step.launches)
            assert (first.left, first.right) == (None, 0)
            assert all((s.left, s.right) == (None, None) for s in others)
            assert len(first.cu_q) == len(lengths) + 1


def test_one_document_is_never_gathered() -> None:
    """All that launches read and write is a slice, and so is what is sent."""
    for rank in range(4):
        for step in steps_of(program_of(Problem(4, same(64), qkv_format="thd"), rank)):
            assert not step.copies
            assert not step.packed
            assert all(isinstance(rows, slice) for launch in step.launches for rows in rows_in(launch))
            assert all(isinstance(send.rows, slice) for send in step.sends)


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_dense_documents_are_never_gathered(cp_size: int) -> None:
    """A bidirectional ring reads whole buffers, however many documents there are."""
    problem = Problem(cp_size, same(64, 32, 128), qkv_format="thd", attn_mask_type="no_mask")
    for rank in range(cp_size):
        for step in steps_of(program_of(problem, rank)):
            assert not step.copies
            assert all(isinstance(rows, slice) for launch in step.launches for rows in rows_in(launch))


@pytest.mark.parametrize("cp_size", [2, 4, 16])
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_buffers_do_not_grow_with_the_ring(cp_size: int, mask: str) -> None:
    """At most two received blocks are there at a time, that which is computed with and that which is on its way, none
    with more rows than the rank's own.
    """
    problem = Problem(cp_size, same(32 * cp_size), qkv_format="thd", attn_mask_type=mask)
    program = program_of(problem, 0)
    for steps in (program.forward, program.backward):
        alive: set[str] = set()
        for step in steps:
            alive |= {recv.buffer for recv in step.recvs}
            alive |= {copy.target.buffer for copy in (*step.packed, *step.copies)}
            assert len(alive) <= 2
            assert all(program.buffers[name].size <= 32 for name in alive)
            assert set(step.last_use) <= alive
            alive -= set(step.last_use)
        assert not alive


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s["cp_comm_type"])
def test_every_buffer_is_let_go_or_saved(schedule: dict[str, Any]) -> None:
    """And none is read, sent or filled after it was let go."""
    problem = Problem(4, same(64, 32), **schedule, qkv_format="thd", heads_q=8, heads_kv=4)
    for rank in range(4):
        program = program_of(problem, rank)
        have = {OWN["q"], OWN["kv"]}
        for steps in (program.forward, program.backward):
            for step in steps:
                arriving = {recv.buffer for recv in step.recvs}
                assert not arriving & have
                for copy in (*step.packed, *step.copies):
                    assert copy.source.buffer in have
                    have.add(copy.target.buffer)
                assert {send.buffer for send in step.sends} <= have
                assert {x.buffer for launch in step.launches for x in operands(launch)} <= have
                have |= arriving
                assert set(step.last_use) <= have
                have -= set(step.last_use)
            assert have - set(OWN.values()) == (
                {name for name in program.saved if name not in OWN.values()} if steps is program.forward else set()
            )
            have |= {OWN["do"], OWN["res"], *program.saved_sums.values()}
            if steps is program.forward:
                saved = {*program.saved, *program.saved_sums.values(), OWN["do"], OWN["res"]}
                used = {x.buffer for step in program.backward for launch in step.launches for x in operands(launch)}
                used |= {send.buffer for step in program.backward for send in step.sends}
                used |= {copy.source.buffer for step in program.backward for copy in (*step.packed, *step.copies)}
                assert {*program.saved, *program.saved_sums.values()} <= used
                have = saved


@pytest.mark.parametrize("comm", ["a2a", "a2a+p2p"])
def test_a2a_is_one_launch_of_whole_sequences(comm: str) -> None:
    """The group's rows come together in one copy for each side, and the kernel reads slices of them."""
    problem = Problem(4, same(64, 32), comm, 4 if comm == "a2a" else 2, qkv_format="thd", heads_q=8, heads_kv=4)
    for rank in range(4):
        program = program_of(problem, rank)
        for steps in (program.forward, program.backward):
            launches = [launch for step in steps for launch in step.launches]
            assert len(launches) == (1 if comm == "a2a" else 2)
            if comm == "a2a":
                (launch,) = launches
                assert launch.segments.cu_q == (0, 64, 96)
                assert launch.q.rows == launch.kv.rows == slice(0, 96)
                assert (launch.segments.left, launch.segments.right) == (None, 0)


def test_a2a_packs_the_same_rows_for_all_peers_at_once() -> None:
    problem = Problem(4, same(64, 32), "a2a", 4, qkv_format="thd", heads_q=8, heads_kv=4)
    program = program_of(problem, 2)
    sends = [send for step in program.forward for send in step.sends]
    assert sorted(send.buffer for send in sends) == [OWN["kv"], OWN["q"]]
    for send in sends:
        assert sorted(send.peers) == [0, 1, 3]
        assert send.heads == (2 if send.buffer == OWN["q"] else 1)
        assert send.first_heads == tuple(peer * send.heads for peer in send.peers)


def test_a2a_has_its_outs_and_queries_again_in_the_backward_pass() -> None:
    """Only `do` travels: q, k, v and the outs that were sent home are kept."""
    problem = Problem(4, same(64, 32), "a2a", 4, qkv_format="thd", heads_q=8, heads_kv=4)
    for rank in range(4):
        program = program_of(problem, rank)
        assert {program.buffers[recv.buffer].kind for step in program.backward for recv in step.recvs} == {"do"}
        assert program.saved_sums
        assert program.sends_do


def test_a_stage_of_a2a_has_its_own_buffers_and_one_launch() -> None:
    """Its rows are put together once, kept for the backward pass, and let go after their only launch there."""
    problem = Problem(2, same(64, 32), "a2a", 2, qkv_format="thd", heads_q=16, heads_kv=8)
    for rank in range(2):
        program = program_of(problem, rank, make_schedule(problem, stages=(1, 2, 1)))
        for steps in (program.forward, program.backward):
            launches = [step.launches for step in steps]
            assert [len(some) for some in launches] == [0, 1, 1, 1, 0]
            first_heads = [launch.first_head for some in launches for launch in some]
            assert first_heads == [8 * rank, 8 * rank + 2, 8 * rank + 6]
            for step in steps[1:4]:
                (launch,) = step.launches
                for what in operands(launch):
                    buffer = program.buffers[what.buffer]
                    assert what.heads == (0, buffer.heads[1] - buffer.heads[0]), "a slice of heads would be copied"
                    assert isinstance(what.rows, slice)
                    assert steps is program.forward or what.buffer in step.last_use
        kept = [program.buffers[name].kind for name in program.saved if name not in OWN.values()]
        assert sorted(kept) == ["kv"] * 3 + ["q"] * 3
        assert {program.buffers[recv.buffer].kind for step in program.backward for recv in step.recvs} == {"do"}


def test_documents_at_home_send_nothing() -> None:
    problem = Problem(2, same(16, 16), qkv_format="thd", layout="contiguous")
    for rank in range(2):
        program = program_of(problem, rank)
        for step in steps_of(program):
            assert (step.sends, step.recvs, step.result_sends, step.result_recvs) == ((), (), (), ())
        launches = [launch for step in program.forward for launch in step.launches]
        assert [launch.segments.cu_q for launch in launches] == [(0, 16)]


def test_a_window_sends_neighbours_what_they_see() -> None:
    problem = Problem(4, same(64), qkv_format="thd", layout="contiguous", window_size=(4, 0))
    for rank in range(4):
        forward = program_of(problem, rank).forward
        assert sum(recv.size for step in forward for recv in step.recvs) == (4 if rank else 0)


def test_equal_rows_share_tables() -> None:
    """Forward and backward launches of a ring read the same tables: each of them is uploaded once."""
    problem = Problem(4, same(64, 16, 160), qkv_format="thd")
    program = program_of(problem, 1)
    for forward, backward in zip(program.forward, program.backward, strict=False):
        for one, other in zip(forward.launches, backward.launches, strict=True):
            assert one.segments is other.segments
            assert one.q.rows is other.q.rows or one.q.rows == other.q.rows
            assert one.results[0].into is other.results[0].into or one.results[0].into == other.results[0].into
    draft = lowered(Packing(problem), 1, make_program(problem, 1), saved_kinds(problem))
    tables = {id(rows): rows for step in steps_of(program) for x in step.launches for rows in rows_in(x)}
    tables |= {id(send.rows): send.rows for step in steps_of(program) for send in step.sends}
    numbers = [tuple(rows.tolist()) for rows in tables.values() if isinstance(rows, torch.Tensor)]
    assert len(numbers) == len(set(numbers))
    assert numbers
    assert len(draft.tables.on_host(pinned=False)) < 4 * 3 * 20  # spans of sequences, not rows of tokens


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s["cp_comm_type"])
def test_what_travels_does_not_grow_with_the_tokens(schedule: dict[str, Any]) -> None:
    """Tables on their way to the device have as many numbers for long documents as for short ones."""

    def size(scale: int) -> int:
        problem = Problem(4, same(64 * scale, 32 * scale), **schedule, qkv_format="thd", heads_q=8, heads_kv=4)
        draft = lowered(Packing(problem), 1, make_program(problem, 1), saved_kinds(problem))
        return len(draft.tables.on_host(pinned=False))

    assert size(1) == size(16)


def test_real_rows_of_padded_sequences() -> None:
    problem = Problem(
        2, (Sequence(3, 3, 8, 8), Sequence(8, 8, 8, 8)), qkv_format="thd", attn_mask_type="padding_causal"
    )
    found = [program_of(problem, rank).real_q_rows for rank in range(2)]
    assert isinstance(found[0], torch.Tensor)
    assert found[0].tolist() == [0, 1, 4, 5, 6, 7]  # position 0 and 1 of the first, which ends before its late chunk
    assert found[0].dtype == torch.int64
    assert isinstance(found[1], torch.Tensor)
    assert found[1].tolist() == [0, 4, 5, 6, 7]


def test_a_schedule_of_the_users_own_is_lowered_like_any_other() -> None:
    """The ring run backwards has as many launches a step as the planner's ring."""
    problem = Problem(4, same(64, 16), qkv_format="thd")
    schedule = backward_ring(problem.workload)
    for rank in range(4):
        program = program_of(problem, rank, schedule)
        assert [len(step.launches) for step in program.forward] == [
            min(1, len(s.tiles)) for s in schedule.forward[rank]
        ]


def test_folded_batches_are_one_sequence_of_many_heads() -> None:
    problem = Problem(2, same(16, 16, 16), qkv_format="sbhd", heads_q=4, heads_kv=2)
    for step in program_of(problem, 0).forward:
        (launch,) = step.launches
        assert len(launch.segments.cu_q) == 2
        assert launch.q.heads == (0, 12)
        assert launch.kv.heads == (0, 6)


def test_the_order_of_areas_does_not_matter_to_the_number_of_launches() -> None:
    """Documents of random lengths with a window: four windows serve them all."""
    random = np.random.default_rng(0)
    lengths = (8 * random.integers(1, 30, 40)).tolist()
    problem = Problem(4, same(*lengths), qkv_format="thd", window_size=(16, 0))
    for rank in range(4):
        for step in program_of(problem, rank).forward:
            assert len({(x.segments.left, x.segments.right) for x in step.launches}) <= 5
