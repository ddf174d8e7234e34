"""DTensors: taken as their local part where the context's group shards their sequence in natural order, refused by name
elsewhere. Of a DTensor q results are DTensors.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from tests.dist.workers import Processes

PACKAGES = pytest.mark.parametrize("package", ["cp_ref", "cp_fast"])


def local(rank: int) -> list[torch.Tensor]:
    """One rank's q, k and v, bshd."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 4, 2, 8, generator=generator, dtype=torch.float64) for _ in range(3)]


def attend_twice(package: str, comm: str) -> None:
    """The same results and gradients from DTensors as from their local parts."""
    impl, mesh = importlib.import_module(package), init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    cp = impl.ContextParallel(mesh if comm == "a2a+p2p" else mesh["inner"], comm, layout="contiguous")
    placements = [Shard(1 if comm == "a2a+p2p" else 0), Shard(1)]  # else two data parallel replicas share the batch
    plain = [x.requires_grad_() for x in local(dist.get_rank())]
    wrapped = [DTensor.from_local(x.detach().clone(), mesh, placements).requires_grad_() for x in plain]
    out, other = impl.attention(*plain, cp=cp), impl.attention(*wrapped, cp=cp)
    assert isinstance(other, DTensor)
    assert other.placements == tuple(placements)
    assert other.shape == wrapped[0].shape
    out.square().sum().backward()
    other.square().sum().backward()
    for x, y in zip(plain, wrapped, strict=True):
        assert isinstance(y.grad, DTensor)
        assert y.grad.placements == tuple(placements)
        assert torch.equal(x.grad, y.grad.to_local())  # pyright: ignore[reportArgumentType]
    assert torch.equal(out, other.to_local())


@PACKAGES
@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "a2a+p2p"])
@pytest.mark.one_in(3)
def test_the_local_part_of_a_shard_is_taken(four: Processes, package: str, comm: str) -> None:
    assert four.run(attend_twice, package, comm) == [None] * 4


PLACED: dict[str, list[Placement]] = {
    "replicated": [Replicate(), Replicate()],
    "of another axis": [Replicate(), Shard(2)],
    "not added up": [Partial(), Shard(1)],
    "sharded by others": [Shard(1), Shard(1)],
    "of the other dimension": [Shard(1), Replicate()],
}


