"""DTensors: taken as their local part where the context's group shards their sequence in natural order, refused by name
elsewhere. Of a DTensor q results are DTensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
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
def test_other_placements_are_refused_by_name(
    four: Processes, package: str, placements: list[Placement], planned: bool
) -> None:
    for said in four.run(misplaced, package, placements, planned):
        assert isinstance(said, str), said
        assert "shards axis 1, the sequence" in said


def a_sink_as_a_dtensor(package: str) -> None:
    impl, mesh = importlib.import_module(package), init_device_mesh("cpu", (4,))
    offset = DTensor.from_local(torch.zeros(2, dtype=torch.float64), mesh, [Replicate()])
    with pytest.raises(TypeError, match="softmax_offset is a DTensor"):
        cp = impl.ContextParallel(mesh)
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
