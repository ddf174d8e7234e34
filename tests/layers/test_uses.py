"""What models do with a layer, for all functions in both packages: each use is one function over the table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import cp_fast
from cp_ref import SimGroup
from cp_ref.reference.simulator import SimMember
from tests.dist.workers import Processes
from tests.layers import layer_table
from tests.layers.layer_table import (
    CU,
    DOCUMENTS,
    LAYERS,
    PACKAGES,
    PADDED,
    ROWS,
    SIZES,
    Layer,
    Tensors,
    local,
    made,
    whole,
)

each_package = pytest.mark.parametrize("package", PACKAGES)
each_layer = pytest.mark.parametrize("name", LAYERS)
each_with_gradients = pytest.mark.parametrize("name", [name for name, layer in LAYERS.items() if layer.differentiable])


def named(layer: Layer, results: tuple[torch.Tensor, ...]) -> Tensors:
    """The results by name."""
    names = ("out", "final_state" if layer.has_states else "lse")
    return {name: x.detach() for name, x in zip(names, results, strict=False)}


def loss(layer: Layer, results: tuple[torch.Tensor, ...], cp: Any) -> torch.Tensor:
    """This rank's share of the sum of the squares of all that is finite; every rank has the final states."""
    first, *more = (x.masked_fill(x.isinf(), 0).double().square().sum() for x in results)
    return first + sum(more) / (cp.size if layer.has_states else 1)


def played(layer: Layer, module: Any, mine: Tensors, cp: Any, plan: Any, *seeds: torch.Tensor) -> Tensors:
    """Results, and the gradients of their squares, or of other seeds."""
    results = layer.call(module, **mine, cp=cp, plan=plan)
    leaves = {name: mine[name] for name in layer.differentiable}
    if not leaves:
        return named(layer, results)
    outputs = results if seeds else [loss(layer, results, cp)]
    grads = torch.autograd.grad(outputs, list(leaves.values()), seeds or None)  # pyright: ignore[reportArgumentType]
    return named(layer, results) | dict(zip(leaves, grads, strict=True))


def test_the_table_calls_all_public_layers() -> None:
    modules = {name: getattr(getattr(cp_fast, name), "__module__", "") for name in cp_fast.__all__}
    public = [name for name, module in modules.items() if module.startswith("cp_fast.layers.")]
    calls = inspect.getsource(layer_table)
    assert public
    assert [name for name in public if f"module.{name}(" not in calls] == []


@each_layer
@each_package
@pytest.mark.one_in(3)
def test_documents_do_not_see_each_other(package: str, name: str) -> None:
    """NaN in all tokens of one document, and in the gradients of its results, reaches no other document."""
    layer = LAYERS[name]

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member)
        mine = local(module, layer, layer.inputs(), cp, plan)
        ones = [torch.ones_like(x) for x in layer.call(module, **mine, cp=cp, plan=plan)]
        wanted = whole(module, layer, played(layer, module, mine, cp, plan, *ones), cp, plan)
        for number, (start, stop) in DOCUMENTS.items():
            hit, states = torch.arange(ROWS), torch.arange(3) == number
            hit = (hit >= start) & (hit < stop)
            given, seeds, here = layer.inputs(), [x.clone() for x in ones], module.shard(hit, cp=cp, plan=plan)
            for each, x in given.items():
                if x.is_floating_point() and each not in ("weight", "bias", "A"):
                    x[states if each == "initial_state" else hit] = torch.nan
            for x in seeds if layer.differentiable else ():
                x[states if layer.has_states and x is seeds[1] else here] = torch.nan
            mine = local(module, layer, given, cp, plan)
            found = whole(module, layer, played(layer, module, mine, cp, plan, *seeds), cp, plan)
            for each, x in found.items():
                if each not in ("weight", "bias", "A"):  # sums over all documents
                    kept = ~states if len(x) == 3 else ~hit
                    torch.testing.assert_close(x[kept], wanted[each][kept])
            assert name == "select_keys" or found["out"][hit].isnan().any()

    SimGroup(3).run(one)


