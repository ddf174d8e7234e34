"""Linear layers of cp_fast: strong decays, and padding inside a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.layers.linear_plan import LinearTables
from cp_ref import SimGroup
from cp_ref.calls.linear_calls import LINEAR_KINDS
<<<<<<< HEAD
from cp_ref.groups.collectives import all_reduce_sum
from cp_ref.reference.simulator import SimMember
from cp_ref.schedules.problem import Problem, Sequence
from tests.dist.workers import Processes
from tests.linear.problems import Layer, case_of, check_layer
from tests.marks import examples

PACKAGES = {"cp_ref": cp_ref, "cp_fast": cp_fast}
CU, PADDED = torch.tensor([0, 7, 7, 16]), torch.tensor([0, 8, 10, 20])
SIZES: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "device": "cpu"}
THD: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": CU, "cu_seqlens_q_padded": PADDED}


def made(package: str, member: SimMember, **more: Any) -> tuple[Any, Any, Any]:
    module = PACKAGES[package]
    cp = module.ContextParallel(member)
    return module, cp, module.make_plan(cp=cp, **(THD | SIZES | {"dtype": torch.float32, "linear": True} | more))


def inputs(kind: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Global tensors of 20 rows, h 1, h_v 2, d_k 4, d_v 3."""
    draw = torch.Generator().manual_seed(1)

    def some(*size: int) -> torch.Tensor:
        return torch.randn(20, *size, generator=draw)

    found = {"q": some(1, 4), "k": torch.nn.functional.normalize(some(1, 4), dim=-1), "v": some(2, 3)}
    found = {name: x.to(dtype) for name, x in found.items()}
    found["g"] = -some(*{"kda": (2, 4), "mamba": (2, 3)}.get(kind, (2,))).abs()
    if kind == "mamba":
        return found | {"g": -found["g"], "A": -torch.rand(2, 4, 3, generator=draw)}
    return found if kind == "mamba2" else found | {"beta": some(2).sigmoid()}


def sliced(module: Any, given: dict[str, torch.Tensor], cp: Any, plan: Any) -> dict[str, torch.Tensor]:
    """A rank's tensors: slices of those with a row for each token; A whole."""
    return {n: x.clone() if n == "A" else module.shard(x, cp=cp, plan=plan) for n, x in given.items()}


def exact(kind: str, given: dict[str, torch.Tensor]) -> torch.Tensor:
    lengths = {"qkv_format": "thd", "cu_seqlens": CU, "cu_seqlens_padded": PADDED}
    return cp_ref.reference.linear.recurrence.dense_linear_attention(**given, kind=kind, **lengths)[0]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("kind", LINEAR_KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype, kind: str, package: str) -> None:
    """q, k and v in any dtype, g and beta in float32; states in float32."""
    given = inputs(kind, dtype)

    def one(member: SimMember) -> torch.Tensor:
        module, cp, plan = made(package, member)
        mine = {name: x.requires_grad_() for name, x in sliced(module, given, cp, plan).items()}
        out, state = module.linear_attention(**mine, cp=cp, plan=plan, kind=kind, output_final_state=True)
        assert (out.dtype, state.dtype, list(state.shape)) == (dtype, torch.float32, [3, 2, 4, 3])
        (out.float().sum() + state.sum()).backward()
        assert [x.grad.dtype for x in mine.values()] == [x.dtype for x in mine.values()]  # type: ignore[union-attr]
        x = mine["v"].detach().flatten(1)
        convolved = module.causal_conv1d(x, torch.ones(6, 4), cp=cp, plan=plan, activation="silu")
        assert convolved.dtype == dtype
        return module.unshard(out.detach(), cp=cp, plan=plan)

    tolerance = 4 * torch.finfo(dtype).eps
    for out in SimGroup(3).run(one):
        torch.testing.assert_close(out.double(), exact(kind, given), atol=tolerance, rtol=tolerance)
=======
from cp_ref.reference.linear.recurrence import dense_linear_attention
from cp_ref.reference.simulator import SimMember
from cp_ref.schedules.problem import Problem, Sequence
from tests.layers.layer_table import made
from tests.linear.problems import Layer, check_layer
>>>>>>> main


