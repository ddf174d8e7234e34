"""Plans that are updated in place: what a fresh plan gives, from the same memory; or a refusal that changes nothing."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import cp_fast
import cp_ref
from cp_fast.compile.pipeline import lowered
from cp_fast.compile.program import Accumulate, Launch, Recv
from cp_fast.kernels.attention.backend_protocol import Backend
from cp_fast.kernels.attention.choose_backend import by_name
from cp_ref import SimGroup
from cp_ref.problems.call_checks import local_lengths
from cp_ref.reference.simulator import SimMember
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.words import Feature
from tests.marks import examples

COMMS = ("p2p", "all_gather", "a2a", "a2a+p2p")
DIMS: dict[str, Any] = {"heads_q": 4, "heads_kv": 2, "d_qk": 8, "d_v": 4, "dtype": torch.float64, "device": "cpu"}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Lengths:
    """One batch: real tokens and slots of every sequence."""

    len_q: list[int]
    len_kv: list[int]
    slots_q: list[int]
    slots_kv: list[int]

    def arguments(self) -> dict[str, torch.Tensor]:
        names = {"cu_seqlens_q": self.len_q, "cu_seqlens_kv": self.len_kv}
        names |= {"cu_seqlens_q_padded": self.slots_q, "cu_seqlens_kv_padded": self.slots_kv}
        return {name: cumulative(lengths) for name, lengths in names.items()}


@dataclass(frozen=True)
class Case:
    """Two batches of one problem, and how it is computed."""

    cp_size: int
    comm: Any
    layout: Any
    problem: dict[str, Any]
    room: dict[str, Any]
    first: Lengths
    second: Lengths
    alibi: bool = False

    def context(self, member: SimMember) -> cp_fast.ContextParallel:
        split = member.split(2) if self.comm == "a2a+p2p" else member
        return cp_fast.ContextParallel(split, self.comm, layout=self.layout)

    def plan(self, cp: cp_fast.ContextParallel, batch: Lengths, **room: Any) -> cp_fast.Plan:
        how = {"return_max_logit": True, **self.problem, **batch.arguments(), **DIMS, **room}
        return cp_fast.make_plan(cp=cp, qkv_format="thd", **how)


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def batch_of(lengths: list[tuple[int, int]], extra: list[int], unit: int) -> Lengths:
    """Slots are the next multiple of `unit`, and some more."""
    q, kv = [a for a, _ in lengths], [b for _, b in lengths]
    slots = [[-(-n // unit) * unit + unit * more for n, more in zip(side, extra, strict=True)] for side in (q, kv)]
    return Lengths(q, kv, *slots)


@st.composite
def batches(draw: st.DrawFn, unit: int, cross: bool) -> Lengths:
    count = draw(st.integers(0, 4))
    q = draw(st.lists(st.integers(0, 14), min_size=count, max_size=count))
    kv = draw(st.lists(st.integers(0, 14), min_size=count, max_size=count)) if cross else q
    extra = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    return batch_of(list(zip(q, kv, strict=True)), extra, unit)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    comm = draw(st.sampled_from(COMMS))
    cp_size = draw(st.sampled_from((1, 2, 4) if comm == "a2a" else (2, 4) if comm == "a2a+p2p" else (1, 2, 3, 4)))
    cross = draw(st.booleans())
    mask = draw(st.sampled_from(("no_mask", "causal", "causal", "causal_bottom_right")))
    sides = st.integers(-1, 6)
    problem = {
        "attn_mask_type": mask,
        "window_size": draw(st.one_of(st.just((-1, -1)), st.tuples(sides, sides), st.just((1, 1)))),
        "softmax_type": draw(st.sampled_from(("vanilla", "off-by-one", "learnable"))),
    }
    problem |= draw(st.sampled_from(({}, {}, {"score_mod": of_places}, {"score_mod": of_places, "dropout_p": 0.3})))
    one, other = (draw(batches(2 * cp_size, cross)) for _ in range(2))
    most_q, most_kv = (max(sum(getattr(x, side)) for x in (one, other)) for side in ("slots_q", "slots_kv"))
    most_q, most_kv = max(most_q, 2 * cp_size), max(most_kv, 2 * cp_size)
    tail = cp_size * draw(st.integers(0, 2))
    room = {
        "max_sequences": max(len(one.len_q), len(other.len_q), 1) + draw(st.integers(0, 2)),
        "max_tokens_q": most_q + tail,
        "max_tokens_kv": most_kv + tail,
    }
    if draw(st.booleans()):  # a batch that needs most messages and launches
        one = Lengths([most_q], [most_kv], [most_q], [most_kv])
    layout = draw(st.sampled_from(("dual_chunk", "contiguous")))
    return Case(cp_size, comm, layout, problem, room, one, other, draw(st.booleans()))


def of_places(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A score_mod that reads every place."""
    return score - 0.01 * (h + 1) * score**2 + 0.02 * (b + 1) * (q_idx - 2 * kv_idx)