@each_layer
@each_package
@pytest.mark.one_in(3)
def test_a_plan_that_is_updated(package: str, name: str) -> None:
    """It is the fresh plan of the next batch; rows behind the batch may hold anything. A backward pass of the old batch
    is refused.
    """
    layer, cu = LAYERS[name], torch.tensor([0, 3, 3, 12])

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member, max_sequences=3, max_tokens_q=ROWS)
        old = layer.call(module, **local(module, layer, layer.inputs(), cp, plan), cp=cp, plan=plan)
        plan.update(cp=cp, cu_seqlens_q=cu)
        if layer.differentiable:
            with pytest.raises(RuntimeError, match="the plan was updated between the forward and the backward pass"):
                loss(layer, old, cp).backward()
        fresh = module.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=cu, dtype=torch.float32, **SIZES)
        short = local(module, layer, layer.inputs(rows=12), cp, fresh)
        wanted = played(layer, module, short, cp, fresh)
        rows, wide = len(wanted["out"]), ROWS // member.size
        mine = {each: x if each in layer.alike else _filled(x, wide) for each, x in short.items()}
        less = {each: x if each in layer.alike else x[: wide - 1] for each, x in mine.items()}
        words = f"has {wide - 1} tokens, but the plan was made with max_tokens_q = {wide}"
        with pytest.raises(ValueError, match=words):
            layer.call(module, **less, cp=cp, plan=plan)
        padding = dict(zip(wanted, (blank for blank, _ in layer.results), strict=False))
        for each, x in played(layer, module, mine, cp, plan).items():
            if each in layer.alike or each == "final_state":
                torch.testing.assert_close(x, wanted[each])
                continue
            assert len(x) == wide
            torch.testing.assert_close(x[:rows], wanted[each])
            assert (x[rows:] == padding.get(each, 0)).all(), each

    SimGroup(2).run(one)


def _filled(x: torch.Tensor, rows: int) -> torch.Tensor:
    """With more rows, which nobody may read."""
    wild = torch.nan if x.is_floating_point() else 2**30
    room = torch.cat([x.detach(), x.new_full((rows - len(x), *x.shape[1:]), wild)])
    return room.requires_grad_(x.requires_grad)


@each_with_gradients
@each_package
def test_activation_checkpointing(package: str, name: str) -> None:
    """The same bits."""
    layer = LAYERS[name]

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member, dtype=torch.float64)
        mine = local(module, layer, layer.inputs(torch.float64), cp, plan)
        found: list[Tensors] = []
        for call in (layer.call, lambda *x, **how: checkpoint(layer.call, *x, use_reentrant=False, **how)):
            results: Any = call(module, **mine, cp=cp, plan=plan)
            leaves = [mine[each] for each in layer.differentiable]
            grads = torch.autograd.grad(loss(layer, results, cp), leaves)
            found.append(named(layer, results) | dict(zip(layer.differentiable, grads, strict=True)))
        plain, again = found
        assert all(torch.equal(x, again[each]) for each, x in plain.items())

    SimGroup(2).run(one)


@each_layer
@each_package
def test_autocast_casts_what_attention_casts(package: str, name: str) -> None:
    """The indexer's tensors stay as they are, so that autocast changes no choice."""
    layer = LAYERS[name]

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member, dtype=torch.bfloat16)
        mine = local(module, layer, layer.inputs(), cp, plan)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = played(layer, module, mine, cp, plan)
        assert [found[each].dtype for each in list(found)[: len(layer.results)]] == [x for _, x in layer.results]
        assert all(found[each].dtype == mine[each].dtype for each in layer.differentiable)
        low = {each: x.bfloat16() if each in layer.cast else x for each, x in mine.items()}
        for got, want in zip(layer.call(module, **low, cp=cp, plan=plan), found.values(), strict=False):
            torch.testing.assert_close(got.detach(), want)

    SimGroup(2).run(one)


