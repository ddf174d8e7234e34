"""What a schedule is compiled to: few launches, slices where rows are contiguous, buffers that do not grow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import pytest
import torch

import cp_fast
from cp_fast.api.plan import Plan
from cp_fast.compile.lower import Draft
from cp_fast.compile.packing import Packing
from cp_fast.compile.pipeline import lowered, optimized, upload
from cp_fast.compile.program import (
    OWN,
    Accumulate,
    Copy,
    Free,
    Instruction,
    Launch,
    Program,
    Programs,
    Recv,
    Send,
    View,
)
from cp_fast.movers.mover_protocol import Rows
from cp_ref import SimGroup
from cp_ref.schedules.planners.make_schedule import make_rank_schedule, make_schedule, saved_kinds
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import Schedule
from tests import golden
from tests.spec.problems import SCHEDULES
from tests.spec.random_schedules import backward_ring

CPU = torch.device("cpu")


def same(*lengths: int) -> tuple[Sequence, ...]:
    return tuple(Sequence(n, n, n, n) for n in lengths)


def draft_of(problem: Problem, rank: int) -> Draft:
    return lowered(Packing(problem), rank, make_rank_schedule(problem, rank), saved_kinds(problem))


def programs_of(problem: Problem, rank: int, schedule: Schedule | None = None) -> Programs[Rows]:
    """A rank's programs with their tables on the CPU; of the problem's own schedule, or of another."""
    if schedule is None:
        draft = draft_of(problem, rank)
    else:
        steps = schedule.forward[rank], schedule.backward[rank]
        draft = lowered(Packing(problem, may_fold=False), rank, steps, schedule.saved)
    return upload(optimized(draft), CPU)


def passes_of(programs: Programs[Rows]) -> tuple[Program[Rows], Program[Rows]]:
    return programs.forward, programs.backward


def launches_by_step(program: Program[Rows]) -> list[list[Launch[Rows]]]:
    return [[one for one in program.of(Launch) if one.step == step] for step in range(program.steps)]


def gathering(program: Program[Rows]) -> list[Copy[Rows]]:
    """Copies of operands: before they are sent, or before a launch."""
    return [one for one in program.of(Copy) if program.buffers[one.target.buffer].role == "operand"]


def views_of(launch: Launch[Rows], program: Program[Rows]) -> Iterator[View[Rows]]:
    """All that a launch reads, and what is accumulated of its results, on both sides."""
    yield from launch.operands
    for one in program.of(Accumulate):
        if one.source.buffer in launch.results:
            yield from (one.source, one.target)


def all_slices(program: Program[Rows]) -> bool:
    """Whether launches read and write slices alone."""
    rows = [view.rows for launch in program.of(Launch) for view in views_of(launch, program)]
    return all(one is None or isinstance(one, slice) for one in rows)


@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize("lengths", [(64,), (64, 16, 160)])
def test_a_causal_ring_is_one_launch_a_step(cp_size: int, lengths: tuple[int, ...]) -> None:
    """Both chunks, all documents: the own step is a batch of causal squares, the others are full rectangles."""
    for rank in range(cp_size):
        for program in passes_of(programs_of(Problem(cp_size, same(*lengths), qkv_format="thd"), rank)):
            counts = [len(some) for some in launches_by_step(program)]
            assert counts[:cp_size] == [1] * cp_size
            assert not any(counts[cp_size:])  # the last gradients travel home
            first, *others = (launch.batch for launch in program.of(Launch))
            assert (first.left, first.right) == (None, 0)
            assert all((s.left, s.right) == (None, None) for s in others)
            assert len(first.cu_q) == len(lengths) + 1


def test_one_document_is_never_gathered() -> None:
    """All that launches read and write is a slice, and so is what is sent."""
    for rank in range(4):
        for program in passes_of(programs_of(Problem(4, same(64), qkv_format="thd"), rank)):
            assert not gathering(program)
            assert all_slices(program)
            assert all(isinstance(send.source.rows, slice) for send in program.of(Send))


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_dense_documents_are_never_gathered(cp_size: int) -> None:
    """A bidirectional ring reads whole buffers, however many documents there are."""
    problem = Problem(cp_size, same(64, 32, 128), qkv_format="thd", attn_mask_type="no_mask")
    for rank in range(cp_size):
        for program in passes_of(programs_of(problem, rank)):
            assert not gathering(program)
            assert all_slices(program)


@pytest.mark.parametrize("cp_size", [2, 4, 16])
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_buffers_do_not_grow_with_the_ring(cp_size: int, mask: str) -> None:
    """At most two received blocks are there at a time, that which is computed with and that which is on its way, none
    with more rows than the rank's own; at most two partial results of a kind wait; and in the end all are freed.
    """
    problem = Problem(cp_size, same(32 * cp_size), qkv_format="thd", attn_mask_type=mask)
    whole = programs_of(problem, 0)
    kept = {here for here, _ in whole.saved} - set(OWN.values())
    for program, left in ((whole.forward, kept), (whole.backward, set[int]())):
        alive: set[int] = set()
        for one in program.instructions:
            alive |= set(written(one))
            if isinstance(one, Free):
                assert set(one.buffers) <= alive
                alive -= set(one.buffers)
            specs = [program.buffers[number] for number in alive]
            assert all(spec.rows is None or spec.rows <= 32 for spec in specs)
            assert sum(spec.role == "operand" for spec in specs) <= 2
            for kind in ("out", "dq", "dkv"):
                partial = [spec for spec in specs if spec.kind == kind and spec.role == "partial"]
                assert len(partial) <= (3 if kind == "dkv" else 2)
        assert alive - set(program.results.values()) == left


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s["cp_comm_type"])
def test_every_buffer_is_freed_once_or_kept(schedule: dict[str, Any]) -> None:
    """And none is read, sent or filled after it was freed. What is kept is read in the backward pass."""
    problem = Problem(4, same(64, 32), **schedule, qkv_format="thd", heads_q=8, heads_kv=4)
    for rank in range(4):
        whole = programs_of(problem, rank)
        here, there = ({pair[n] for pair in whole.saved} for n in (0, 1))
        gradients = {OWN["do"], OWN["res"]}
        own = {OWN["q"], OWN["kv"]}
        for program, have, left in (
            (whole.forward, own, here | own),
            (whole.backward, there | gradients, (there & own) | gradients),
        ):
            for one in program.instructions:
                assert {number for number in read(one) if program.buffers[number].role != "sum"} <= have
                have |= set(written(one))
                if isinstance(one, Free):
                    assert set(one.buffers) <= have
                    have -= set(one.buffers)
            assert have - set(program.results.values()) == left
        assert there <= {number for one in whole.backward.instructions for number in read(one)}


def read(one: Instruction[Rows]) -> list[int]:
    """The buffers that an instruction reads."""
    if isinstance(one, Send | Copy | Accumulate):
        return [one.source.buffer]
    return [view.buffer for view in one.operands] if isinstance(one, Launch) else []


def written(one: Instruction[Rows]) -> list[int]:
    """The buffers that an instruction writes."""
    if isinstance(one, Copy | Accumulate):
        return [one.target.buffer]
    if isinstance(one, Recv):
        return [one.buffer]
    return [*one.results] if isinstance(one, Launch) else []


@pytest.mark.parametrize("comm", ["a2a", "a2a+p2p"])
def test_a2a_is_one_launch_of_whole_sequences(comm: str) -> None:
    """The group's rows come together in one copy for each side, and the kernel reads slices of them."""
    problem = Problem(4, same(64, 32), comm, 4 if comm == "a2a" else 2, qkv_format="thd", heads_q=8, heads_kv=4)
    for rank in range(4):
        for program in passes_of(programs_of(problem, rank)):
            launches = list(program.of(Launch))
            assert len(launches) == (1 if comm == "a2a" else 2)
            if comm == "a2a":
                (launch,) = launches
                assert launch.batch.cu_q == (0, 64, 96)
                assert {(view.rows.start, view.rows.stop) for view in launch.operands} == {(0, 96)}
                assert (launch.batch.left, launch.batch.right) == (None, 0)


