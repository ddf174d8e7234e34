"""A peer that dies in the middle of a call: the others get an error that names the step and the peer, and end."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cp_fast
import cp_ref
from cp_ref.contract.process_groups import ProcessMember
from tests.dist.workers import CONTEXT
from tests.marks import HANGS_S

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
