"""Find the groups whose ranks can reach the peers' memory, and choose a plan's transport."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cp_fast.log import log, log_once
from cp_fast.runtime.prepared_exchange import Exchange, Located, MessageSpec, by_tag, places, prepare
from cp_fast.transport.peer_exchange import PeerMessages, SharedMemory, staging_sizes
from cp_fast.transport.streams import CudaStreams, why_not_driver
from cp_fast.transport.watch import Watch
from cp_ref.groups.group import Group, PairGroup, Parcel, Pending
from cp_ref.groups.process_groups import ProcessMember
from cp_ref.problems.room import Room
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.values import check_choice

__all__ = [
    "VARIABLE",
    "Crossed",
    "carried_by",
    "carries",
    "messages_for",
    "share",
    "why_not",
]

# ---- memory that peers open
#
# The memory that the ranks of a group share, and its trial.


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
    shared = SharedMemory(
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


# ---- messages of both directions
#
# Two groups that cross in a rank, at least one of them with messages through peer memory.


_Part = tuple[Group, Exchange, list[int], list[int]]  # In one of the groups; the places of its sends and receives.


class Crossed(PairGroup):
    """An a2a and a p2p group: each message goes in the group that its peer shares with this rank."""

    def prepared(self, where: str, sends: Sequence[MessageSpec], recvs: Sequence[MessageSpec]) -> Exchange:
        """See `cp_fast.runtime.prepared_exchange.Prepares`."""
        parts = list[_Part]()
        for number, group in enumerate((self.a2a, self.p2p)):
            out, back = self._of(number, sends), self._of(number, recvs)
            if out or back:
                exchange = prepare(group, where, *([x.message for x in some] for some in (out, back)))
                parts.append((group, exchange, places(out), places(back)))
        return _Both(parts)

    def _of(self, number: int, messages: Sequence[MessageSpec]) -> list[Located]:
        """The messages in one of the groups, with the ranks there."""
        found: list[Located] = []
        for message, first in by_tag(messages):
            some = self._split([Parcel(message.peer, message.tag, None)])[number]
            found += [Located(message._replace(peer=parcel.peer), first) for parcel in some]
        return found


class _Both:
    """Exchanges in two groups as one."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts

    def post(self, group: Group, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> Pending:
        posted = list[Pending]()
        for member, exchange, out, back in self._parts:
            posted.append(exchange.post(member, [sends[n] for n in out], [recvs[n] for n in back]))
        return _AllOf(posted)


class _AllOf:
    def __init__(self, pending: list[Pending]) -> None:
        self._pending = pending
        self.by_copies = all(getattr(one, "by_copies", False) for one in pending)

    def wait(self) -> None:
        for one in self._pending:
            one.wait()


# ---- the group


VARIABLE = "CP_FAST_MESSAGES"
CHOICES = ("auto", "peer_memory", "group")
_SHARE = 16  # The staging buffers of a group take at most this fraction (1 / 16) of a GPU's memory.


def carried_by() -> str:
    """The choice in the environment.

    Raises:
        ValueError: it names no transport.
    """
    choice = os.environ.get(VARIABLE) or CHOICES[0]
    check_choice(VARIABLE, choice, CHOICES)
    return choice


def why_not() -> str | None:
    """Why this machine's GPUs cannot read each other's memory by copy engines; None if they can, as far as one process
    can tell. Runs nothing on a GPU.
    """
    if (reason := why_not_driver()) is not None:
        return reason
    if not dist.is_nccl_available():
        return "PyTorch was built without NCCL, which carries what peer memory does not"
    count = torch.cuda.device_count()
    if count < 2:
        return "PyTorch sees one GPU"
    apart = [
        (a, b) for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    return f"GPU {apart[0][0]} cannot reach the memory of GPU {apart[0][1]}" if apart else None


class _Facts(NamedTuple):
    """A rank's facts before memory is shared."""

    choice: str
    why_not: str | None
    host: str
    most: int  # The most bytes that it gives.


@dataclass
class _KnownMemory:
    """This rank's knowledge of one group: why it cannot share memory, or the memory last shared."""

    why_not: str | None = None
    most: int = 0
    messages: PeerMessages | None = None
    asked: tuple[int, ...] = ()  # The largest staging buffers of any plan.


_known: WeakKeyDictionary[Any, _KnownMemory] = WeakKeyDictionary()


def carries(messages: Group, comm: Group) -> bool:
    """Whether these are messages of this group: a plan may be used with another group."""
    if messages is comm or (isinstance(messages, PeerMessages) and messages.group is comm):
        return True
    return _names(messages) == _names(comm) != ()


def _names(comm: Group) -> tuple[str, ...]:
    """The underlying process groups; none for a user's own group."""
    if isinstance(comm, PairGroup):
        return (*_names(comm.a2a), *_names(comm.p2p))
    member = comm.group if isinstance(comm, PeerMessages) else comm
    return (member.group.group_name,) if isinstance(member, ProcessMember) else ()


def messages_for(comm: Group, problem: Problem, room: Room | None, device: torch.device) -> Group:
    """The transport for a planner's schedule of this problem. Collective: all ranks call it at the same place with the
    same problem, and all get the same result.

    Args:
        room: of a plan that is updated, else None.

    Raises:
        ValueError: ranks choose differently. RuntimeError: peer memory is required but not available.
    """
    if device.type != "cuda" or problem.cp_size == 1:
        return comm
    if isinstance(comm, PairGroup):
        across = _member_messages(comm.a2a, problem, room, "heads", device)
        along = _member_messages(comm.p2p, problem, room, "ring", device)
        return comm if across is comm.a2a and along is comm.p2p else Crossed(across, along)
    way = {"p2p": "ring", "all_gather": "gather"}.get(problem.cp_comm_type, "heads")
    return _member_messages(comm, problem, room, way, device)


def _member_messages(member: Group, problem: Problem, room: Room | None, way: str, device: torch.device) -> Group:
    if not isinstance(member, ProcessMember) or member.size == 1 or not _on_gpus(member):
        return member
    known = _known.setdefault(member.group, _KnownMemory())
    if known.most == 0 and known.why_not is None:
        _meet(member, known)
    if known.why_not is not None:
        return member
    sizes = staging_sizes(problem, room, way, member.size)
    asked = tuple(map(max, sizes, known.asked or sizes))
    if asked != known.asked:
        total = sum(asked)
        fitting = asked if total <= known.most else tuple(s * known.most // total // 4096 * 4096 for s in asked)
        known.messages, reason = share(member, fitting, device)  # Older plans keep the old ones.
        if known.messages is None:
            _refuse(known, reason)
        known.asked = asked
    return known.messages or member


def _on_gpus(member: ProcessMember) -> bool:
    """Whether NCCL carries the group's messages between GPUs."""
    return "nccl" in str(dist.get_backend_config(member.group))


def _meet(member: ProcessMember, known: _KnownMemory) -> None:
    """Decide together whether all ranks can share memory. Collective."""
    facts = _Facts(carried_by(), why_not(), socket.gethostname(), _most())
    everyone = [_Facts(*x) for x in member.all_gather_object(tuple(facts))]
    if len({x.choice for x in everyone}) > 1:
        raise ValueError(f"{VARIABLE} differs between ranks: {[x.choice for x in everyone]}")
    reasons = [f"rank {rank}: {x.why_not}" for rank, x in enumerate(everyone) if x.why_not]
    if len({x.host for x in everyone}) > 1:
        reasons.append("the ranks are on several hosts")
    known.most = min(x.most for x in everyone)
    if facts.choice == "group":
        known.why_not = f"{VARIABLE}=group"
    elif reasons:
        _refuse(known, reasons[0])


def _most() -> int:
    if not torch.cuda.is_available():
        return 1
    return max(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory // _SHARE, 1)


def _refuse(known: _KnownMemory, reason: str) -> None:
    if carried_by() == "peer_memory":
        raise RuntimeError(f"{VARIABLE}=peer_memory requires a transport that is not available: {reason}")
    known.why_not = reason
    log_once(
        f"messages go through NCCL kernels, slower than peer memory ({reason}); {VARIABLE}=group takes them "
        "without a word"
    )