def test_a2a_packs_the_same_rows_for_all_peers_at_once() -> None:
    problem = Problem(4, same(64, 32), "a2a", 4, qkv_format="thd", heads_q=8, heads_kv=4)
    program = programs_of(problem, 2).forward
    copies = {copy.target.buffer: copy for copy in program.of(Copy) if program.buffers[copy.target.buffer].parts}
    assert sorted(copy.source.buffer for copy in copies.values()) == [OWN["q"], OWN["kv"]]
    assert len(copies) == 2
    for number, copy in copies.items():
        heads = 2 if copy.source.buffer == OWN["q"] else 1
        sends = [send for send in program.of(Send) if send.source.buffer == number]
        assert sorted(send.peer for send in sends) == [0, 1, 3]
        assert [send.part for send in sends] == [0, 1, 2]
        assert copy.first_heads == tuple(send.peer * heads for send in sends)
        assert program.buffers[number].heads == (0, heads)


def test_a2a_has_its_outs_and_queries_again_in_the_backward_pass() -> None:
    """Only `do` travels: q, k, v and the outs that were sent home are kept."""
    problem = Problem(4, same(64, 32), "a2a", 4, qkv_format="thd", heads_q=8, heads_kv=4)
    for rank in range(4):
        programs = programs_of(problem, rank)
        backward = programs.backward
        operands = [recv.buffer for recv in backward.of(Recv) if recv.part is None]
        assert {backward.buffers[number].kind for number in operands} == {"do"}
        assert sorted(programs.forward.buffers[here].kind for here, _ in programs.saved) == ["kv", "out", "q"]
        assert programs.sends_do


