"""Recording every intermediate, and naming the first in which two runs part."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cp_ref import ContextParallel, SimGroup, attention, dense_attention
from cp_ref.cli import app
from cp_ref.cli.plan import Request
from cp_ref.cli.record import planted, run, tensors_of
from cp_ref.reference.executor.merge_partials import merge
from cp_ref.reference.simulator import SimMember
from cp_ref.schedules.schedule import Schedule, side_of
from cp_ref.tracing.compare_traces import compare
from cp_ref.tracing.recorded_trace import Item, Trace
from cp_ref.tracing.recorder import trace

PACKED: dict[str, Any] = {"seqlens": "13,0,5", "d_v": 6}
REQUESTS = {
    "p2p": Request("p2p", 3, heads_q=4, heads_kv=2, dtype="float64", **PACKED),
    "p2p-window": Request("p2p", 4, window="3,1", mask="no_mask", dtype="float64", qkv_format="sbhd", batch=2),
    "all_gather": Request("all_gather", 3, heads_q=4, heads_kv=2, layout="contiguous", dtype="float64", **PACKED),
    "areas": Request("p2p", 3, seqlens="18,6", areas="shared_prefix(6, [9, 9])", layout="balanced", dtype="float64"),
    "a2a": Request("a2a", 4, heads_q=8, heads_kv=2, dtype="float64", **PACKED),
    "a2a+p2p": Request("a2a+p2p", 4, dtype="float64", seqlens="9,7", seqlens_kv="12,3", mask="causal_bottom_right"),
}
runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {name: run(request) for name, request in REQUESTS.items()}


def with_item(t: Trace, item: Item, changed: Item | None) -> Trace:
    """The same trace with one item exchanged, or left out."""
    copy = Trace(t.call, t.problem, t.schedule, t.calls)
    for old in t:
        if old is not item:
            copy.add(old)
        elif changed is not None:
            copy.add(changed)
    return copy


@pytest.mark.parametrize("name", REQUESTS)
def test_every_tile_and_message_is_there_once(name: str, traces: dict[str, Trace]) -> None:
    t = traces[name]
    schedule = t.schedule
    assert schedule is not None
    for direction, programs, result in (("forward", schedule.forward, "out"), ("backward", schedule.backward, "dk")):
        planned: Counter[tuple[int, int, str]] = Counter()
        for rank, program in enumerate(programs):
            for number, step in enumerate(program):
                planned.update((rank, number, schedule.tile_text(row)) for row in step.tiles.rows())
                planned.update((rank, number, schedule.message_text(m, "recv")) for m in step.recvs)
        first = [i for i in t.select(direction, kind="tile") if i.name == result]
        seen = Counter((i.rank, i.step, i.source) for i in first)
        seen.update({(i.rank, i.step, i.source) for i in t.select(direction, kind="received")})
        assert seen == planned
    assert [i.order for i in t] == sorted(i.order for i in t)
    assert all(i.tensor.device.type == "cpu" and not i.tensor.requires_grad for i in t)


@pytest.mark.parametrize("name", REQUESTS)
def test_recorded_parts_make_the_recorded_whole(name: str, traces: dict[str, Trace]) -> None:
    """All partial outputs of all ranks, merged in any order, are the result; all contributions, added up, too."""
    t = traces[name]
    problem = t.problem
    assert problem is not None
    starts = {n: problem.starts(side_of(n)) for n in ("out", "lse", "dq", "dk", "dv")}
    made = {n: torch.zeros(starts[n][-1], *t.whole(n)[0].shape[1:], dtype=torch.float64) for n in starts}
    made["lse"].fill_(float("-inf"))
    for item in t.select("backward", kind="tile") + t.select("forward", kind="tile", name="out"):
        p = item.piece
        assert p is not None
        where = slice(p.start, p.stop), slice(p.head_start, p.head_stop)
        if item.direction == "backward":
            made[item.name][where] += item.tensor
            continue
        (lse,) = (
            i.tensor for i in t.select("forward", item.step, item.rank, "tile", "lse") if i.key[3:5] == item.key[3:5]
        )
        out, all_lse = made["out"], made["lse"]
        out[where], all_lse[where] = merge(out[where], all_lse[where], item.tensor, lse)
    for n, x in made.items():
        for start, theirs in zip(starts[n], t.whole(n), strict=False):
            torch.testing.assert_close(x[start : start + len(theirs)], theirs, rtol=1e-12, atol=1e-12)


def test_the_whole_of_areas_is_the_oracles(traces: dict[str, Trace]) -> None:
    request = REQUESTS["areas"]
    x = tensors_of(request)
    out, lse, _ = dense_attention(x["q"], x["k"], x["v"], **request.arguments)
    torch.testing.assert_close(torch.cat(traces["areas"].whole("out")), out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(traces["areas"].whole("lse")), lse.t(), rtol=1e-12, atol=1e-12)


def test_the_whole_is_the_oracles(traces: dict[str, Trace]) -> None:
    request, t = REQUESTS["p2p-window"], traces["p2p-window"]
    x = tensors_of(request)
    out, lse, max_logit = dense_attention(x["q"], x["k"], x["v"], **request.arguments)
    torch.testing.assert_close(torch.stack(t.whole("out"), dim=1), out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.stack(t.whole("lse")).transpose(1, 2), lse, rtol=1e-12, atol=1e-12)
    assert all(i.tensor.equal(t.select(name="max_logit")[0].tensor) for i in t.select(name="max_logit"))
    torch.testing.assert_close(t.select(name="max_logit")[0].tensor, max_logit, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="name is 'outt'"):
        t.whole("outt")


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "a2a+p2p"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_bitwise_the_same(comm: Any, dtype: torch.dtype) -> None:
    def fn(member: SimMember) -> list[torch.Tensor]:
        cp = ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm)
        generator = torch.Generator().manual_seed(member.rank)
        q, k, v = (torch.randn(1, 4, 4, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3))
        offset = torch.linspace(-1, 1, 4).requires_grad_()
        out, lse, top = attention(
            q, k, v, cp=cp, softmax_type="learnable", softmax_offset=offset, return_lse=True, return_max_logit=True
        )
        (out.float().square().sum() + lse.sum()).backward()
        assert all(x.grad is not None for x in (q, k, v, offset))
        return [out, lse, top, *(x.grad for x in (q, k, v, offset) if x.grad is not None)]

    plain = SimGroup(4).run(fn)
    with trace() as t:
        traced = SimGroup(4).run(fn)
    assert all(a.equal(b) for one, other in zip(plain, traced, strict=True) for a, b in zip(one, other, strict=True))
    assert {i.name for i in t.select(kind="final")} == {"out", "lse", "max_logit", "dq", "dk", "dv", "dsoftmax_offset"}
    assert {i.tensor.dtype for i in t.select(kind="given", name="q")} == {dtype}
    assert {i.tensor.dtype for i in t.select(kind="tile")} == {torch.float32}


def test_which_call_and_when() -> None:
    def layers(member: SimMember) -> list[torch.Tensor]:
        x = torch.ones(1, 4, 1, 2, requires_grad=True)
        outs = [attention(x * n, x, x, cp=ContextParallel(member)) for n in range(3)]
        for n in (2, 1):
            (outs[n].sum() * n).backward(retain_graph=True)
        return outs

    with trace(call=1) as t:
        SimGroup(2).run(layers)
        with pytest.raises(RuntimeError, match="one trace at a time"), trace():
            pass
    assert t.calls == {0: 3, 1: 3}
    assert all((i.tensor == 1).all() for i in t.select(kind="given", name="q") + t.select(kind="given", name="dout"))
    assert t.ranks("backward") == (0, 1)
    assert str(t).splitlines()[2].startswith("call 1 of 3, ")
    before = len(t)
    SimGroup(2).run(layers)
    assert len(t) == before
    with trace(call=5) as empty:
        SimGroup(2).run(layers)
    assert str(empty) == "an empty trace: it waits for attention call 5, and 3 were made while it recorded"
    assert not compare(t, empty)
    assert str(compare(empty, t)) == "no attention call was recorded in a\nthere is nothing to compare"


def test_a_backward_after_the_block_is_not_recorded() -> None:
    with trace() as t:
        (outs,) = SimGroup(1).run(
            lambda member: attention(*[torch.ones(1, 2, 1, 2, requires_grad=True)] * 3, cp=ContextParallel(member))
        )
    outs.sum().backward()
    assert t.ranks() == (0,)
    assert t.ranks("backward") == ()


def test_the_table_of_contents(traces: dict[str, Trace]) -> None:
    lines = str(traces["a2a+p2p"]).splitlines()
    assert lines[0] == "trace of a2a+p2p, cp_size 4, thd, dual_chunk, causal_bottom_right"
    assert "  step 0   given     q k v                    30 items  ranks 0 1 2 3" in lines
    assert lines[-1].split()[:4] == ["final", "dq", "dk", "dv"]


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.one_in(2)
def test_a_changed_number_is_found_where_it_is(name: str, traces: dict[str, Trace]) -> None:
    t = traces[name]
    assert compare(t, t)
    for item in t.items[::37]:
        tensor = item.tensor.clone()
        tensor.view(-1)[-1] = tensor.view(-1)[-1].nan_to_num(neginf=0.0) + 1e-3
        found = compare(t, with_item(t, item, replace(item, tensor=tensor)))
        assert not found
        assert found.first is not None
        assert found.first.item is item
        assert (found.first.unlike, found.first.count) == (1, tensor.numel())
        if item.piece is not None:
            assert t.problem is not None
            assert found.first.seq is not None
            assert found.first.position is not None
            starts = t.problem.starts(side_of(item.name))
            assert starts[found.first.seq] + found.first.position == item.piece.stop - 1
            assert found.first.head == item.piece.head_stop - 1
        missing = compare(t, with_item(t, item, None)).first
        assert missing is not None
        assert missing.b is None
        assert "only a has it" in str(missing)


def test_the_first_of_several(traces: dict[str, Trace]) -> None:
    t = traces["p2p"]
    items = t.select("forward", kind="tile")
    late, early = items[-1], items[2]
    changed = with_item(t, late, replace(late, tensor=late.tensor + 1))
    changed = with_item(changed, early, replace(early, tensor=early.tensor * float("nan")))
    found = compare(t, changed)
    assert [d.item for d in found.differences] == [early, late]
    assert "NaN" in str(found)
    assert compare(changed, changed)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_planted_bug_is_found_at_its_rank(name: str, traces: dict[str, Trace]) -> None:
    """The message that loses its half is the first receive of keys of rank 1."""
    with planted("lost-half", 1):
        bad = run(REQUESTS[name])
    found = compare(traces[name], bad).first
    assert found is not None
    schedule = traces[name].schedule
    assert schedule is not None
    steps = [n for n, s in enumerate(schedule.forward[1]) if any(m.kind == "kv" for m in s.recvs)]
    assert (found.item.direction, found.item.step, found.item.rank) == ("forward", steps[0], 1)
    assert found.item.kind == "received"
    assert found.item.name in ("k", "v")


@pytest.mark.parametrize(
    ("bug", "direction", "kind"),
    [("shifted-keys", "forward", "tile"), ("unscaled-merge", "forward", "merged"), ("gradient-twice", "backward", "")],
)
def test_other_planted_bugs(bug: str, direction: str, kind: str) -> None:
    request = Request("p2p", 4)
    good = run(request)
    with planted(bug, 1):
        found = compare(good, run(request)).first
    assert found is not None
    assert found.item.direction == direction
    if kind:
        assert (found.item.kind, found.item.rank) == (kind, 1)
    else:  # rank 1 adds twice: the first to see it is the next rank, by rank 1's message
        assert " from 1 tag" in found.item.source


def test_runs_with_different_schedules() -> None:
    request = Request("p2p", 2, seqlens="13,6", heads_q=4, heads_kv=2)
    one = run(request)
    for other in (
        replace(request, cp_size=1),
        replace(request, cp_comm_type="a2a+p2p", cp_size=4),
        replace(request, layout="contiguous"),
    ):
        found = compare(one, run(other))
        assert found, str(found)
        assert "the steps cannot be compared" in str(found)
        assert "the plans differ: " in str(found)
    other = run(replace(request, cp_size=4, seed=1))
    found = compare(one, other)
    assert found.first is not None
    assert str(found.first).startswith("forward, over all ranks: q [0:13]h0:4, as given")
    assert "cp_size is 2 in a, 4 in b" in str(found)
    part = Trace(0, other.problem, other.schedule)
    for item in other.select(rank=1):
        part.add(item)
    assert not compare(one, part)
    assert "left out, as it takes all ranks: the forward pass (b has rank 1 of 4)" in str(compare(one, part))
    assert "different sizes" in str(compare(one, run(replace(request, seqlens="13,5"))))


def test_a_plan_that_lost_a_tile_is_named() -> None:
    request = Request("p2p", 2)
    good = run(request)
    schedule = good.schedule
    assert schedule is not None
    first, second = schedule.forward[1]
    programs = (schedule.forward[0], (first, second._replace(tiles=second.tiles.take(slice(0, -1)))))
    lost: Schedule = replace(schedule, forward=programs)
    bad = Trace(0, good.problem, lost, good.calls)
    said = str(compare(good, bad))
    assert "the schedules part, in forward rank 1 step 1, with 'tile 0 q[4:6] k[0:2]' in a" in said


def test_dtypes_and_tolerances() -> None:
    request = Request("p2p", 2)
    single, double, half = (run(replace(request, dtype=d)) for d in ("float32", "float64", "bfloat16"))
    assert compare(single, double)
    assert compare(half, double)
    assert not compare(half, double, atol=1e-5)
    assert "rtol 1e-05 for float32, atol 0" in str(compare(single, double, atol=0.0))


def test_one_file_a_rank(tmp_path: Path, traces: dict[str, Trace]) -> None:
    t = traces["a2a"]
    for rank in range(4):
        part = Trace(0, t.problem, t.schedule, {rank: 1})
        for item in t.select(rank=rank):
            part.add(item)
        part.save(tmp_path / f"run-{rank}.pt")
    again = Trace.load(tmp_path / "run-*.pt")
    assert str(again) == str(t)
    assert compare(t, again, rtol=0, atol=0)
    only = Trace.load(tmp_path / "run-3.pt")
    assert compare(t, only)
    assert "left out, as only a has it: the backward pass of rank 0 1 2" in str(compare(t, only))
    with pytest.raises(ValueError, match="two of the traces have rank 3"):
        Trace.merge(again, only)
    with pytest.raises(ValueError, match="do not belong together"):
        Trace.merge(again, traces["p2p"])
    with pytest.raises(OSError, match="nothing"):
        Trace.load(tmp_path / "nothing.pt")


def test_a_planted_bug_in_three_commands(tmp_path: Path) -> None:
    """As in the README."""
    good, bad = str(tmp_path / "good.pt"), str(tmp_path / "bad.pt")
    assert runner.invoke(app, ["record", "--save", good]).exit_code == 0
    assert runner.invoke(app, ["record", "--plant", "lost-half", "--save", bad]).exit_code == 0
    result = runner.invoke(app, ["compare", good, bad])
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[:2] == [
        "the runs part here:",
        "forward, step 0, rank 1: k [0:2]h0:1, received by 'recv kv [0:2] from 0 tag 0'",
    ]
    assert runner.invoke(app, ["compare", good, good]).output.startswith("the runs agree in all 414 items")
    assert runner.invoke(app, ["compare", good, good]).exit_code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["record", "--plant", "termites"], "--plant is 'termites'; it must be one of 'lost-half'"),
        (["record", "--plant", "lost-half", "--plant-rank", "4"], "--plant-rank is 4; it must be 0 to 3"),
        (["record", "--plant-rank", "2"], "--plant-rank is 2, but --plant names no bug; leave it out"),
        (["record", "--save", "no/such/folder/t.pt"], "no/such/folder/t.pt"),
        (["compare", "no.pt", "no.pt"], "A is 'no.pt'; it must be a saved trace: No such file"),
        (["compare", __file__, __file__], "holds no trace: it is no file of torch.save with plain values alone"),
        (["explain", "--seqlens", ""], "--seqlens is ''; give it a value, or leave it out"),
        (["explain", "--seqlens="], "--seqlens is ''; give it a value, or leave it out"),
    ],
)
def test_refusals_are_one_line_and_exit_2(options: list[str], words: str) -> None:
    result = runner.invoke(app, options)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


bare = CliRunner()
Content = dict[str, Any]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "good.pt"
    run(Request("p2p", 2)).save(path)
    return path


def changed(name: str, value: Any) -> Callable[[Content], Any]:
    return lambda content: content | {name: value}


def item(**fields: Any) -> Callable[[Content], Any]:
    return lambda content: content | {"items": [content["items"][0] | fields, *content["items"][1:]]}


def header(old: str, new: str, name: str = "problem") -> Callable[[Content], Any]:
    return lambda content: content | {name: content[name].replace(old, new)}


def many_ranks(content: Content) -> Any:
    return header("cp_size 2", "cp_size 100000000", "schedule")(header("cp_size=2", "cp_size=100000000")(content))


SPOILED: list[tuple[Callable[[Content], Any], str]] = [
    (lambda content: [1, 2], "holds no trace"),
    (lambda content: {}, "problem"),
    (changed("call", "0"), "call is '0'; it must be an integer"),
    (changed("calls", {5: 1}), "rank is 5; it must be at most 1"),
    (changed("calls", [1]), "holds no trace"),
    (changed("items", 3), "holds no trace"),
    (many_ranks, "cp_size is 100000000; it must be at most 4096"),
    (header("cp_size 2", "cp_size 100000000", "schedule"), "cp_size is 100000000; a schedule has at most 4096 ranks"),
    (header("cp_size=2", "cp_size=4"), "rank schedules for 2 forward and 2 backward ranks, but cp_size is 4"),
    (header("cp_size=2", "cp_size='2'"), "cp_size is '2'; it must be an integer"),
    (header("[(8, 8, 8, 8)]", "[(8.5, 8, 8, 8)]"), "a length is 8.5; it must be an integer"),
    (header("[(8, 8, 8, 8)]", "[(10**30, 8, 8, 8)]"), "holds no trace"),
    (header("[(8, 8, 8, 8)]", f"[({10**30}, 8, {10**30}, 8)]"), "a length is 1000000000000000000000000000000"),
    (header("heads_q=2", "heads_q=0"), "heads_q is 0; it must be at least 1"),
    (header("heads_q=2", "heads_q=2, dtype='termites'"), "termites"),
    (header("q[0:2]", "q[0:900]", "schedule"), "tile 0 q[0:900]"),
    (item(step="0"), "item 0 has no meaning: step is '0'; it must be an integer"),
    (item(step=99), "step is 99; it must be at most 2"),
    (item(rank=2), "rank is 2; it must be at most 1"),
    (item(kind="stolen"), "it is 'forward' 'stolen'"),
    (item(direction=["forward"]), "item 0 has no meaning"),
    (item(name="x"), "item 0 has no meaning: 'x'"),
    (item(name=[]), "item 0 has no meaning"),
    (item(piece=(0, 2)), "item 0 has no meaning"),
    (item(piece=(0, 900, 0, 1)), "the end of its rows is 900; it must be at most 8"),
    (item(tensor=[1.0]), "its tensor is list"),
    (item(tensor=torch.ones(3)), "has shape [3]; it must have [2, 2, 8]"),
    (item(tensor=torch.ones(1).expand(2, 2, 8)), "in their order"),
    (item(tensor=torch.ones(2, 2, 8).int()), "of floating-point numbers"),
    (item(more=1), "its fields are"),
]


def refused(good: Path, path: Path) -> str:
    """The line that `compare` prints about a file. It does not read what never ends."""
    began = time.monotonic()
    result = bare.invoke(app, ["compare", str(good), str(path)])
    took = time.monotonic() - began
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    assert took < 30
    return result.stderr


@pytest.mark.parametrize(("spoil", "words"), SPOILED)
@pytest.mark.one_in(2)
def test_traces_that_do_not_fit_together(
    good: Path, tmp_path: Path, spoil: Callable[[Content], Any], words: str
) -> None:
    content = torch.load(good, weights_only=True)
    torch.save(spoil(content), tmp_path / "spoiled.pt")
    said = refused(good, tmp_path / "spoiled.pt")
    assert f"{tmp_path / 'spoiled.pt'} holds no trace: " in said
    assert words in said


def test_what_is_no_plain_file(good: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "fifo is no plain file; a trace is saved in one" in refused(good, tmp_path / "fifo")
    assert "is no plain file" in refused(good, tmp_path)
    assert "/dev/zero is no plain file" in refused(good, Path("/dev/zero"))
    half = good.read_bytes()[: good.stat().st_size // 2]
    for name, content in {"half.pt": half, "empty": b"", "a.json": b'{"a": 1}', "a.md": b"# Design\n"}.items():
        (tmp_path / name).write_bytes(content)
        said = refused(good, tmp_path / name)
        assert f"B is '{tmp_path / name}'; it must be a saved trace: " in said
        assert "it is no file of torch.save with plain values alone, or it is cut off" in said
    assert "B is 'no.pt'; it must be a saved trace: No such file" in refused(good, Path("no.pt"))
    Trace().save(tmp_path / "none.pt")
    assert "none.pt holds no trace: no attention call was recorded in it" in refused(good, tmp_path / "none.pt")


def test_what_is_saved_is_read(good: Path, tmp_path: Path) -> None:
    for number, request in enumerate(
        (Request("a2a+p2p", 4), Request("all_gather", 2, seqlens="5,3", dtype="bfloat16"))
    ):
        trace = run(request)
        trace.save(tmp_path / f"{number}.pt")
        assert str(Trace.load(tmp_path / f"{number}.pt")) == str(trace)