def misplaced(package: str, placements: list[Placement], planned: bool) -> str:
    """What is said; then the group works on, which it would not with a message left over."""
    impl, mesh = importlib.import_module(package), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp, (q, k, v) = impl.ContextParallel(mesh["cp"], layout="contiguous"), local(dist.get_rank())
    sizes: dict[str, Any] = {"batch_size": 2, "seqlen_q": 8, "heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8}
    plan = {"plan": impl.make_plan(cp=cp, dtype=q.dtype, device="cpu", **sizes)} if planned else {}
    with pytest.raises(ValueError, match="k is a DTensor") as caught:
        impl.attention(q, DTensor.from_local(k, mesh, placements), v, cp=cp, **plan)
    impl.attention(q, k, v, cp=cp, **plan)
    return str(caught.value)


@PACKAGES
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("placements", PLACED.values(), ids=PLACED.keys())
@pytest.mark.one_in(3)
def test_other_placements_are_refused_by_name(
    four: Processes, package: str, placements: list[Placement], planned: bool
) -> None:
    for said in four.run(misplaced, package, placements, planned):
        assert isinstance(said, str), said
        assert "shards axis 1, the sequence" in said


def a_sink_as_a_dtensor(package: str) -> None:
    impl, mesh = importlib.import_module(package), init_device_mesh("cpu", (4,))
    offset = DTensor.from_local(torch.zeros(2, dtype=torch.float64), mesh, [Replicate()])
    cp = impl.ContextParallel(mesh)
    with pytest.raises(TypeError, match="softmax_offset is a DTensor"):
        impl.attention(*local(dist.get_rank()), cp=cp, softmax_type="learnable", softmax_offset=offset)


@PACKAGES
def test_a_sink_is_no_dtensor(four: Processes, package: str) -> None:
    assert four.run(a_sink_as_a_dtensor, package) == [None] * 4


def inside_a_graph() -> None:
    """Refused by name where all of it has to be one graph; else taken, outside of one."""
    cp_fast, mesh = importlib.import_module("cp_fast"), init_device_mesh("cpu", (4,))
    cp, (q, _, _) = cp_fast.ContextParallel(mesh, layout="contiguous"), local(dist.get_rank())
    sizes: dict[str, Any] = {"batch_size": 2, "seqlen_q": 16, "heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8}
    plan = cp_fast.make_plan(cp=cp, dtype=q.dtype, device="cpu", **sizes)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return cp_fast.attention(x, x, x, cp=cp, plan=plan)

    sharded = DTensor.from_local(q, mesh, [Shard(1)])
    with pytest.raises(Exception, match="looks at DTensors there"):
        torch.compile(attend, fullgraph=True, backend="aot_eager")(sharded)
    torch._dynamo.reset()
    compiled: Any = torch.compile(attend, backend="aot_eager")
    assert torch.equal(compiled(sharded).to_local(), attend(q))


@pytest.mark.thorough
def test_a_graph_takes_local_tensors(four: Processes) -> None:
    assert four.run(inside_a_graph) == [None] * 4


def in_natural_order(package: str) -> list[str]:
    """A batch that DTensor itself distributes: right in a layout of equal stretches, refused in all others."""
    impl, mesh = importlib.import_module(package), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 16, h, 8, generator=generator, dtype=torch.float64) for h in (4, 2, 2)]
    oracle = importlib.import_module("cp_ref").dense_attention
    out, lse, max_logit = oracle(*whole)
    q, k, v = (distribute_tensor(x, mesh, [Shard(0), Shard(1)]) for x in whole)
    cp = impl.ContextParallel(mesh["cp"], layout="contiguous")
    found = impl.attention(q, k, v, cp=cp, return_lse=True, return_max_logit=True)
    placed = [tuple(map(str, x.placements)) for x in found]
    assert placed == [("S(0)", "S(1)"), ("S(0)", "S(2)"), ("P(max)", "R")], placed
    for x, y in zip(found, (out, lse, max_logit), strict=True):
        torch.testing.assert_close(x.full_tensor(), y)
    said: list[str] = []
    for layout in ("dual_chunk", "balanced"):
        other = impl.ContextParallel(mesh["cp"], layout=layout)
        with pytest.raises(ValueError, match="equal stretches of the sequence") as caught:
            impl.attention(q, k, v, cp=other)
        said.append(str(caught.value))
    packed = distribute_tensor(whole[0].flatten(0, 1), mesh["cp"], [Shard(0)])
    cu = torch.tensor([0, 11, 32])
    found = impl.attention(packed, packed, packed, cp=cp, qkv_format="thd", cu_seqlens_q=cu)
    alike = [whole[0].flatten(0, 1)] * 3
    torch.testing.assert_close(found.full_tensor(), oracle(*alike, qkv_format="thd", cu_seqlens_q=cu)[0])
    return said


@PACKAGES
def test_a_dtensor_in_natural_order(four: Processes, package: str) -> None:
    for said in four.run(in_natural_order, package):
        assert ["layout is 'dual_chunk'" in said[0], "layout is 'balanced'" in said[1]] == [True, True], said


