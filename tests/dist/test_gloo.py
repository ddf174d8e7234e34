"""Both implementations over real gloo processes: the same code as over the simulated group, the oracle's results."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cp_ref import SimGroup, Trace, compare, dense_attention, trace
from tests.dist.workers import Processes
from tests.marks import HANGS_S


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A packed batch of 3 sequences (24, 0 and 30 tokens in 24, 0 and 48 slots), 4 heads over 2, d 8 and 6."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {"q": draw(72, 4, 8), "k": draw(72, 2, 8), "v": draw(72, 2, 6), "dout": draw(72, 4, 6)}


@pytest.fixture(scope="module")
def groups() -> Iterator[Callable[[int], Processes]]:
    """Process groups by size, each started once."""
    started: dict[int, Processes] = {}

    def of_size(size: int) -> Processes:
        if size not in started:
            started[size] = Processes(size)
        return started[size]

    yield of_size
    for group in started.values():
        group.close()


Groups = Callable[[int], Processes]
CU = torch.tensor([0, 24, 24, 54], dtype=torch.int32)
PADDED = torch.tensor([0, 24, 24, 72], dtype=torch.int32)


def squared(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    """A score_mod that reads every place."""
    return score - 0.1 * table[h] * score**2 + 0.01 * b * (q_idx - kv_idx)


OF_CALL: dict[str, Any] = {
    "alibi_slopes": torch.linspace(0.1, 0.9, 12).view(3, 4),
    "aux_tensors": {"table": torch.linspace(-1.0, 1.0, 4)},
    "dropout_seed": 2**40 + 3,
}
PLACES: dict[str, Any] = {"score_mod": squared, "dropout_p": 0.3, **OF_CALL}


def play(
    package: str, dtype: torch.dtype, arguments: dict[str, Any], layout: str, planned: bool, member: Any = None
) -> dict[str, Any]:
    """One rank (of a simulated group, if `member` is given): forward and backward, and the global results."""
    impl = importlib.import_module(package)
    arguments = dict(arguments)
    comm = arguments.pop("cp_comm_type", "p2p")
    group = member or dist.group.WORLD
    if comm == "a2a+p2p":
        group = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    cp = impl.ContextParallel(group, comm, layout=layout)
    split = {"cp": cp, "qkv_format": "thd", "cu_seqlens_padded": PADDED}
    local = {name: impl.shard(x, **split) for name, x in tensors(dtype).items()}
    q, k, v = (local[name].requires_grad_() for name in "qkv")
    of_call = {name: arguments.pop(name) for name in OF_CALL if name in arguments}
    problem = {"qkv_format": "thd", "cu_seqlens_q": CU, "cu_seqlens_q_padded": PADDED, **arguments}
    if planned:
        sizes = {"heads_q": 4, "heads_kv": 2, "d_qk": 8, "d_v": 6}
        plan = impl.make_plan(cp=cp, dtype=dtype, device="cpu", **sizes, **problem)
        out, lse = impl.attention(q, k, v, cp=cp, plan=plan, return_lse=True, **of_call)
    else:
        out, lse = impl.attention(q, k, v, cp=cp, return_lse=True, **problem, **of_call)
    out.backward(local["dout"])
    results = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    whole = {name: impl.unshard(x, **split) for name, x in results.items()}
    whole["lse"] = impl.unshard(lse.detach().t().contiguous(), **split).t()
    return {name: x.to(torch.float64).numpy() for name, x in whole.items()}


CASES = [  # of p2p; `tests.layers.test_uses` has every schedule
    ("cp_ref", 2, "dual_chunk", {}, False),
    ("cp_ref", 3, "contiguous", {"window_size": (7, 0)}, True),
    ("cp_fast", 2, "dual_chunk", {}, True),
    ("cp_fast", 3, "dual_chunk", {"attn_mask_type": "padding", "window_size": (5, 3)}, False),
    ("cp_fast", 3, "contiguous", {"softmax_type": "off-by-one"}, True),
    ("cp_ref", 4, "dual_chunk", {"softcap": 3.0}, False),
    ("cp_fast", 4, "contiguous", {"window_size": (9, 0)}, False),
    ("cp_ref", 2, "dual_chunk", PLACES, False),
    ("cp_fast", 2, "dual_chunk", PLACES, False),
    ("cp_fast", 4, "contiguous", {"cp_comm_type": "a2a+p2p", **PLACES}, True),
]


@pytest.mark.parametrize(("package", "size", "layout", "arguments", "planned"), CASES)
@pytest.mark.one_in(3)
def test_against_the_oracle(
    groups: Groups, package: str, size: int, layout: str, arguments: dict[str, Any], planned: bool
) -> None:
    results = groups(size).run(play, package, torch.float64, arguments, layout, planned)
    inputs = tensors(torch.float64)
    q, k, v = (inputs[name].requires_grad_() for name in "qkv")
    problem = {name: value for name, value in arguments.items() if name != "cp_comm_type"}
    out, lse, _ = dense_attention(q, k, v, qkv_format="thd", cu_seqlens_q=CU, cu_seqlens_q_padded=PADDED, **problem)
    out.backward(inputs["dout"])
    exact = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    for rank, found in enumerate(results):
        assert not isinstance(found, Exception), (rank, found)
        for name, x in exact.items():
            assert x is not None
            torch.testing.assert_close(torch.from_numpy(found[name]), x.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_travels(groups: Groups, dtype: torch.dtype) -> None:
    results = groups(2).run(play, "cp_fast", dtype, {}, "dual_chunk", False)
    inputs = tensors(dtype)
    out, _, _ = dense_attention(
        *(inputs[name] for name in "qkv"), qkv_format="thd", cu_seqlens_q=CU, cu_seqlens_q_padded=PADDED
    )
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(torch.from_numpy(results[0]["out"]), out, rtol=tolerance, atol=tolerance)


def record(folder: str) -> None:
    """One rank of a traced call; every process saves its own part."""
    with trace() as recorded:
        play("cp_ref", torch.float64, {}, "dual_chunk", False)
    recorded.save(f"{folder}/{dist.get_rank()}.pt")


def test_traces_of_processes_come_together(groups: Groups, tmp_path: Path) -> None:
    """The parts of two processes make the trace that the simulated group records at once."""
    for found in groups(2).run(record, str(tmp_path)):
        assert found is None
    processes = Trace.load(str(tmp_path / "*.pt"))
    assert list(processes.ranks()) == [0, 1]
    with trace() as simulated:
        SimGroup(2).run(lambda member: play("cp_ref", torch.float64, {}, "dual_chunk", False, member))
    result = compare(processes, simulated)
    assert result, str(result)


def disagree(package: str, how: str) -> None:
    """Rank 1 alone differs from the others."""
    impl = importlib.import_module(package)
    cp = impl.ContextParallel(dist.group.WORLD)
    odd = cp.rank == 1
    x = torch.zeros(1, 4, 2, 8)
    k = torch.zeros(1, 4, 3 if odd and how == "bad" else 2, 8)
    impl.attention(x, k, k, cp=cp, attn_mask_type="no_mask" if odd and how == "other" else "causal")


@pytest.mark.parametrize("package", ["cp_ref", "cp_fast"])
@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("bad", "rank 1 refused its arguments.*h_q is 2 and h_kv is 3", "^h_q is 2 and h_kv is 3"),
        (
            "other",
            "rank 0 has .*where rank 1 has attn_mask_type='no_mask'",
            "rank 1 has attn_mask_type='no_mask' where",
        ),
    ],
)
def test_ranks_that_differ_find_out_together(groups: Groups, package: str, how: str, first: str, second: str) -> None:
    for rank, error in enumerate(groups(2).run(disagree, package, how)):
        with pytest.raises(ValueError, match=second if rank == 1 else first):
            raise error


def cross(package: str) -> None:
    """The same group twice is no grid."""
    importlib.import_module(package).ContextParallel((dist.group.WORLD, dist.group.WORLD), "a2a+p2p")


@pytest.mark.parametrize("package", ["cp_ref", "cp_fast"])
def test_a_pair_of_groups_crosses_in_one_rank(groups: Groups, package: str) -> None:
    for error in groups(2).run(cross, package):
        with pytest.raises(ValueError, match=r"^group is a pair of groups with ranks \[0, 1\] in common"):
            raise error


def gather_bytes(package: str) -> None:
    """8-bit floats, bits, unsigned integers, bools and complex numbers of every rank on every rank, and shifted across
    ranks.
    """
    impl = importlib.import_module(package)
    cp = impl.ContextParallel(dist.group.WORLD)
    dtypes = torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.int16, torch.bfloat16, torch.complex64
    for dtype in (*dtypes, torch.uint16, torch.uint32, torch.uint64):
        x = (torch.arange(16).reshape(2, 8) % 3).to(dtype)
        most = 1 if dtype.itemsize == 1 or dtype.is_complex or dtype.is_floating_point else torch.iinfo(dtype).max
        found = impl.unshard(impl.shard(x, cp=cp), cp=cp)
        assert found.dtype == dtype
        assert found.tolist() == x.tolist()
        shifted = impl.unshard(impl.roll(impl.shard(x, cp=cp), -1, cp=cp, fill_value=most), cp=cp)
        assert shifted.dtype == dtype
        assert shifted.tolist() == [[*row[1:], most] for row in x.tolist()]


@pytest.mark.parametrize("package", ["cp_ref", "cp_fast"])
def test_slices_of_any_dtype_are_put_together(groups: Groups, package: str) -> None:
    assert groups(2).run(gather_bytes, package) == [None, None]


def balance(package: str) -> None:
    """Documents that need not divide, cut by a plan, shifted by one token, and put together again."""
    impl = importlib.import_module(package)
    cp = impl.ContextParallel(dist.group.WORLD, layout="balanced")
    lengths, sizes = torch.tensor([0, 24, 25, 54]), {"heads_q": 4, "heads_kv": 2, "d_qk": 8, "d_v": 8}
    problem = {"qkv_format": "thd", "cu_seqlens_q": lengths}
    plan = impl.make_plan(cp=cp, dtype=torch.float64, device="cpu", **sizes, **problem)
    q, k, v = (torch.randn(54, h, 8, generator=torch.Generator().manual_seed(h)).double() for h in (4, 2, 2))
    out = impl.attention(*(impl.shard(x, cp=cp, plan=plan) for x in (q, k, v)), cp=cp, plan=plan)
    whole = impl.unshard(out, cp=cp, plan=plan)
    torch.testing.assert_close(whole, dense_attention(q, k, v, **problem)[0], atol=1e-10, rtol=1e-10)
    ids = torch.arange(54)
    labels = impl.roll(impl.shard(ids, cp=cp, plan=plan), -1, cp=cp, plan=plan, fill_value=-100)
    want = ids + 1
    want[[23, 24, 53]] = -100
    assert torch.equal(impl.unshard(labels, cp=cp, plan=plan), want)


@pytest.mark.parametrize("package", ["cp_ref", "cp_fast"])
def test_documents_of_any_length(groups: Groups, package: str) -> None:
    assert groups(2).run(balance, package) == [None, None]


KEPT = """
import torch, torch.distributed as dist
from cp_ref import ContextParallel
from cp_fast import ContextParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
from torch.distributed.nn.functional import all_reduce
assert dist.group.WORLD not in all_reduce.__defaults__
"""


@pytest.mark.thorough
def test_an_optimizer_keeps_no_group() -> None:
    """A default argument of PyTorch's would: a group that outlives the interpreter aborts the process."""
    subprocess.run([sys.executable, "-c", KEPT], check=True, timeout=HANGS_S)