def tensors(case: Case, problem: Problem, rank: int) -> Tensors:
    """A rank's operands and gradients: NaN wherever there is no real token."""
    generator = torch.Generator().manual_seed(rank)
    made: Tensors = {}
    for side, names in (("q", ("q", "dout", "dlse")), ("kv", ("k", "v"))):
        rows = case.room[f"max_tokens_{side}"] // case.cp_size
        real = torch.zeros(rows, dtype=torch.bool)
        for _, start, stop, row in problem.workload.ownership.side(side).of(rank).rows():
            real[row : row + stop - start] = True
        for name in names:
            heads, dims = (2 if side == "kv" else 4), (4 if name in ("dout", "v") else 8)
            shape = (rows, heads) if name == "dlse" else (rows, heads, dims)
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            made[name] = torch.where(real.view(-1, *[1] * (x.ndim - 1)), x, torch.nan)
    made["dlse"] = made["dlse"].t().contiguous()
    made["offset"] = torch.linspace(-1, 1, 4, dtype=torch.float64)
    return made


def results(case: Case, cp: cp_fast.ContextParallel, plan: cp_fast.Plan) -> list[torch.Tensor]:
    """out, lse, max_logit and all gradients of one rank."""
    given = tensors(case, plan.problem, cp.rank)
    leaves = [given[name].requires_grad_() for name in ("q", "k", "v")]
    sink: dict[str, torch.Tensor] = {}
    if plan.problem.softmax_type == "learnable":
        sink = {"softmax_offset": given["offset"].requires_grad_()}
    places: dict[str, Any] = {"alibi_slopes": torch.linspace(0.1, 0.9, 4)} if case.alibi else {}
    places |= {"dropout_seed": 5} if plan.problem.dropout_p else {}
    flags = {"return_lse": True, "return_max_logit": True}
    out, lse, max_logit = cp_fast.attention(*leaves, cp=cp, plan=plan, **flags, **sink, **places)
    grads = torch.autograd.grad([out, lse], leaves + list(sink.values()), [given["dout"], given["dlse"]])
    return [out.detach(), lse.detach(), max_logit, *grads]


def launches(plan: cp_fast.Plan) -> list[Launch[Any]]:
    return [*plan.programs.forward.of(Launch), *plan.programs.backward.of(Launch)]


