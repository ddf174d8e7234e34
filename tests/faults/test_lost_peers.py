"""A rank that is killed, stopped, raises or is out of memory in the middle of anything: the others end within the
time-out, and name it.

The groups are parts of a larger job, so that a rank of the group is another one of the job. The four faults of a place
are played at once, as most of their time is spent waiting.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cp_fast
from cp_ref.groups.collectives import all_reduce_max
from cp_ref.groups.process_groups import ProcessMember
from tests.dist.workers import CONTEXT

pytestmark = pytest.mark.faults

LIMIT = 6.0  # seconds of the groups' time-out
# the group's ranks in the job, in another order; who is lost: one of the others is no neighbour in the ring
RING, LOST = (3, 1, 2, 4), 2

FAULTS: dict[str, Callable[[], None]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exception": lambda: (_ for _ in ()).throw(ZeroDivisionError("in the middle")),
    "out of memory": lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory is left")),
}


class Fails:
    """A member whose next message, once armed, is its last."""

    def __init__(self, member: ProcessMember, armed: list[str]) -> None:
        self._member, self._armed = member, armed
        self.rank, self.size, self.ranks = member.rank, member.size, member.ranks

    def exchange(self, sends: Any, recvs: Any) -> Any:
        self._fail()
        return self._member.exchange(sends, recvs)

    def all_gather_object(self, value: Any) -> list[Any]:
        self._fail()
        return self._member.all_gather_object(value)

    def _fail(self) -> None:
        if self._armed:
            FAULTS[self._armed[0]]()


SIZES: dict[str, Any] = {"heads_q": 8, "heads_kv": 8, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}


def play(cp: cp_fast.ContextParallel, phase: str, arm: Callable[[], None]) -> None:
    """All that a training step calls; `arm` before one phase."""

    def begins(name: str) -> None:
        if name == phase:
            arm()

    cu = torch.tensor([0, 12 * cp.size], dtype=torch.int32)
    how: dict[str, Any] = {"cp": cp, "qkv_format": "thd", "cu_seqlens_q": cu}
    x = torch.randn(12, 8, 8, requires_grad=True)
    begins("make_plan")
    plan = cp_fast.make_plan(**how, **SIZES, max_sequences=2, return_max_logit=True)
    begins("update")
    plan.update(cp=cp, cu_seqlens_q=cu)
    begins("forward")
    out = cp_fast.attention(x, x, x, cp=cp, plan=plan)
    begins("backward")
    out.sum().backward()
    begins("without a plan")
    cp_fast.attention(x, x, x, **how)
    begins("unshard")
    cp_fast.unshard(x.detach(), cp=cp, qkv_format="thd", cu_seqlens_padded=cu)
    begins("reduction")
    if phase == "reduction":
        all_reduce_max(cp.comm, x.detach()[0])


def _main(rank: int, store: str, comm: Any, phase: str, fault: str, results: Any) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT)
    size = 4 if comm == "a2a+p2p" else 5
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    dist.barrier()  # rank 0 is done at once, and must not leave before all are connected
    armed: list[str] = []

    def member(kind: int) -> Any:
        made: list[Any] = [dist.new_group(list(ranks), timeout=limit) for ranks in GROUPS[kind]]
        mine = next(group for ranks, group in zip(GROUPS[kind], made, strict=True) if rank in ranks)
        return Fails(ProcessMember(mine), armed) if rank == LOST else ProcessMember(mine)

    began = time.monotonic()
    try:
        group = (member(1), member(2)) if comm == "a2a+p2p" else member(0)
        cp = cp_fast.ContextParallel(group, comm)
        if rank in GROUPS[0][0] or comm == "a2a+p2p":
            began = time.monotonic()
            play(cp, phase, (lambda: armed.append(fault)) if rank == LOST else lambda: None)
        results.put((rank, "finished", time.monotonic() - began))
    except BaseException as error:
        results.put((rank, f"{type(error).__name__}: {error}", time.monotonic() - began))
    results.close()
    results.join_thread()
    os._exit(0)


# by kind: a ring that leaves rank 0 out (which has a group of its own), rows and columns
GROUPS: dict[int, list[tuple[int, ...]]] = {0: [RING, (0,)], 1: [(0, 1), (2, 3)], 2: [(0, 2), (1, 3)]}

AGREEMENT = "an agreement on a plan"
PLACES = [
    *((comm, phase, f"attention, {phase}: {phase}, step 0 of ")
      for comm in ("p2p", "all_gather", "a2a", "a2a+p2p") for phase in ("forward", "backward")),
    *(("p2p", phase, AGREEMENT) for phase in ("make_plan", "update", "without a plan")),
    ("a2a+p2p", "make_plan", AGREEMENT),
    ("p2p", "unshard", "unshard: global rank"),
    ("p2p", "reduction", "a maximum over all ranks: global rank"),
]  # fmt: skip


@pytest.mark.parametrize(("comm", "phase", "where"), PLACES)
def test_the_others_end_and_name_it(comm: str, phase: str, where: str) -> None:
    survivors, size = ({0, 1, 3}, 4) if comm == "a2a+p2p" else ({1, 3, 4}, 5)
    with tempfile.TemporaryDirectory() as folder:
        results, processes = {}, []
        for fault in FAULTS:
            results[fault] = CONTEXT.Queue()
            arguments = (str(Path(folder) / fault.replace(" ", "-")), comm, phase, fault, results[fault])
            processes += [CONTEXT.Process(target=_main, args=(rank, *arguments)) for rank in range(size)]
        for process in processes:
            process.start()
        said: dict[str, dict[int, tuple[str, float]]] = {fault: {} for fault in FAULTS}
        for fault, found in said.items():
            while not survivors <= set(found):
                rank, text, seconds = results[fault].get(timeout=120)
                found[rank] = text, seconds
        for process in processes:
            process.kill()
            process.join(timeout=60)
    for fault, found in said.items():
        texts = {rank: found[rank][0] for rank in survivors}
        assert all(text.startswith("PeerError: ") for text in texts.values()), (fault, texts)
        assert any(where in text for text in texts.values()), (fault, texts)
        assert all(f"global rank {LOST} does not answer" in text for text in texts.values()), (fault, texts)
        assert max(found[rank][1] for rank in survivors) < 3 * LIMIT + 20, (fault, found)
