"""`cp_fast.checked`: calls that are not the same on all ranks raise on all of them, over gloo and simulated."""

from __future__ import annotations

import contextlib
import inspect
import os
import runpy
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cp_fast
import cp_ref
from cp_fast.api import checked_calls as checking
from cp_ref import SimGroup
from cp_ref.groups.process_groups import ProcessMember
from tests.dist.workers import CONTEXT, Processes
from tests.marks import HANGS_S

CUS = [torch.tensor(cu, dtype=torch.int32) for cu in ([0, 16], [0, 4, 16])]
SIZES: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}
MODULE = inspect.getfile(checking)
Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def gloo(two: Processes) -> Run:
    return two.run


def simulated(fn: Callable[..., Any], *arguments: Any) -> list[Any]:
    def one(member: Any) -> Any:
        try:
            return fn(*arguments, member)
        except Exception as error:
            return error

    return SimGroup(2).run(one)


@pytest.fixture(params=["gloo", "simulated"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.getfixturevalue("gloo") if request.param == "gloo" else simulated


def setting(member: Any) -> tuple[cp_fast.ContextParallel, Callable[..., cp_fast.Plan], torch.Tensor]:
    cp = cp_fast.ContextParallel(dist.group.WORLD if member is None else member)

    def plan(batch: int = 0, **how: Any) -> cp_fast.Plan:
        return cp_fast.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=CUS[batch], **SIZES, **how)

    return cp, plan, torch.randn(8, 2, 8, requires_grad=True)


def other_batches(member: Any = None) -> None:
    """Rank 0 uses the plan of the first batch, rank 1 that of the second."""
    cp, plan, x = setting(member)
    plans = [plan(0), plan(1)]
    with cp_fast.checked():
        cp_fast.attention(x, x, x, cp=cp, plan=plans[cp.rank])


def other_shapes(member: Any = None) -> None:
    """Rank 1 has a longer tail."""
    cp, plan, x = setting(member)
    x = torch.cat([x, x[: cp.rank]]).detach()
    made = plan(0)
    with cp_fast.checked():
        cp_fast.attention(x, x, x, cp=cp, plan=made)


def refused_here(member: Any = None) -> None:
    """Rank 1's tensors are not those of the plan: beside a plan only rank 1 would know."""
    cp, plan, x = setting(member)
    made = plan(0)
    with cp_fast.checked():
        cp_fast.attention(x, x.half() if cp.rank else x, x, cp=cp, plan=made)


def other_flags(member: Any = None) -> None:
    cp, plan, x = setting(member)
    made = plan(0)
    with cp_fast.checked():
        cp_fast.attention(x, x, x, cp=cp, plan=made, return_max_logit=cp.rank == 1)


def no_gradient_here(member: Any = None) -> None:
    """Rank 1 will not call backward."""
    cp, plan, x = setting(member)
    made = plan(0)
    with cp_fast.checked():
        x = x.detach() if cp.rank else x
        cp_fast.attention(x, x, x, cp=cp, plan=made)


def swapped_windows(member: Any = None) -> None:
    """Two layers with different windows, in another order on rank 1."""
    cp, plan, x = setting(member)
    plans = [plan(0, window_size=(1, 0)), plan(0, window_size=(2, 0))]
    with cp_fast.checked():
        for made in plans if cp.rank == 0 else plans[::-1]:
            cp_fast.attention(x, x, x, cp=cp, plan=made)


class Attend(torch.nn.Module):
    def forward(self, x: torch.Tensor, cp: Any, plan: Any) -> torch.Tensor:
        return cp_fast.attention(x, x, x, cp=cp, plan=plan)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Attend(), Attend()])

    def forward(self, x: torch.Tensor, cp: Any, plan: Any, order: tuple[int, ...]) -> torch.Tensor:
        for number in order:
            x = self.layers[number](x, cp, plan)
        return x


def swapped_layers(member: Any = None) -> None:
    """Two layers that are alike in everything, in another order on rank 1."""
    cp, plan, x = setting(member)
    made = plan(0)
    with cp_fast.checked():
        Model()(x, cp, made, (0, 1) if cp.rank == 0 else (1, 0))