def test_a_ring_of_a2a_groups_keeps_what_was_exchanged_and_nothing_of_the_ring() -> None:
    """Kept: the rows of the own group. The keys of the three other groups, up to three times as many, travel again."""
    problem = Problem(8, same(64), "a2a+p2p", 2, heads_q=8, heads_kv=4)
    for rank in range(8):
        programs = programs_of(problem, rank)
        kept = {programs.forward.buffers[here].kind: programs.forward.buffers[here].rows for here, _ in programs.saved}
        assert kept == {"q": 16, "kv": 16, "out": 8}
        again = [programs.backward.buffers[recv.buffer] for recv in programs.backward.of(Recv)]
        assert 2 * 16 < sum(spec.rows for spec in again if spec.kind == "kv") <= 3 * 16


def test_a_head_chunk_of_a2a_has_its_own_buffers_and_one_launch() -> None:
    """Its rows are put together once, kept for the backward pass, and freed after their only launch there."""
    problem = Problem(2, same(64, 32), "a2a", 2, qkv_format="thd", heads_q=16, heads_kv=8)
    for rank in range(2):
        whole = programs_of(problem, rank, make_schedule(problem, head_chunks=(1, 2, 1)))
        for program in passes_of(whole):
            assert [len(some) for some in launches_by_step(program)] == [0, 1, 1, 1, 0]
            assert [launch.first_head for launch in program.of(Launch)] == [8 * rank, 8 * rank + 2, 8 * rank + 6]
            for place, launch in enumerate(program.instructions):
                if not isinstance(launch, Launch):
                    continue
                for view in launch.operands:
                    first, last = program.buffers[view.buffer].heads
                    assert view.heads == (0, last - first), "a slice of heads would be copied"
                    assert isinstance(view.rows, slice)
                after = program.instructions[place + 1]
                if program is whole.backward:
                    assert isinstance(after, Free)
                    assert {view.buffer for view in launch.operands} <= set(after.buffers)
        kept = [whole.forward.buffers[here].kind for here, _ in whole.kept_buffers]
        assert sorted(kept) == ["kv"] * 3 + ["out"] * 3 + ["q"] * 3
        backward = whole.backward
        operands = [recv.buffer for recv in backward.of(Recv) if recv.part is None]
        assert {backward.buffers[number].kind for number in operands} == {"do"}