@each_layer
@each_package
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(x, marks=pytest.mark.thorough) for x in (torch.float16, torch.float32))]
)
@pytest.mark.one_in(3)
def test_dtypes(dtype: torch.dtype, package: str, name: str) -> None:
    """Results and gradients have the dtype of the inputs, and are as near to those in float64 as it allows."""
    layer = LAYERS[name]
    given = {each: x.to(dtype).double() if x.is_floating_point() else x for each, x in layer.inputs().items()}

    def one(member: SimMember, dtype: torch.dtype) -> Tensors:
        module, cp, plan = made(package, member, dtype=dtype)
        cast = {each: x.to(dtype) if x.is_floating_point() else x for each, x in given.items()}
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        cast |= {each: cast[each].to(wide) for each in ("initial_state", "lse") if each in cast}
        mine = local(module, layer, cast, cp, plan)
        found = played(layer, module, mine, cp, plan)
        assert all(found[each].dtype == mine[each].dtype for each in layer.differentiable)
        assert found["out"].dtype in (dtype, torch.int32, torch.float32)
        return whole(module, layer, found, cp, plan)

    wanted = SimGroup(1).run(lambda member: one(member, torch.float64))[0]
    for found in SimGroup(3).run(lambda member: one(member, dtype)):
        for each, x in found.items():
            error = (x.double() - wanted[each]).masked_fill(wanted[each].isinf(), 0).norm()
            assert error <= 64 * torch.finfo(dtype).eps * wanted[each].double().nan_to_num(0, 0, 0).norm(), each


@each_layer
@each_package
def test_the_ranks_agree_once_about_a_kind_of_call(package: str, name: str) -> None:
    layer = LAYERS[name]

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member)
        mine = local(module, layer, layer.inputs(), cp, plan)
        asked, gather = [], cp.comm.all_gather_object
        cp.comm.all_gather_object = lambda value: (asked.append(value), gather(value))[1]
        counts: list[int] = []
        for other in ({}, {}, layer.other, {}):
            layer.call(module, **mine, cp=cp, plan=plan, **other)
            counts.append(len(asked))
        kinds = 1 + bool(layer.other)
        assert counts == [layer.agreements * n for n in (1, 1, kinds, kinds)]
        if module is cp_fast:
            with cp_fast.checked():
                layer.call(module, **mine, cp=cp, plan=plan)
            assert len(asked) == counts[-1] + max(layer.agreements, 1)  # a planned call of attention asks nobody

    SimGroup(2).run(one)


@each_with_gradients
@each_package
def test_derivatives_that_are_refused(package: str, name: str) -> None:
    layer = LAYERS[name]

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member)
        mine = local(module, layer, layer.inputs(), cp, plan)

        def call(**changed: torch.Tensor) -> torch.Tensor:
            return layer.call(module, **(mine | changed), cp=cp, plan=plan)[0]

        x = mine[layer.differentiable[0]]
        for power in (1, 2):
            out = call()
            (dx,) = torch.autograd.grad(out.pow(power).sum(), x, create_graph=True)
            for penalty in (dx.sum(), dx.square().sum() + x.pow(3).sum()):
                for each in layer.differentiable:  # from the second on they are on no way of their own
                    with pytest.raises(NotImplementedError, match=r"a gradient of a gradient .* take the difference"):
                        torch.autograd.grad(penalty, mine[each], allow_unused=True, retain_graph=True)
            with pytest.raises(RuntimeError, match="differentiable once"):
                (out.sum() + dx.square().sum()).backward()
        out = call()
        with pytest.raises(NotImplementedError, match=r"is_grads_batched=True.* is not supported"):
            torch.autograd.grad(out, x, torch.stack([torch.ones_like(out)] * 2), is_grads_batched=True)
        constants = [mine[each] for each in layer.constant if mine[each].is_floating_point()]
        for each in constants:
            each.requires_grad_()
        if constants:
            assert not any(g is not None for g in torch.autograd.grad(call().sum(), constants, allow_unused=True))

    SimGroup(2).run(one)


