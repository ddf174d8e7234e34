"""Calls without a plan: from a batch's second layer on they find its plan, send nothing, and compute the same."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cp_fast
from cp_fast.api import calls as unplanned
from cp_fast.api import fast_context
from cp_fast.integrations import flash_attn
from cp_ref import SimGroup, dense_attention
from cp_ref.reference.simulator import SimMember
from tests.cp_fast.memory.one_rank import call_of

CU = torch.tensor([0, 8, 24, 48], dtype=torch.int32)
THD: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": CU}


class Counts:
    """A member that counts the agreements it takes part in."""

    def __init__(self, member: SimMember) -> None:
        self.rank, self.size, self.exchange = member.rank, member.size, member.exchange
        self._member, self.agreements = member, 0

    def all_gather_object(self, value: Any) -> list[Any]:
        self.agreements += 1
        return self._member.all_gather_object(value)


def draw(cp: cp_fast.ContextParallel, heads: int = 2, dtype: torch.dtype = torch.float32, rows: int = 48) -> Any:
    x = torch.randn(rows, heads, 8, generator=torch.Generator().manual_seed(rows), dtype=torch.float64).to(dtype)
    return cp_fast.shard(x, cp=cp, qkv_format="thd", cu_seqlens_padded=torch.tensor([0, rows]))


def agreements_of(change: Any) -> list[list[int]]:
    """Agreements, by rank: of a first call, of the same again, of one that `change` makes another, and of that again.
    change: (the call's arguments, its tensor) -> another tensor, or None.
    """

    def one(member: SimMember) -> list[int]:
        counts = Counts(member)
        cp = cp_fast.ContextParallel(counts)
        call, x, found = {**THD, "cu_seqlens_q": CU.clone()}, draw(cp), []
        for number in range(4):
            if number == 2:
                x = y if (y := change(call, x)) is not None else x
            before = counts.agreements
            out = cp_fast.attention(x, x, x, cp=cp, **call)
            found.append(counts.agreements - before)
            sizes = {"heads_q": x.shape[-2], "heads_kv": x.shape[-2], "d_qk": x.shape[-1], "d_v": x.shape[-1]}
            how = {name: value for name, value in call.items() if name not in ("return_lse", "softmax_offset")}
            plan = cp_fast.make_plan(cp=cp, **how, **sizes, dtype=x.dtype, device="cpu")
            how = {name: value for name, value in call.items() if name in ("return_lse", "softmax_offset")}
            want = cp_fast.attention(x, x, x, cp=cp, plan=plan, **how)
            assert all(map(torch.equal, *(r if isinstance(r, tuple) else (r,) for r in (out, want))))
        return found

    return SimGroup(2).run(one)


def in_place(call: Any, x: Any) -> None:
    call["cu_seqlens_q"][1] = 16


def behind_the_version_counter(call: Any, x: Any) -> None:
    call["cu_seqlens_q"].numpy()[1] = 16


CHANGES = {
    "a length, in place": in_place,
    "a length, unknown to PyTorch": behind_the_version_counter,
    "heads": lambda call, x: x.repeat(1, 2, 1),
    "dtype": lambda call, x: x.double(),
    "gradients": lambda call, x: x.clone().requires_grad_(),
    "padding": lambda call, x: call.update(cu_seqlens_q_padded=CU, cu_seqlens_q=CU - torch.tensor([0, 1, 1, 2])),
    "window": lambda call, x: call.update(window_size=(3, 0)),
    "sink": lambda call, x: call.update(softmax_type="learnable", softmax_offset=torch.ones(2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_and_agreed_on_once(change: str) -> None:
    assert agreements_of(CHANGES[change]) == [[1, 0, 1, 0]] * 2


ALIKE = {
    "nothing": lambda call, x: None,
    "a copy of the lengths": lambda call, x: call.update(cu_seqlens_q=CU.clone()),
    "other integers": lambda call, x: call.update(cu_seqlens_q=CU.long()),
    "the same keys": lambda call, x: call.update(cu_seqlens_kv=CU, window_size=[-1, -1]),
    "a tail": lambda call, x: torch.cat([x, x[:3]]),
    "a flag of this rank": lambda call, x: call.update(deterministic=True),
    "another kind of tensor": lambda call, x: x.as_subclass(type("Mine", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("change", ALIKE)
@pytest.mark.parametrize("rank", [0, None])
def test_one_problem_is_agreed_on_once_however_each_rank_writes_it(change: str, rank: int | None) -> None:
    """rank: whose call changes, if not all do: what one finds and another does not is no message."""

    def one(member: SimMember) -> int:
        counts = Counts(member)
        cp = cp_fast.ContextParallel(counts)
        call, x = dict(THD), draw(cp)
        for _ in range(2):
            cp_fast.attention(x, x, x, cp=cp, **call)
        if rank in (None, member.rank):
            x = y if (y := ALIKE[change](call, x)) is not None else x
            cp = cp_fast.ContextParallel(counts)
        for _ in range(2):
            cp_fast.attention(x, x, x, cp=cp, **call)
        return counts.agreements

    assert SimGroup(2).run(one) == [1, 1]


def test_random_calls_are_those_with_a_plan() -> None:
    """Many calls of more problems than are kept: each rank agrees as often, and the results are equal."""
    choice = random.Random(5)
    problems = [
        {"cu": [0, *sorted(choice.sample(range(8, 48, 8), 2)), 48], "heads": heads, "causal": causal, "comm": comm}
        for heads in (2, 4)
        for causal in (True, False)
        for comm in ("p2p", "a2a", "all_gather")
        for _ in range(2)
    ]
    assert len(problems) > fast_context.Agreements.SIZE
    order = [choice.choice(problems) for _ in range(40)]

    def one(member: SimMember) -> int:
        counts = Counts(member)
        made = 0
        for problem in order:
            cp = cp_fast.ContextParallel(counts, problem["comm"])
            x = draw(cp, problem["heads"]).requires_grad_()
            call = {"qkv_format": "thd", "cu_seqlens_q": torch.tensor(problem["cu"])}
            call["attn_mask_type"] = "causal" if problem["causal"] else "no_mask"
            sizes = {"heads_q": x.shape[1], "heads_kv": x.shape[1], "d_qk": 8, "d_v": 8}
            plan = cp_fast.make_plan(cp=cp, **call, **sizes, dtype=x.dtype, device="cpu")
            results: list[Any] = []
            hows: list[dict[str, Any]] = [call, {"plan": plan}]
            for how in hows:
                out = cp_fast.attention(x, x, x, cp=cp, **how)
                results.append((out, *torch.autograd.grad(out.sum(), x)))
            assert all(map(torch.equal, *results))
            made += 1
        return counts.agreements - made

    first, second = SimGroup(2).run(one)
    assert first == second
    assert len({str(problem) for problem in order}) <= first < len(order)


def test_the_oldest_agreement_is_forgotten_first() -> None:
    def one(member: SimMember) -> list[int]:
        counts = Counts(member)
        cp = cp_fast.ContextParallel(counts)
        x, found = draw(cp), []

        def call(window: int) -> None:
            before = counts.agreements
            cp_fast.attention(x, x, x, cp=cp, **THD, window_size=(window, 0))
            found.append(counts.agreements - before)

        for window in range(fast_context.Agreements.SIZE):
            call(window)
        call(0)  # is there, and stays the oldest
        call(fast_context.Agreements.SIZE)
        call(1)
        call(0)
        return found[fast_context.Agreements.SIZE :]

    assert SimGroup(2).run(one) == [[0, 1, 0, 1]] * 2


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"window_size": (4.0, 0)}, "window_size is"),
        ({"softcap": False}, "softcap is False"),
        ({"deterministic": 0}, "deterministic is 0"),
        ({"plan": 3}, "plan is of type int"),
        ({"cu_seqlens_q": CU.float()}, "cu_seqlens_q has dtype"),
        ({"cu_seqlens_q": CU[None]}, "cu_seqlens_q has shape"),
        ({"softmax_offset": torch.ones(2)}, "softmax_offset is given"),
    ],
)
def test_what_equals_a_kept_call_only_by_chance_is_refused(wrong: dict[str, Any], error: str) -> None:
    def one(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member)
        x = draw(cp)
        call = {**THD, "window_size": (4, 0)}
        cp_fast.attention(x, x, x, cp=cp, **call)
        with pytest.raises((TypeError, ValueError), match=error):
            cp_fast.attention(x, x, x, cp=cp, **{**call, **wrong})

    SimGroup(2).run(one)


def test_a_rank_that_refuses_what_the_others_find_says_why() -> None:
    """The others wait for its tensors, as in a call with a plan; under `checked` they are told."""
    said: dict[int, BaseException] = {}

    def one(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member)
        x = draw(cp)
        cp_fast.attention(x, x, x, cp=cp, **THD)
        v = x[..., :4].repeat(1, 2, 1) if member.rank else x
        with cp_fast.checked(), pytest.raises(ValueError, match="all but the last size must be equal"):
            cp_fast.attention(x, x, v, cp=cp, **THD)
        try:
            cp_fast.attention(x, x, v, cp=cp, **THD)
        except Exception as error:
            said[member.rank] = error
            raise

    with pytest.raises(ValueError, match="all but the last size"):
        SimGroup(2).run(one)
    assert isinstance(said[1], ValueError)
    assert "all but the last size must be equal" in str(said[1])
    assert "The other ranks could not be told" in "".join(said[1].__notes__)
    assert "rank 0" in str(said[0])


def test_checkpointed_layers_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients it is another agreement, but the same plan."""
    plans: list[Any] = []
    made = cp_fast.api.plan.plan_of_rank  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(unplanned, "plan_of_rank", lambda *given, **how: plans.append(made(*given, **how)) or plans[-1])

    def one(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member)
        x = draw(cp).requires_grad_()
        for _ in range(2):
            out: Any = checkpoint(lambda y: cp_fast.attention(y, y, y, cp=cp, **THD), x, use_reentrant=True)
            out.sum().backward()

    SimGroup(2).run(one)
    assert len(plans) == 2


def test_a_group_is_not_kept_alive() -> None:
    gone: list[weakref.ref[Any]] = []

    def one(member: SimMember) -> None:
        cp = cp_fast.ContextParallel(member)
        x = draw(cp)
        cp_fast.attention(x, x, x, cp=cp, **THD)
        gone.extend([weakref.ref(member), weakref.ref(cp.agreements)])

    SimGroup(2).run(one)
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_threads_share_a_cache() -> None:
    """Many more agreements than are kept, noted, kept and looked for by eight threads at once."""
    cache: Any = fast_context.Agreements()
    wrong: list[Any] = []

    def work(seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(4000):
            number = choice.randrange(3 * fast_context.Agreements.SIZE)
            signature = fast_context.Signature((number,), 0, ())
            if (found := cache.plan_of(signature)) is None:
                cache.keep(bytes([number]), signature, number)
            elif found != number:
                wrong.append((number, found))
            if len(cache.items()) > fast_context.Agreements.SIZE:
                wrong.append(len(cache.items()))

    in_threads(work)
    assert wrong == []


def test_threads_call_functions_of_other_names() -> None:
    """Each in a group of its own, with lengths that change in place behind PyTorch's back, as NumPy changes them."""
    wrong: list[Any] = []
    function: Any = flash_attn.flash_attn_varlen_func

    def calls(member: SimMember, seed: int) -> None:
        x = torch.randn(48, 2, 8, generator=torch.Generator().manual_seed(seed))
        cp, cu, choice = cp_fast.ContextParallel(member), CU.clone(), random.Random(seed)
        for _ in range(30):
            cu.numpy()[1] = choice.randrange(25)
            out = function(x, x, x, cu, cu, 48, 48, causal=True, cp=cp)
            want = dense_attention(x, x, x, qkv_format="thd", cu_seqlens_q=cu)[0]
            if not torch.allclose(out, want.to(out.dtype), atol=1e-5):
                wrong.append(cu.tolist())

    in_threads(lambda seed: SimGroup(1).run(lambda member: calls(member, seed)))
    assert wrong == []


def in_threads(work: Any) -> None:
    """work(0) ... work(7), each in a thread; raises what one of them raises."""
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


OURS = str(Path(cp_fast.__file__).parent)


class Operators(TorchDispatchMode):
    """Counts PyTorch's operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("comm", "size", "calls", "operators"), [("p2p", 2, 145, 41), ("p2p", 4, 282, 87), ("a2a", 2, 224, 86)]
)
def test_a_call_is_few_calls_of_the_host(comm: Any, size: int, calls: int, operators: int) -> None:
    """Forward and backward, calls of functions of `cp_fast` that are no comprehensions: a limit, and not far above."""
    call = call_of(comm, size, 0, 16, (8, 2), 16)
    call()
    found: Counter[str] = Counter()

    def look(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS) and not code.co_name.startswith("<"):
            found[code.co_name] += 1

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert 0.9 * calls <= found.total() <= calls, found.most_common(12)
    with Operators() as counted:
        call()
    assert 0.9 * operators <= counted.count <= operators


def test_who_follows_a_known_call_meets_few_functions() -> None:
    """Forward and backward over gloo's kind of messages: functions of both packages that are no comprehensions, without
    what a kernel library does inside.
    """

    def one(member: SimMember) -> list[tuple[str, str]]:
        cp, met, inside = cp_fast.ContextParallel(member), list[tuple[str, str]](), 0
        q, k, v = (torch.randn(1, 32, heads, 16, requires_grad=True) for heads in (4, 2, 2))
        sizes: dict[str, Any] = {"heads_q": 4, "heads_kv": 2, "d_qk": 16, "d_v": 16, "dtype": q.dtype, "device": "cpu"}
        plan = cp_fast.make_plan(cp=cp, batch_size=1, seqlen_q=64, **sizes)

        def look(frame: Any, event: str, arg: Any) -> None:
            nonlocal inside
            code = frame.f_code
            room = code.co_filename.removeprefix(str(Path(OURS).parent) + "/")
            ours = room.startswith(("cp_fast", "cp_ref")) and "simulator" not in room and code.co_name[0] != "<"
            if "kernels" in room:
                inside += {"call": 1, "return": -1}.get(event, 0)
            elif event == "call" and ours and not inside:
                met.append((room, code.co_qualname))

        with torch.autograd.set_multithreading_enabled(False):
            for number in range(3):
                sys.setprofile(look if number == 2 else None)
                out = cp_fast.attention(q, k, v, cp=cp, plan=plan)
                torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
        sys.setprofile(None)
        return met

    met = SimGroup(2).run(one)[0]
    assert 45 <= len({*met}) <= 50, {*met}
    assert len({room for room, _ in met}) <= 14


FAR = torch.tensor([0, 2**32])
PROBLEM: dict[str, Any] = {
    "qkv_format": "thd",
    "attn_mask_type": "padding_causal",
    "heads_q": 8,
    "heads_kv": 8,
    "d_qk": 8,
    "d_v": 8,
    "dtype": torch.float32,
    "device": "cpu",
}


def planned(cp_size: int, cp_comm_type: Any, **arguments: Any) -> object:
    def make(member: Any) -> object:
        return cp_fast.supports(cp=cp_fast.ContextParallel(member, cp_comm_type), **(PROBLEM | arguments))

    return SimGroup(cp_size).run(make)[0]


@pytest.mark.parametrize(
    ("cp_size", "cp_comm_type", "rows"),
    [(1, "p2p", 2**32), (2, "p2p", 2**31), (4, "all_gather", 2**32), (4, "a2a", 2**32)],
)
def test_more_rows_than_int32_counts(cp_size: int, cp_comm_type: str, rows: int) -> None:
    side = "kv" if cp_comm_type == "all_gather" else "q"
    words = rf"cu_seqlens_{side}, padding included, ends at 4294967296: .* would hold {rows} rows of {side}"
    with pytest.raises(ValueError, match=words):
        planned(cp_size, cp_comm_type, cu_seqlens_q=FAR)


def test_a_rank_holds_its_share_alone() -> None:
    assert planned(4, "p2p", cu_seqlens_q=FAR) == (True, "")


def test_without_a_plan() -> None:
    def call(member: Any) -> None:
        x = torch.zeros(4, 1, 8)
        cp_fast.attention(
            x,
            x,
            x,
            cp=cp_fast.ContextParallel(member),
            qkv_format="thd",
            attn_mask_type="padding",
            cu_seqlens_q=torch.tensor([0, 4]),
            cu_seqlens_kv=FAR,
        )

    with pytest.raises(ValueError, match=r"cu_seqlens_kv"):
        SimGroup(1).run(call)


def test_room() -> None:
    few = torch.tensor([0, 8])
    with pytest.raises(ValueError, match=r"max_tokens_q is 4294967296: .* would hold 2147483648 rows of q"):
        planned(2, "p2p", cu_seqlens_q=few, max_sequences=2, max_tokens_q=2**32)
    with pytest.raises(ValueError, match=r"max_sequences is 1048577; it must be at most 1048576"):
        planned(2, "p2p", cu_seqlens_q=few, max_sequences=2**20 + 1, max_tokens_q=64)
    assert planned(2, "p2p", cu_seqlens_q=few, max_sequences=2**20, max_tokens_q=64) == (True, "")