def test_documents_at_home_send_nothing() -> None:
    problem = Problem(2, same(16, 16), qkv_format="thd", layout="contiguous")
    for rank in range(2):
        for program in passes_of(programs_of(problem, rank)):
            assert not [*program.of(Send), *program.of(Recv)]
            assert [launch.batch.cu_q for launch in program.of(Launch)] == [(0, 16)]


def test_a_window_sends_neighbours_what_they_see() -> None:
    problem = Problem(4, same(64), qkv_format="thd", layout="contiguous", window_size=(4, 0))
    for rank in range(4):
        forward = programs_of(problem, rank).forward
        assert sum(recv.size for recv in forward.of(Recv)) == (4 if rank else 0)


def test_equal_rows_share_tables() -> None:
    """Forward and backward launches of a ring read the same tables: each of them is uploaded once."""
    problem = Problem(4, same(64, 16, 160), qkv_format="thd")
    programs = programs_of(problem, 1)
    for forward, backward in zip(programs.forward.of(Launch), programs.backward.of(Launch), strict=True):
        assert forward.batch is backward.batch
        for one, other in zip(forward.operands, backward.operands, strict=False):
            assert one.rows is other.rows or one.rows == other.rows
    views = [view for one in passes_of(programs) for launch in one.of(Launch) for view in views_of(launch, one)]
    views += [send.source for one in passes_of(programs) for send in one.of(Send)]
    tables = {id(view.rows): view.rows for view in views}
    numbers = [tuple(rows.tolist()) for rows in tables.values() if isinstance(rows, torch.Tensor)]
    assert len(numbers) == len(set(numbers))
    assert numbers
    draft = draft_of(problem, 1)
    assert len(draft.tables.on_host(pinned=False)) < 4 * 3 * 20  # spans of sequences, not rows of tokens


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s["cp_comm_type"])
def test_what_travels_does_not_grow_with_the_tokens(schedule: dict[str, Any]) -> None:
    """Tables on their way to the device have as many numbers for long documents as for short ones."""

    def size(scale: int) -> int:
        problem = Problem(4, same(64 * scale, 32 * scale), **schedule, qkv_format="thd", heads_q=8, heads_kv=4)
        draft = draft_of(problem, 1)
        return len(draft.tables.on_host(pinned=False))

    assert size(1) == size(16)


def test_real_rows_of_padded_sequences() -> None:
    problem = Problem(
        2, (Sequence(3, 3, 8, 8), Sequence(8, 8, 8, 8)), qkv_format="thd", attn_mask_type="padding_causal"
    )
    found = [programs_of(problem, rank).real_q_rows for rank in range(2)]
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
        programs = programs_of(problem, rank, schedule)
        assert [len(some) for some in launches_by_step(programs.forward)] == [
            min(1, len(s.tiles)) for s in schedule.forward[rank]
        ]


def test_folded_batches_are_one_sequence_of_many_heads() -> None:
    problem = Problem(2, same(16, 16, 16), qkv_format="sbhd", heads_q=4, heads_kv=2)
    for some in launches_by_step(programs_of(problem, 0).forward):
        (launch,) = some
        assert len(launch.batch.cu_q) == 2
        assert [view.heads for view in launch.operands] == [(0, 12), (0, 6)]