def swapped_backwards(member: Any = None) -> None:
    """Two calls whose backward passes are called in another order on rank 1."""
    cp, plan, x = setting(member)
    made = plan(0)
    with cp_fast.checked():
        outs = [cp_fast.attention(x, x, x, cp=cp, plan=made).sum() for _ in range(2)]
        for out in outs if cp.rank == 0 else outs[::-1]:
            out.backward()


def one_call_more(member: Any = None) -> None:
    """Rank 0 makes a second call where rank 1 goes on to the backward pass."""
    cp, plan, x = setting(member)
    made = plan(0)
    with cp_fast.checked():
        out = cp_fast.attention(x, x, x, cp=cp, plan=made)
        if cp.rank == 0:
            cp_fast.attention(x, x, x, cp=cp, plan=made)
        out.sum().backward()


def linear_setting(member: Any) -> tuple[cp_fast.ContextParallel, list[cp_fast.Plan], Callable[..., torch.Tensor]]:
    """Plans of both batches, and a linear layer or a convolution."""
    cp, plan, x = setting(member)

    def layer(made: cp_fast.Plan, convolution: bool = False, scale: float = 1.0) -> torch.Tensor:
        if convolution:
            return cp_fast.causal_conv1d(x.flatten(1), torch.ones(16, 3), cp=cp, plan=made)
        g = torch.zeros(8, 2)
        return cp_fast.linear_attention(x, x, x, g, cp=cp, plan=made, kind="mamba2", scale=scale)

    return cp, [plan(0, linear=True), plan(1, linear=True)], layer


def other_states(member: Any = None) -> None:
    """Rank 1 runs a linear layer with the plan of the second batch, after it has run both."""
    cp, plans, layer = linear_setting(member)
    for made in plans:
        layer(made)
    with cp_fast.checked():
        layer(plans[cp.rank])


def other_halos(member: Any = None) -> None:
    cp, plans, layer = linear_setting(member)
    with cp_fast.checked():
        layer(plans[cp.rank], convolution=True)


def other_layers(member: Any = None) -> None:
    """Rank 1 calls the convolution before the linear layer."""
    cp, (made, _), layer = linear_setting(member)
    with cp_fast.checked():
        for convolution in (False, True) if cp.rank == 0 else (True, False):
            layer(made, convolution)


def swapped_linear_backwards(member: Any = None) -> None:
    cp, (made, _), layer = linear_setting(member)
    with cp_fast.checked():
        outs = [layer(made, convolution).sum() for convolution in (True, True)]
        for out in outs if cp.rank == 0 else outs[::-1]:
            out.backward()


def other_scales(member: Any = None) -> None:
    cp, (made, _), layer = linear_setting(member)
    layer(made)
    with cp_fast.checked():
        layer(made, scale=1.0 + cp.rank)


CASES: list[tuple[Callable[..., None], str, str, str]] = [
    (other_batches, "forward, call ", "1 sequences", "2 sequences"),
    (other_shapes, "forward, call ", "q=float32[8, 2, 8]", "q=float32[9, 2, 8]"),
    (other_flags, "forward, call ", "return_max_logit=False", "return_max_logit=True"),
    (no_gradient_here, "forward, call ", "requires_grad=True", "requires_grad=False"),
    (swapped_windows, "forward, call ", "window_size=(1, 0)", "window_size=(2, 0)"),
    (swapped_layers, " in Model.layers.", "module=Model.layers.0", "module=Model.layers.1"),
    (swapped_backwards, "backward, call ", "of_call=", "of_call="),
    (one_call_more, ", call ", "attention, forward", "attention, backward"),
    (other_states, "linear_attention, forward, call ", "1 sequences", "2 sequences"),
    (other_halos, "causal_conv1d, forward, call ", "1 sequences", "2 sequences"),
    (other_layers, ", call ", "linear_attention, forward", "causal_conv1d, forward"),
    (other_scales, "linear_attention, forward, call ", "scale=1.0", "scale=2.0"),
    (swapped_linear_backwards, "causal_conv1d, backward, call ", "of_call=", "of_call="),
]