def assert_same_bits(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert not one.isnan().any()
        assert torch.equal(one, other)


def walked(thing: Any) -> Iterator[tuple[int, torch.Size, torch.dtype]]:
    """Address, shape and dtype of every tensor of a program."""
    if isinstance(thing, torch.Tensor):
        yield thing.data_ptr(), thing.shape, thing.dtype
    elif is_dataclass(thing):
        for f in fields(thing):
            yield from walked(getattr(thing, f.name))
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from walked(part)


def assert_padding_is_harmless(plan: cp_fast.Plan) -> None:
    """What pads the rows of a launch that are read is one of them; of rows that are added to, the spare one; lengths
    end in empty segments.
    """
    backward = plan.programs.backward
    for launch in backward.of(Launch):
        q, kv = launch.operands[:2]
        sides = (
            (launch.batch.device_cu_q, q.rows, launch.results[0]),
            (launch.batch.device_cu_kv, kv.rows, launch.results[1]),
        )
        for cu, read, partial in sides:
            assert bool((cu.diff() >= 0).all())
            count = int(cu[-1])
            assert isinstance(read, torch.Tensor)
            assert set(read[count:].tolist()) <= (set(read[:count].tolist()) if count else {0})
            for one in (one for one in backward.of(Accumulate) if one.source.buffer == partial):
                spec, into = backward.buffers[one.target.buffer], one.target.rows
                assert plan.room is not None
                own = plan.room.rows_kv if spec.kind == "dkv" else plan.room.rows_q
                size = own if spec.rows is None else spec.rows
                assert isinstance(into, torch.Tensor)
                added = into[into != size]
                assert len(added.unique()) == len(added)
                assert not added.numel() or (int(added.max()) < size and bool((into[len(added) :] == size).all()))


@settings(max_examples=examples(int(os.environ.get("CP_UPDATES", "60"))))
@given(case=cases())
def test_an_updated_plan_is_a_fresh_plan(case: Case) -> None:
    def one(member: SimMember) -> str:
        cp = case.context(member)
        plan = case.plan(cp, case.first, **case.room)
        before, memory, ids = results(case, cp, plan), list(walked(plan.programs)), plan.position_ids.data_ptr()
        assert len(memory) >= 2
        tables = [*walked([plan.batch.positions.of(one) for one in launches(plan)])]
        try:
            plan.update(cp=cp, **case.second.arguments())
        except ValueError as error:
            assert_same_bits(results(case, cp, plan), before)
            return f"refused: {str(error).split(' (')[0]}"
        assert list(walked(plan.programs)) == memory
        assert [*walked([plan.batch.positions.of(one) for one in launches(plan)])] == tables
        assert plan.position_ids.data_ptr() == ids
        assert_padding_is_harmless(plan)
        got, fresh = results(case, cp, plan), case.plan(cp, case.second, **case.room)
        assert_same_bits(got, results(case, cp, fresh))
        assert (plan.problem, str(plan.schedule)) == (fresh.problem, str(fresh.schedule))
        assert str(plan) == str(fresh)
        plain = case.plan(cp, case.second)
        rows = {"q": fresh.room.rows_q, "kv": fresh.room.rows_kv} if fresh.room is not None else {}
        if not any(local_lengths(plain.problem, side, count) for side, count in rows.items()):  # refused without room
            for x, y in zip(got, results(case, cp, plain), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        assert torch.equal(plan.position_ids, fresh.position_ids)
        assert torch.equal(plan.position_ids[: len(plain.position_ids)], plain.position_ids)
        plan.update(cp=cp, **case.first.arguments())
        assert_same_bits(results(case, cp, plan), before)
        return "updated"

    outcomes = SimGroup(case.cp_size).run(one)
    event(next((x[:60] for x in outcomes if x != "updated"), "updated"))
    assert len({outcome == "updated" for outcome in outcomes}) == 1


LONG = Lengths([64], [64], [64], [64])
MANY = batch_of([(n, n) for n in (5, 0, 17, 1)], [0, 1, 0, 0], 8)
ROOM: dict[str, Any] = {"max_sequences": 5, "max_tokens_q": 72, "max_tokens_kv": 72}


def typical(comm: str = "p2p", first: Lengths = LONG, **problem: Any) -> Case:
    return Case(4, comm, "dual_chunk", problem, ROOM, first, MANY)


@pytest.mark.parametrize("mask", [pytest.param("no_mask", marks=pytest.mark.thorough), "causal"])
@pytest.mark.parametrize("comm", COMMS)
def test_a_plan_of_one_long_sequence_takes_any_documents(comm: str, mask: str) -> None:
    def one(member: SimMember) -> None:
        case = typical(comm, attn_mask_type=mask, softmax_type="learnable")
        cp = case.context(member)
        plan = case.plan(cp, case.first, **case.room)
        for batch in (MANY, LONG, Lengths([], [], [], []), MANY):
            plan.update(cp=cp, **batch.arguments())
            assert_same_bits(results(case, cp, plan), results(case, cp, case.plan(cp, batch, **case.room)))

    SimGroup(4).run(one)


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a+p2p"])
def test_messages_have_the_size_of_a_window(comm: str) -> None:
    """Not of all keys, where queries and keys have equal lengths; another batch that needs more is refused."""
    room = {"max_sequences": 2, "max_tokens_q": 256, "max_tokens_kv": 256}
    two, cross = (batch_of(x, [0, 0], 8) for x in ([(160, 160), (90, 90)], [(200, 104), (8, 8)]))

    def one(member: SimMember) -> None:
        problem = {"attn_mask_type": "no_mask", "window_size": (2, 1)}
        case = Case(4, comm, "dual_chunk", problem, room, Lengths([256], [256], [256], [256]), two)
        cp = case.context(member)
        plan = case.plan(cp, case.first, **room)
        sizes = {recv.size for recv in plan.programs.backward.of(Recv)}
        assert sizes - ({256 // 4} if comm == "a2a+p2p" else set()) == {2 * 2 * 3}  # inside a group: all rows of a rank
        plan.update(cp=cp, **two.arguments())
        got = results(case, cp, plan)
        assert_same_bits(got, results(case, cp, case.plan(cp, two, **room)))
        with pytest.raises(ValueError, match=r"a message of \d+ rows, .* room for 12|does not have|refused"):
            plan.update(cp=cp, **cross.arguments())
        assert_same_bits(results(case, cp, plan), got)

    SimGroup(4).run(one)


def test_an_update_is_one_copy() -> None:
    class Counted(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.operators: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func.is_view:
                self.operators.append(func.name())
            return func(*args, **(kwargs or {}))

    def one(member: SimMember) -> list[str]:
        case = typical()
        cp = case.context(member)
        plan = case.plan(cp, LONG, **ROOM)
        fixed = plan.batch.fixed
        assert fixed is not None
        many = case.plan(cp, MANY).batch
        fitted = fixed.fitted(lowered(many.packing, cp.rank, many.steps, many.schedule.saved), many.problem)
        with Counted() as counted:
            fixed.overwrite(fitted)
        return counted.operators

    assert SimGroup(4).run(one) == [["aten::copy_"]] * 4


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sequences": ({"cu_seqlens_q": cumulative([8] * 6)}, "6 sequences in cu_seqlens_q, .* max_sequences = 5"),
    "tokens": ({"cu_seqlens_q": cumulative([80])}, "80 tokens in cu_seqlens_q_padded, .* max_tokens_q = 72"),
    "keys": (
        {"cu_seqlens_q": cumulative([8]), "cu_seqlens_kv": cumulative([80])},
        "80 tokens in cu_seqlens_kv_padded, .* max_tokens_kv = 72",
    ),
    "decreasing": ({"cu_seqlens_q": torch.tensor([0, 8, 4])}, "must not decrease"),
    "no tensor": ({"cu_seqlens_q": [0, 8]}, "TypeError: cu_seqlens_q is of type list"),
    "window": (MANY.arguments() | {"cu_seqlens_q": cumulative([8, 0, 8, 8])}, "window|message"),
}


@pytest.mark.parametrize("alone", [False, True], ids=["on all ranks", "on one rank"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_named_and_changes_nothing(name: str, alone: bool) -> None:
    arguments, words = REFUSED[name]

    def one(member: SimMember) -> str:
        case = typical(first=MANY, window_size=(3, 0) if name == "window" else (-1, -1))
        cp = case.context(member)
        plan = case.plan(cp, MANY, **ROOM)
        before, memory, problem = results(case, cp, plan), list(walked(plan.programs)), plan.problem
        with pytest.raises((ValueError, TypeError)) as caught:
            plan.update(cp=cp, **(arguments if member.rank == 2 or not alone else MANY.arguments()))
        assert plan.problem is problem
        assert list(walked(plan.programs)) == memory
        assert_same_bits(results(case, cp, plan), before)
        return told(caught.value)

    said = SimGroup(4).run(one)
    assert re.search(words, said[2])
    for rank in (0, 1, 3) if alone else ():
        assert re.search(words if name == "no tensor" else "rank 2 refused|different problems", said[rank])


def test_ranks_that_update_differently_find_out() -> None:
    def one(member: SimMember) -> str:
        case = typical()
        cp = case.context(member)
        plan = case.plan(cp, LONG, **ROOM)
        before = results(case, cp, plan)
        with pytest.raises(ValueError, match="different problems") as caught:
            plan.update(cp=cp, **(LONG if member.rank else MANY).arguments())
        assert_same_bits(results(case, cp, plan), before)
        return told(caught.value)

    assert all("sequences" in words for words in SimGroup(4).run(one))


def test_ranks_with_different_room_find_out() -> None:
    def one(member: SimMember) -> str:
        case = typical()
        with pytest.raises(ValueError, match="different problems") as caught:
            case.plan(case.context(member), LONG, **(ROOM | {"max_tokens_q": 64 + 8 * member.rank}))
        return told(caught.value)

    assert "max_tokens_q=64 where rank 1 has max_tokens_q=72" in SimGroup(2).run(one)[0]


@pytest.mark.parametrize("package", [cp_fast, cp_ref], ids=["cp_fast", "cp_ref"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_tokens_q": 64}, "max_tokens_q is 64, but max_sequences is None"),
        ({"max_sequences": 0}, "max_sequences is 0; it must be at least 1"),
        ({"max_sequences": 2.0}, "max_sequences is 2.0; it must be an integer"),
        ({"max_sequences": True}, "max_sequences is True; it must be an integer"),
        ({"max_sequences": 3}, "4 sequences .* max_sequences = 3"),
        ({"max_sequences": 4, "max_tokens_q": 8}, "48 tokens .* max_tokens_q = 8"),
        ({"max_sequences": 4, "max_tokens_kv": 65}, "max_tokens_kv is 65; it must be a multiple of cp_size = 4"),
        ({"max_sequences": 4, "qkv_format": "bshd", "batch_size": 4, "seqlen_q": 8}, "it needs 'thd'"),
    ],
)
def test_room_that_makes_no_sense_is_refused(package: Any, arguments: dict[str, Any], words: str) -> None:
    lengths = {} if "qkv_format" in arguments else MANY.arguments()

    def one(member: SimMember) -> None:
        with pytest.raises((ValueError, TypeError), match=words):
            package.make_plan(
                cp=package.ContextParallel(member), **{"qkv_format": "thd", **arguments}, **lengths, **DIMS
            )

    SimGroup(4).run(one)


@pytest.mark.parametrize("package", [cp_fast, cp_ref], ids=["cp_fast", "cp_ref"])
def test_buffers_have_the_size_of_the_plan(package: Any) -> None:
    def one(member: SimMember) -> None:
        cp = package.ContextParallel(member)
        plan = package.make_plan(cp=cp, qkv_format="thd", **MANY.arguments(), **DIMS, **ROOM)
        given = tensors(typical(), plan.problem, member.rank)
        q, k, v = (given[name][:-1] for name in ("q", "k", "v"))
        with pytest.raises(ValueError, match="q has 17 tokens, but the plan was made with max_tokens_q = 18"):
            package.attention(q, k, v, cp=cp, plan=plan)

    SimGroup(4).run(one)


def test_a_compiled_layer_follows_the_plan() -> None:
    def layer(q: torch.Tensor, given: Tensors, cp: cp_fast.ContextParallel, plan: cp_fast.Plan) -> torch.Tensor:
        return cp_fast.attention(q * 2, given["k"], given["v"], cp=cp, plan=plan) + 1

    def one(member: SimMember) -> None:
        case = Case(1, "p2p", "dual_chunk", {}, ROOM, LONG, MANY)
        cp = case.context(member)
        plan = case.plan(cp, LONG, **ROOM)
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(layer, fullgraph=True, backend=counter)
        for batch in (LONG, MANY):
            plan.update(cp=cp, **batch.arguments())
            given = tensors(case, plan.problem, 0)
            q = given["q"].requires_grad_()
            out, expected = (f(q, given, cp, plan) for f in (compiled, layer))
            assert torch.equal(out.nan_to_num(7), expected.nan_to_num(7))
            grads = [torch.autograd.grad(x, q, given["dout"])[0] for x in (out, expected)]
            assert torch.equal(*grads)
        assert counter.frame_count == 1
        late = compiled(q, given, cp, plan)
        plan.update(cp=cp, **LONG.arguments())
        with pytest.raises(RuntimeError, match="updated since"):
            torch.autograd.grad(late, q, given["dout"])

    SimGroup(1).run(one)


@pytest.mark.parametrize("room", [{}, ROOM], ids=["fixed", "updated"])
def test_a_compiled_layer_may_be_the_first_to_ask_for_positions(room: dict[str, Any]) -> None:
    def one(member: SimMember) -> None:
        case = Case(1, "p2p", "dual_chunk", {}, ROOM, LONG, MANY)
        plan = case.plan(case.context(member), LONG, **room)
        compiled = torch.compile(lambda x, plan: x + plan.position_ids, fullgraph=True, backend="eager")
        for batch in (LONG, MANY):
            if room:
                plan.update(cp=case.context(member), **batch.arguments())
            found = compiled(torch.zeros(()), plan)
            assert torch.equal(found, plan.position_ids.float())

    SimGroup(1).run(one)


def test_plans_without_room_are_not_updated() -> None:
    def one(member: SimMember) -> None:
        case = typical()
        cp = case.context(member)
        with pytest.raises(ValueError, match="make it with max_sequences"):
            case.plan(cp, LONG).update(cp=cp, **MANY.arguments())

    SimGroup(2).run(one)


def test_a_library_is_asked_whether_it_serves_such_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[frozenset[Feature]] = []

    def choose(required: frozenset[Feature], backend: str) -> Backend:
        asked.append(required)
        return by_name("cpu")

    monkeypatch.setattr("cp_fast.api.plan.choose", choose)

    def one(member: SimMember) -> None:
        case = typical()
        for room in ROOM, {}:
            case.plan(case.context(member), LONG, **room)

    SimGroup(1).run(one)
    assert [Feature.IN_PLACE in required for required in asked] == [True, False]


def test_the_reference_updates_too() -> None:
    assert str(inspect.signature(cp_ref.Plan.update)).replace("cp_ref", "cp_fast") == str(
        inspect.signature(cp_fast.Plan.update)
    )

    def one(member: SimMember) -> None:
        cp, case = cp_ref.ContextParallel(member), typical()
        plan, fresh = (
            cp_ref.make_plan(cp=cp, qkv_format="thd", **batch.arguments(), **DIMS, **ROOM) for batch in (LONG, MANY)
        )
        assert str(plan) != str(fresh)
        plan.update(cp=cp, **MANY.arguments())
        assert str(plan) == str(fresh)
        assert torch.equal(plan.position_ids, fresh.position_ids)
        fast = case.plan(case.context(member), MANY, **ROOM)
        assert torch.equal(plan.position_ids, fast.position_ids)

    SimGroup(4).run(one)