@each_layer
@each_package
def test_transforms_are_refused(package: str, name: str) -> None:
    layer = LAYERS[name]

    def one(member: SimMember) -> None:
        module, cp, plan = made(package, member)
        mine = local(module, layer, layer.inputs(), cp, plan)
        first = next(iter(layer.rows))
        x = mine[first].detach()

        def call(x: torch.Tensor) -> torch.Tensor:
            return layer.call(module, **(mine | {first: x}), cp=cp, plan=plan)[0].sum()

        for transformed in (
            lambda: torch.func.vmap(call)(x[None]),
            lambda: torch.func.grad(call)(x),
            lambda: torch.func.vjp(call, x),
        ):
            with pytest.raises(NotImplementedError, match=r"inside torch\.func"):
                transformed()

    SimGroup(1).run(one)


@each_layer
@each_package
@pytest.mark.parametrize("room", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["fixed", "updated"])
@pytest.mark.one_in(3)
def test_training_uses_what_an_evaluation_made(room: bool, package: str, name: str) -> None:
    """Plans, tables and results of an evaluation serve training, and the reverse."""
    layer = LAYERS[name]

    def one(member: SimMember) -> None:
        more: dict[str, Any] = {"max_sequences": 3, "max_tokens_q": ROWS} if room else {}
        for making in (False, True):
            with torch.inference_mode(making):
                module, cp, plan = made(package, member, **more)
            found: list[torch.Tensor] = []
            for evaluating in (True, False, True):
                with torch.inference_mode(evaluating):
                    if room:
                        plan.update(cp=cp, cu_seqlens_q=CU, cu_seqlens_q_padded=PADDED)
                    mine = local(module, layer, layer.inputs(), cp, plan)
                    if evaluating:
                        found.append(layer.call(module, **mine, cp=cp, plan=plan)[0].clone())
                    else:
                        results = played(layer, module, mine, cp, plan)
                        assert all(results[each].isfinite().all() for each in layer.differentiable)
                        found.append(results["out"])
            with torch.no_grad():
                found.append(layer.call(module, **mine, cp=cp, plan=plan)[0])
            assert all(torch.equal(x, found[0]) for x in found)

    SimGroup(2).run(one)


# ---- processes


def over_gloo(package: str, name: str, comm: str, layout: str, member: Any = None) -> Any:
    """One process, or one rank of a simulated group."""
    layer, group = LAYERS[name], member or dist.group.WORLD
    group = init_device_mesh("cpu", (2, 2)) if comm == "a2a+p2p" and member is None else group
    module, cp, plan = made(package, group, comm, layout, dtype=torch.float64)
    mine = local(module, layer, layer.inputs(torch.float64), cp, plan)
    return {
        each: x.numpy() for each, x in whole(module, layer, played(layer, module, mine, cp, plan), cp, plan).items()
    }


LAYOUTS = {"p2p": "dual_chunk", "all_gather": "dual_chunk", "a2a": "balanced", "a2a+p2p": "contiguous"}
OVER = [(name, comm) for name, layer in LAYERS.items() for comm in layer.comms]


@pytest.mark.parametrize(("name", "comm"), OVER)
@each_package
@pytest.mark.one_in(3)
def test_processes(processes: Callable[[int], Processes], package: str, name: str, comm: str) -> None:
    """Processes compute what one rank does."""
    (wanted,) = SimGroup(1).run(lambda member: over_gloo("cp_ref", name, "all_gather", "contiguous", member))
    for found in processes(4 if comm == "a2a+p2p" else 2).run(over_gloo, package, name, comm, LAYOUTS[comm]):
        assert not isinstance(found, Exception), found
        for each, x in found.items():
            torch.testing.assert_close(torch.from_numpy(x), torch.from_numpy(wanted[each]))


@pytest.fixture(scope="module")
def processes(two: Processes, four: Processes) -> Callable[[int], Processes]:
    """Process groups by size."""
    return {2: two, 4: four}.__getitem__