@pytest.mark.parametrize(("fn", "where", "first", "second"), CASES)
@pytest.mark.one_in(3)
def test_the_first_difference_raises_on_all_ranks(run: Run, fn: Any, where: str, first: str, second: str) -> None:
    for rank, error in enumerate(run(fn)):
        assert isinstance(error, ValueError), (rank, error)
        text = str(error)
        assert text.startswith("checked, ")
        assert where in text
        ours, theirs = (first, second) if rank == 0 else (second, first)
        called = "the ranks call different functions" in text
        assert f"rank {rank} {'calls' if called else 'has'} {ours}" in text
        assert f"rank {1 - rank} {'calls' if called else 'has'} {theirs}" in text


def test_what_one_rank_refuses_is_raised_on_all(run: Run) -> None:
    there, here = run(refused_here)
    assert "rank 1 refused its arguments, so rank 0 does not start" in str(there)
    assert str(here) in str(there)
    assert "dtype" in str(here)


def all_alike(member: Any = None) -> list[torch.Tensor]:
    """What is the same on all ranks is as without it, and the next calls go on after an error."""
    cp, plan, x = setting(member)
    made = plan(1)
    results = []
    for check in (False, True, False):
        x.grad = None
        if check:
            with cp_fast.checked():
                cp_fast.attention(x, x, x, cp=cp, plan=made).sum().backward()
                cp_fast.attention(x.detach(), x.detach(), x.detach(), cp=cp, qkv_format="thd", cu_seqlens_q=CUS[1])
                with pytest.raises(ValueError, match=r"^checked"):
                    cp_fast.attention(x, x, x, cp=cp, plan=made, return_lse=cp.rank == 0)
                Model()(x, cp, made, (0, 1, 0))
        else:
            cp_fast.attention(x, x, x, cp=cp, plan=made).sum().backward()
        results.append(x.grad)
    assert torch.equal(results[0], results[1])
    return [results[0], results[2]]


def refused_linear_here(member: Any = None) -> None:
    """Rank 1's gates are of another size."""
    cp, plan, x = setting(member)
    made = plan(0, linear=True)
    with cp_fast.checked():
        cp_fast.linear_attention(x, x, x, torch.zeros(8, 2 + cp.rank), cp=cp, plan=made, kind="mamba2")


def test_what_one_rank_refuses_of_a_linear_layer_is_raised_on_all(run: Run) -> None:
    there, here = run(refused_linear_here)
    assert "rank 1 refused its arguments, so rank 0 does not start" in str(there)
    assert str(here) in str(there)
    assert str(here).startswith("g has")


def linear_alike(member: Any = None) -> list[torch.Tensor]:
    _, (made, _), layer = linear_setting(member)
    outs = []
    for convolution in (False, True):
        for check in (False, True, False):
            with cp_fast.checked() if check else contextlib.nullcontext():
                out = layer(made, convolution)
                out.sum().backward()
            outs.append(out.detach())
    return outs


def test_linear_layers_that_are_alike_are_computed_as_ever(run: Run) -> None:
    for found in run(linear_alike):
        assert not isinstance(found, Exception), found
        assert all(torch.equal(found[n], found[0]) and torch.equal(found[3 + n], found[3]) for n in (1, 2))


def test_what_is_alike_is_computed_as_ever(run: Run) -> None:
    for found in run(all_alike):
        assert not isinstance(found, Exception), found
        assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
def test_compiled_calls_are_checked() -> None:
    """One rank is enough to see that its operator agrees on the call; Dynamo is not made for threads."""

    def one(member: Any) -> None:
        cp, plan, _ = setting(member)
        x, made = torch.randn(16, 2, 8, requires_grad=True), plan(0)
        gathered: list[Any] = []
        plainly = member.all_gather_object
        member.all_gather_object = lambda value: gathered.append(value) or plainly(value)
        with cp_fast.checked():
            torch.compile(Attend(), fullgraph=True, backend="aot_eager")(x, cp, made).sum().backward()
        assert len(gathered) == 2

    torch._dynamo.reset()
    SimGroup(1).run(one)