@pytest.mark.parametrize("kind", LINEAR_KINDS)
@pytest.mark.parametrize("strongest", [1.0, 90.0])
def test_strong_decays_lose_no_digit(strongest: float, kind: str) -> None:
    """Sums of g inside a chunk reach thousands. What counts are their small differences."""
    rows, draw = 200, torch.Generator().manual_seed(0)
    sizes = {"q": (1, 8), "k": (1, 8), "v": (2, 8), "dout": (2, 8)}
    given = {name: torch.randn(rows, *size, generator=draw) for name, size in sizes.items()}
    given["k"] = torch.nn.functional.normalize(given["k"], dim=-1)
    given["g"] = -strongest * torch.rand(rows, *((2, 8) if kind in ("kda", "mamba") else (2,)), generator=draw)
    if kind == "mamba":
        given |= {"g": -given["g"], "A": -torch.rand(2, 8, 8, generator=draw)}
    elif kind != "mamba2":
        given["beta"] = torch.rand(rows, 2, generator=draw)
    dout, cu = given.pop("dout"), torch.tensor([0, rows])
    wide: dict[str, Any] = {name: x.double().requires_grad_() for name, x in given.items()}
    out, _ = dense_linear_attention(**wide, kind=kind, qkv_format="thd", cu_seqlens=cu)
    wanted = [out.detach(), *torch.autograd.grad(out, list(wide.values()), dout.double())]

    def one(member: SimMember) -> list[torch.Tensor]:
        sequence: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_q_padded": None}
        module, cp, plan = made("cp_fast", member, **sequence)
        mine = {name: x.requires_grad_() for name, x in sliced(module, given, cp, plan).items()}
        out = module.linear_attention(**mine, cp=cp, plan=plan, kind=kind)
        grads = torch.autograd.grad(out, list(mine.values()), module.shard(dout, cp=cp, plan=plan))
        found = dict(zip(("out", *mine), (x.detach() for x in (out, *grads)), strict=True))
        # The gradient of A is a rank's share.
        return [
            all_reduce_sum(member, x) if n == "A" else module.unshard(x, cp=cp, plan=plan) for n, x in found.items()
        ]

    for name, got, want in zip(("out", *given), SimGroup(2).run(one)[0], wanted, strict=True):
        assert (got - want).norm() <= 1e-6 * want.norm(), name


<<<<<<< HEAD
@pytest.mark.parametrize("package", PACKAGES)
def test_autocast_casts_what_attention_casts(package: str) -> None:
    given = inputs("gated_delta_rule")

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member)
        mine = {name: module.shard(x, cp=cp, plan=plan) for name, x in given.items()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert module.linear_attention(**mine, cp=cp, plan=plan).dtype == torch.bfloat16
            x, weight, bias = mine["q"][:, 0], torch.ones(4, 2), torch.ones(4)
            assert module.causal_conv1d(x, weight, bias, cp=cp, plan=plan).dtype == torch.bfloat16

    SimGroup(2).run(one)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("kind", LINEAR_KINDS)
def test_documents_do_not_see_each_other(kind: str, package: str) -> None:
    """NaN in all tokens of one document, and in the gradients of its results, reaches no other document."""

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member)
        for document, (start, stop) in enumerate(((0, 7), (10, 19))):
            spoiled = {name: x.clone() for name, x in inputs(kind).items()}
            others = torch.ones(20, dtype=torch.bool)
            others[start:stop] = False
            for name, x in spoiled.items():
                if name != "A":
                    x[start:stop] = float("nan")
            mine = {name: x.requires_grad_() for name, x in sliced(module, spoiled, cp, plan).items()}
            rows = [x for name, x in mine.items() if name != "A"]
            out, state = module.linear_attention(**mine, cp=cp, plan=plan, kind=kind, output_final_state=True)
            dout, dstate = torch.ones(20, 2, 3), torch.ones(3, 2, 4, 3)
            dout[start:stop], dstate[document * 2] = float("nan"), float("nan")
            grads = torch.autograd.grad((out, state), rows, (module.shard(dout, cp=cp, plan=plan), dstate))
            assert state[[1, 2 - document * 2]].isfinite().all()
            x = mine["v"].detach().flatten(1).requires_grad_()
            conv = module.causal_conv1d(x, torch.ones(6, 4), cp=cp, plan=plan)
            (dx,) = torch.autograd.grad(conv, x, module.shard(dout, cp=cp, plan=plan).flatten(1))
            for result in (out, conv, dx, *grads):
                whole = module.unshard(result.detach(), cp=cp, plan=plan)
                assert whole[others].isfinite().all()
            for result in (out, conv, dx):
                assert module.unshard(result.detach(), cp=cp, plan=plan)[start:stop].isnan().any()

    SimGroup(3).run(one)


