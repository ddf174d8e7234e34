"""The memory that the ranks of a group share, and its trial."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from cp_fast.tools.log import log
from cp_fast.transport.peer_exchange import PeerMessages, Shared
from cp_fast.transport.streams import CudaStreams
from cp_fast.transport.watch import Watch
from cp_ref.common.groups.process_groups import ProcessMember
from cp_ref.spec import Parcel

__all__ = ["share"]

_WORDS = 4096  # Bytes in front of the staging buffers, for words.
_GRACE = 5.0  # Seconds for a process to end by itself after a lost peer.
_TRIAL = 20.0  # Seconds for the trial of a new group.


def share(member: ProcessMember, sizes: tuple[int, ...], device: torch.device) -> tuple[PeerMessages | None, str]:
    """Share staging buffers of these sizes, and try them. Collective: all ranks get messages, or all get the reason for
    the failure.
    """
    with torch.cuda.device(device):
        made, reason = _attempt(member, "sharing memory", lambda: _memory(sizes))
        messages = None
        if reason is None:
            messages, reason = _attempt(member, "mapping the peers' memory", lambda: _messages(member, made, sizes))
        if reason is None:
            assert messages is not None
            _, reason = _attempt(member, "the trial of it", lambda: _try(messages, device))
        if reason is not None:
            return None, reason
        _first_messages(member, device)
    return messages, ""


def _attempt(member: ProcessMember, what: str, act: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result of `act`, or the error of some rank: either on all ranks."""
    found, reason = None, None
    try:
        found = act()
    except Exception as error:  # After any error the ranks stay together.
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for rank, its in enumerate(member.all_gather_object(reason)):
        if its is not None:
            return None, f"{what} failed on rank {rank}: {its}"
    return found, None


def _memory(sizes: tuple[int, ...]) -> torch.Tensor:
    from torch.distributed import _symmetric_memory as symmetric  # Its dependencies are not on every machine.

    made = symmetric.empty(_WORDS + sum(sizes), dtype=torch.uint8, device=torch.device("cuda"))
    made[:_WORDS].zero_()
    torch.cuda.synchronize()
    return made


def _messages(member: ProcessMember, memory: torch.Tensor, sizes: tuple[int, ...]) -> PeerMessages:
    from torch.distributed import _symmetric_memory as symmetric

    before = os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # Nothing here needs it.
    try:
        handle = symmetric.rendezvous(memory, member.group)
    finally:
        if before is None:
            del os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"]
    ranks = range(member.size)
    buffers = [handle.get_buffer(rank, (memory.numel(),), torch.uint8, 0) for rank in ranks]
    first = [x.data_ptr() for x in buffers]

    def word(rank: int, number: int) -> int:
        return first[rank] + 4 * number

    here = member.rank
    assert 8 * member.size <= _WORDS
    shared = Shared(
        [address + _WORDS for address in first],
        ready=[word(here, sender) for sender in ranks],
        ready_of=[word(receiver, here) for receiver in ranks],
        done=[word(here, member.size + receiver) for receiver in ranks],
        done_of=[word(sender, member.size + here) for sender in ranks],
        sizes=sizes,
        words=buffers[here][:_WORDS].view(torch.int32),
        keeps=(handle, memory, buffers),
    )
    ended = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
    seen = ended.numpy()
    names = [f"global rank {rank}" for rank in dist.get_process_group_ranks(member.group)]
    watch = Watch(names, here, _limit(member), lambda: int(seen[0]), ended.data_ptr(), _Stop(memory.device))
    return PeerMessages(member, shared, CudaStreams(memory.device), watch)


def _limit(member: ProcessMember) -> float:
    """Seconds of the group's time-out."""
    options: Any = member.group._get_backend(torch.device("cuda")).options
    return options._timeout.total_seconds()


class _Stop:
    """End all work of a GPU with an error; end the process if that does not free the host. Everything that it uses is
    loaded and allocated beforehand: while a stream waits, CUDA may load and allocate nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._never = torch.zeros((), dtype=torch.bool, device=device)
        torch.ops.aten._assert_async.msg(~self._never, "cp_fast: loaded before it is needed")
        torch.cuda.synchronize(device)

    def __call__(self, complaint: str) -> None:
        end = threading.Timer(_GRACE, _end_process)  # In a separate thread: the next lines may also wait for ever.
        end.daemon = True
        end.start()
        with suppress(RuntimeError), torch.cuda.stream(self._stream):
            torch.ops.aten._assert_async.msg(self._never, f"cp_fast: {complaint}")


def _end_process() -> None:
    log(f"the process did not end within {_GRACE:g} s of that, and is ended")
    os._exit(1)


def _try(messages: PeerMessages, device: torch.device) -> None:
    """Send and receive a few bytes, different ones each time, and wait for them; no stream is left waiting."""
    others = [rank for rank in range(messages.size) if rank != messages.rank]
    for turn in range(3):
        sends, recvs = [], []
        for peer in others:
            mine = torch.arange(64, dtype=torch.int32, device=device) + 1000 * messages.rank + 100 * peer + turn
            sends.append(Parcel(peer, 0, mine))
            recvs.append(Parcel(peer, 0, torch.full((64,), -1, dtype=torch.int32, device=device)))
        messages.exchange(sends, recvs).wait()
        done = torch.cuda.current_stream().record_event()
        until = time.monotonic() + _TRIAL
        while not done.query():
            if time.monotonic() > until:
                with torch.cuda.stream(torch.cuda.Stream()):
                    messages.release()
                raise RuntimeError(f"nothing came within {_TRIAL:g} s")
            time.sleep(1e-3)
        for parcel in recvs:
            expected = torch.arange(64, dtype=torch.int32, device=device)
            expected += 1000 * parcel.peer + 100 * messages.rank + turn
            if not torch.equal(parcel.tensor, expected):
                raise RuntimeError(f"what came from rank {parcel.peer} is not what it sent")


def _first_messages(member: ProcessMember, device: torch.device) -> None:
    """Send one small group message between every two ranks, so that NCCL connects them now, and not during the capture
    of a CUDA graph.
    """
    others = [rank for rank in range(member.size) if rank != member.rank]
    sends = [Parcel(peer, 0, torch.zeros(1, device=device)) for peer in others]
    member.exchange(sends, [Parcel(peer, 0, torch.zeros(1, device=device)) for peer in others]).wait()