def test_off_nothing_is_gathered() -> None:
    def one(member: Any) -> None:
        cp, plan, x = setting(member)
        made = plan(0)
        member.all_gather_object = None
        cp_fast.attention(x, x, x, cp=cp, plan=made).sum().backward()

    SimGroup(2).run(one)


@pytest.mark.parametrize(("text", "on"), [("1", True), ("0", False), ("", False)])
def test_the_environment(text: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the module is run, as a first import runs it."""
    monkeypatch.setenv("CP_FAST_CHECK", text)
    copy = runpy.run_path(MODULE)
    assert copy["checking"]() is on
    if on:
        copy["named_modules"]().__exit__()  # which it entered for ever


def test_another_word_in_the_environment_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CP_FAST_CHECK", "yes")
    with pytest.raises(ValueError, match="CP_FAST_CHECK is 'yes'; it must be 0 or 1"):
        runpy.run_path(MODULE)


SIZE = 3


class DiesAt:
    """Rank 1's group: its process ends when it is about to post an exchange."""

    def __init__(self, member: ProcessMember, exchange: int) -> None:
        self._member, self._left = member, exchange
        self.rank, self.size = member.rank, member.size
        self.all_gather_object = member.all_gather_object

    def exchange(self, sends: Any, recvs: Any) -> Any:
        if self._left == 0:
            os._exit(0)
        self._left -= 1
        return self._member.exchange(sends, recvs)


def _main(rank: int, store: str, package: str, comm: str, exchange: int, results: Any, apart: bool = False) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE, timeout=limit)
    group: Any = ProcessMember(dist.group.WORLD)  # pyright: ignore[reportArgumentType]
    impl: Any = {"cp_ref": cp_ref, "cp_fast": cp_fast}[package]
    layout = "contiguous" if apart else "dual_chunk"
    cp = impl.ContextParallel(DiesAt(group, exchange) if rank == 1 else group, comm, layout=layout)
    q, batch = torch.randn(1, 8, 3, 4, requires_grad=True), {}
    if apart:  # a document of ranks 0 and 1, and one of rank 2
        q, batch = q[0], {"qkv_format": "thd", "cu_seqlens_q": torch.tensor([0, 16, 24])}
    try:
        impl.attention(q, q, q, cp=cp, **batch).sum().backward()
        results.put((rank, "finished"))
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
    results.close()
    results.join_thread()
    os._exit(0)


@pytest.mark.parametrize(
    ("package", "comm", "exchange", "where"),
    [
        ("cp_ref", "p2p", 1, "forward, step 1 of 3"),
        ("cp_ref", "p2p", 3, "a maximum over all ranks"),
        ("cp_ref", "p2p", 4, "backward, step 0 of"),
        ("cp_fast", "p2p", 1, "forward, step 1 of 3"),
        ("cp_fast", "p2p", 2, "backward, step 0 of"),
        ("cp_fast", "a2a", 0, "forward, step 0 of"),
        ("cp_fast", "a2a", 2, "backward, step 0 of"),
    ],
)
@pytest.mark.one_in(3)
def test_the_others_are_told_the_step_and_the_peer(package: str, comm: str, exchange: int, where: str) -> None:
    said = _said(package, comm, exchange)
    assert all(text.startswith("PeerError") for text in said.values()), said
    assert any(where in text and "rank 1" in text for text in said.values()), said


def test_a_rank_that_exchanges_nothing_with_the_lost_one_ends_its_call() -> None:
    said = _said("cp_fast", "p2p", 0, apart=True)
    assert said[0].startswith("PeerError"), said
    assert "rank 1" in said[0]
    assert said[2] == "finished"


def _said(package: str, comm: str, exchange: int, **more: bool) -> dict[int, str]:
    """What ranks 0 and 2 say in the end."""
    results = CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (str(Path(folder) / "store"), package, comm, exchange, results)
        processes = [CONTEXT.Process(target=_main, args=(rank, *arguments), kwargs=more) for rank in range(SIZE)]
        for process in processes:
            process.start()
        said = dict(results.get(timeout=HANGS_S) for _ in range(SIZE - 1))
        for process in processes:
            process.join(timeout=HANGS_S)
    assert sorted(said) == [0, 2]
    return said