def moved(package: str) -> None:
    """A sharded DTensor as its local part, with another mesh dimension over the batch and hidden sizes."""
    impl, mesh = importlib.import_module(package), init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "cp"))
    cp = impl.ContextParallel(mesh["cp"], layout="contiguous")
    plain = torch.arange(16.0).view(2, 4, 2).add(100 * dist.get_rank()).requires_grad_()
    for outer in (Shard(0), Shard(2), Replicate()):
        placements = [outer, Shard(1)]
        wrapped = DTensor.from_local(plain.detach().clone(), mesh, placements, run_check=False).requires_grad_()
        whole, rolled = impl.unshard(wrapped, cp=cp), impl.roll(wrapped, -1, cp=cp, fill_value=7)
        assert not isinstance(whole, DTensor)
        assert torch.equal(whole, impl.unshard(plain, cp=cp))
        assert isinstance(rolled, DTensor)
        assert (rolled.shape, rolled.placements) == (wrapped.shape, tuple(placements))
        expected = impl.roll(plain, -1, cp=cp, fill_value=7)
        assert torch.equal(rolled.to_local(), expected)
        (mine,) = torch.autograd.grad(expected.square().sum(), plain)
        (grad,) = torch.autograd.grad(rolled.to_local().square().sum() + 0 * whole.sum(), wrapped)
        assert isinstance(grad, DTensor)
        assert torch.equal(grad.to_local(), mine)
    sizes: dict[str, Any] = {"batch_size": 2, "seqlen_q": 8, "heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8}
    plan = impl.make_plan(cp=cp, dtype=plain.dtype, device="cpu", **sizes)
    assert torch.equal(impl.unshard(wrapped, cp=cp, plan=plan), impl.unshard(plain, cp=cp))


@PACKAGES
def test_a_shard_is_gathered_and_rolled(four: Processes, package: str) -> None:
    assert four.run(moved, package) == [None] * 4


def refused(package: str) -> None:
    """By name on all ranks, though one rank alone gives the DTensor; then the group works on."""
    impl, mesh = importlib.import_module(package), init_device_mesh("cpu", (2,))
    cp, rank = impl.ContextParallel(mesh, layout="contiguous"), dist.get_rank()
    x, ids = torch.arange(8.0)[None], torch.arange(8)[None]
    copy, cu = DTensor.from_local(x, mesh, [Replicate()], run_check=False), torch.tensor([0, 4, 8])
    one = copy if rank else x
    calls: list[tuple[str, bool, Any]] = [
        ("x is a DTensor placed .*Replicate.*mesh dimension 0", True, lambda: impl.unshard(one, cp=cp)),
        ("x is a DTensor placed .*Replicate.*mesh dimension 0", True, lambda: impl.roll(one, 1, cp=cp)),
        ("x is a DTensor; .*full_tensor", False, lambda: impl.shard(copy, cp=cp)),
        (r"batch\['x'\] is a DTensor", False, lambda: impl.thd.get_batch_on_this_cp_rank({"x": copy}, cp=cp)),
        ("x is a DTensor", False, lambda: impl.thd.thd_read_half_tensor(copy[0], cu, 0)),
        ("out is a DTensor", False, lambda: impl.thd.trim_out(copy, 1)),
    ]
    spread = DTensor.from_local(cu, mesh, [Replicate()], run_check=False)
    packed: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_padded": spread}
    named = "cu_seqlens_padded is a DTensor"
    calls += [
        (named, False, lambda: impl.position_ids(cp=cp, **packed)),
        (named, False, lambda: impl.shard(x[0], cp=cp, **packed)),
        (named, False, lambda: impl.thd.thd_get_partitioned_indices(spread, 8, 2, 0)),
        (named, True, lambda: impl.roll(x[0], 1, cp=cp, **packed | ({} if rank else {"cu_seqlens_padded": cu}))),
    ]
    if package == "cp_fast":
        token_batches = importlib.import_module("cp_fast.integrations.token_batches")
        wide = DTensor.from_local(ids, mesh, [Replicate()], run_check=False) if rank else ids
        part = token_batches.shard_tokens({"input_ids": ids}, cp=cp)
        calls += [
            ("input_ids is a DTensor", True, lambda: token_batches.shard_tokens({"input_ids": wide}, cp=cp)),
            ("x is a DTensor", False, lambda: part["cp_batch"].shard(copy)),
            ("x is a DTensor", True, lambda: part["cp_batch"].unshard(one[:, :4])),
        ]
    for said, collective, call in calls:
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        heard = "" if rank or not collective else "(global )?rank 1 refused its arguments.*"
        assert re.match(heard + said, str(caught.value)), (said, str(caught.value))
    mine = impl.shard(x, cp=cp)
    assert torch.equal(impl.unshard(mine, cp=cp), x)


@PACKAGES
def test_other_dtensors_are_refused_by_the_helpers(two: Processes, package: str) -> None:
    assert two.run(refused, package) == [None] * 2