def test_the_order_of_areas_does_not_matter_to_the_number_of_launches() -> None:
    """Documents of random lengths with a window: four windows serve them all."""
    random = np.random.default_rng(0)
    lengths = (8 * random.integers(1, 30, 40)).tolist()
    problem = Problem(4, same(*lengths), qkv_format="thd", window_size=(16, 0))
    for rank in range(4):
        for some in launches_by_step(programs_of(problem, rank).forward):
            assert len({(x.batch.left, x.batch.right) for x in some}) <= 5


# ---- Programs as text
#
# A program as text, letter by letter: a change of it is a change of what a rank does.
#
# Write the files anew with CP_GOLDEN=write, and read the difference.


FOLDER = Path(__file__).parent / "golden"


def plans(comm: Any, *lengths: int) -> list[Plan]:
    """The plans of two ranks, of causal documents of these lengths."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    how: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": ends, "device": "cpu", "dtype": torch.bfloat16}
    how |= {"heads_q": 4, "heads_kv": 2, "d_qk": 8, "d_v": 8}
    return SimGroup(2).run(lambda member: cp_fast.make_plan(cp=cp_fast.ContextParallel(member, comm), **how))


@pytest.mark.parametrize(("comm", "lengths"), [("p2p", (16,)), ("a2a", (16, 8))])
def test_golden(comm: Any, lengths: tuple[int, ...]) -> None:
    text = "".join(f"rank {plan.rank}\n{plan.programs}\n" for plan in plans(comm, *lengths))
    path = FOLDER / f"{comm}_cp2.txt"
    if os.environ.get("CP_GOLDEN") == "write":
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_the_page_of_plans_shows_the_forward_pass_of_rank_0() -> None:
    forward, _, _ = (FOLDER / "p2p_cp2.txt").read_text().removeprefix("rank 0\n").partition("backward\n")
    assert indent(forward, "    ") in (Path(__file__).parents[3] / "docs" / "how_to" / "plans.md").read_text()


@pytest.mark.thorough
def test_golden_folders_are_equal_or_show_the_first_difference(tmp_path: Path) -> None:
    """`tests.golden`: the same entries again, and one with another line."""
    some = [*golden.plan_entries(range(8)), *golden.refusal_entries(range(4)), *golden.command_entries()]
    again = [*golden.plan_entries(range(8)), *golden.refusal_entries(range(4)), *golden.command_entries()]
    for name, entries in (("before", some), ("after", again)):
        assert golden.write(tmp_path / name, iter(entries)) == len(some) > 20
    assert golden.compared(tmp_path / "before", tmp_path / "after") == ""
    texts = dict(some)
    assert "launch" in texts["plan 0000"]
    assert "int32 [" in texts["plan 0003"]
    texts["plan 0005"] = texts["plan 0005"].replace("launch", "lunch", 1)
    del texts["refused 0002"]
    golden.write(tmp_path / "after", iter(texts.items()))
    said = golden.compared(tmp_path / "before", tmp_path / "after")
    assert "2 of" in said.splitlines()[0]
    assert "1 of plan, 1 of refused" in said
    assert [line for line in said.splitlines() if line.startswith("+") and "lunch" in line]


def test_golden_draws_every_schedule_format_layout_and_mask() -> None:
    calls = [golden.drawn(n) for n in range(golden.PLANS)]
    for names in (golden.COMMS, golden.LAYOUTS):
        assert len({(call.cp_size, x) for call in calls for x in (call.comm, call.layout) if x in names}) == 8 * len(
            names
        )
    formats = {(call.comm, call.layout, call.arguments["qkv_format"]) for call in calls}
    assert len(formats) == len(golden.COMMS) * len(golden.LAYOUTS) * 3
    assert {call.arguments["attn_mask_type"] for call in calls} == {*golden.MASKS, None}
    for what in ("areas", "window_size", "max_sequences", "linear", "dropout_p", "softcap", "layout"):
        assert sum(what in call.arguments for call in calls) > 40, what
    assert sum(call.update is not None for call in calls) > 40