@pytest.mark.parametrize("package", PACKAGES)
def test_activation_checkpointing(package: str) -> None:
    given = inputs("gated_delta_rule", torch.float64)
    given = {name: x.double() for name, x in given.items()}

    def one(member: SimMember) -> list[torch.Tensor]:
        module, cp, plan = made(package, member)
        found = []
        for recompute in (False, True):
            mine = {name: module.shard(x, cp=cp, plan=plan).requires_grad_() for name, x in given.items()}

            def layer(**tensors: torch.Tensor) -> torch.Tensor:
                x = tensors["q"][:, 0]
                mixed = module.causal_conv1d(x, torch.ones(4, 3).double(), cp=cp, plan=plan, activation="silu")
                return module.linear_attention(**(tensors | {"q": mixed[:, None]}), cp=cp, plan=plan)

            out = checkpoint(layer, **mine, use_reentrant=False) if recompute else layer(**mine)
            out.square().sum().backward()
            found.append([out.detach(), *(x.grad for x in mine.values())])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        return found[0]

    SimGroup(2).run(one)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_plan_that_is_updated(package: str) -> None:
    """The same plan serves the next batch; a backward pass of the old batch is refused."""
    lengths = torch.tensor([0, 3, 12])

    def one(member: SimMember) -> torch.Tensor:
        module, cp, plan = made(package, member, max_sequences=4, max_tokens_q=20)
        given = inputs("mamba2")
        mine = {name: module.shard(x, cp=cp, plan=plan).requires_grad_() for name, x in given.items()}
        old = module.linear_attention(**mine, cp=cp, plan=plan, kind="mamba2")
        old_rows = module.causal_conv1d(mine["v"][:, 0], torch.ones(3, 2), cp=cp, plan=plan)
        plan.update(cp=cp, cu_seqlens_q=lengths)
        for result in (old, old_rows):
            with pytest.raises(RuntimeError, match="the plan was updated between the forward and the backward pass"):
                result.sum().backward()
        assert str(plan.states).count("scan 1") > 0
        short = {name: x[:12] for name, x in given.items()}
        mine = {name: module.shard(x, cp=cp, plan=plan) for name, x in short.items()}
        mine = {n: torch.cat([x, x.new_zeros(10 - len(x), *x.shape[1:])]) for n, x in mine.items()}
        with pytest.raises(ValueError, match=r"q has 9 tokens, but the plan was made with max_tokens_q = 10"):
            module.linear_attention(**{n: x[:9] for n, x in mine.items()}, cp=cp, plan=plan, kind="mamba2")
        out = module.linear_attention(**mine, cp=cp, plan=plan, kind="mamba2")
        return module.unshard(out[:6], cp=cp, plan=plan)

    short = {name: x[:12] for name, x in inputs("mamba2").items()}
    want, _ = cp_ref.reference.linear.recurrence.dense_linear_attention(
        **short, kind="mamba2", qkv_format="thd", cu_seqlens=lengths
    )
    for out in SimGroup(2).run(one):
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_ranks_agree_once_about_a_kind_of_call(package: str) -> None:
    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member)
        mine = {name: module.shard(x, cp=cp, plan=plan) for name, x in inputs("mamba2").items()}
        asked, gather = [], cp.comm.all_gather_object
        cp.comm.all_gather_object = lambda value: (asked.append(value), gather(value))[1]
        counts = []
        for scale in (None, None, 2.0, 0.5):  # the second is the first again, and so is the last: d_k ** -0.5
            module.linear_attention(**mine, cp=cp, plan=plan, kind="mamba2", scale=scale)
            module.causal_conv1d(mine["v"][:, 0], torch.ones(3, 2), cp=cp, plan=plan)
            counts.append(len(asked))
        assert counts == [2, 2, 3, 3]

    SimGroup(2).run(one)


@pytest.mark.parametrize("package", PACKAGES)
def test_derivatives_that_are_refused(package: str) -> None:
    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member)
        mine = {n: module.shard(x, cp=cp, plan=plan).requires_grad_() for n, x in inputs("mamba2").items()}
        out = module.linear_attention(**mine, cp=cp, plan=plan, kind="mamba2")
        (dq,) = torch.autograd.grad(out.sum(), mine["q"], create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            dq.sum().backward()
        with pytest.raises(NotImplementedError, match="a gradient of a gradient"):
            torch.autograd.grad(dq.sum(), mine["k"], allow_unused=True)
        for result in (out, module.causal_conv1d(mine["v"].flatten(1), torch.ones(6, 3), cp=cp, plan=plan)):
            both = torch.stack([torch.ones_like(result)] * 2)
            with pytest.raises(NotImplementedError, match=r"is_grads_batched=True.* is not supported"):
                torch.autograd.grad(result, mine["v"], both, is_grads_batched=True, retain_graph=True)
        with pytest.raises(NotImplementedError, match=r"torch\.func"):
            torch.func.vmap(lambda x: module.causal_conv1d(x, torch.ones(3, 2), cp=cp, plan=plan))(torch.ones(2, 10, 3))

    SimGroup(2).run(one)


THREE = (Sequence(5, 5, 6, 6), Sequence(0, 0, 2, 2), Sequence(9, 9, 9, 9))
LAYER = Layer(heads=1, shared=2, initial_state=True, output_final_state=True, tail=1)


def over_gloo(package: str, comm: str, layout: str) -> Any:
    """One process."""
    case, module = case_over_processes(comm, layout), importlib.import_module(package)
    group: Any = init_device_mesh("cpu", (2, 2)) if comm == "a2a+p2p" else dist.group.WORLD
    cp = module.ContextParallel(group, comm, layout=layout)
    results = play_layer(Implementation(module), case, build_linear(case), cp, dist.get_rank())
    return {name: x.numpy() for name, x in results.items()}


def case_over_processes(comm: str, layout: str) -> LinearAttention:
    heads: dict[str, Any] = {"heads_q": 4, "heads_kv": 4, "dtype": "float64"}
    return case_of(Problem(4, THREE, comm, {"a2a+p2p": 2, "a2a": 4}.get(comm, 1), layout, "thd", **heads), LAYER)


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    group = Processes(4)
    yield group
    group.close()


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("comm", "layout"), [("p2p", "dual_chunk"), ("a2a+p2p", "contiguous"), ("a2a", "balanced")])
def test_processes(four: Processes, comm: str, layout: str, package: str) -> None:
    ranks = []
    for found in four.run(over_gloo, package, comm, layout):
        assert not isinstance(found, Exception), found
        ranks.append({name: torch.from_numpy(x) for name, x in found.items()})
    case = case_over_processes(comm, layout)
    assert compare_linear(case, build_linear(case), ranks) == []


=======
>>>>>>> main
@pytest.mark.parametrize("kind", LINEAR_KINDS)
def test_little_padding_is_not_cut_out(kind: str) -> None:
    problem = Problem(2, tuple(Sequence(n, n, size, size) for n, size in ((41, 44), (30, 32))), qkv_format="thd")
    plan = LinearTables(problem, 0, torch.device("cpu"))
    assert [int(x) for x in plan.sequences.fragments.document] == [0, 0, -1, 1, 1]
    assert len(plan.rows.fragments.document) == 4
    check_layer(cp_fast, problem, Layer(kind=kind, initial_state=True, output_final_state=True))
