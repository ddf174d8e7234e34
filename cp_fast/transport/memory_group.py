"""Find the groups whose ranks can reach the peers' memory, and choose a plan's transport."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cp_fast.tools.log import log_once
from cp_fast.transport.crossed import Crossed
from cp_fast.transport.peer_exchange import PeerMessages
from cp_fast.transport.shared_memory import share
from cp_fast.transport.staging_buffers import staging_sizes
from cp_fast.transport.streams import why_not_driver
from cp_ref.common.groups.process_groups import ProcessMember
from cp_ref.spec import Group, PairGroup, Problem, check_choice

__all__ = ["VARIABLE", "carried_by", "carries", "messages_for", "why_not"]

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
class _Place:
    """This rank's knowledge of one group: why it cannot share memory, or the memory last shared."""

    why_not: str | None = None
    most: int = 0
    messages: PeerMessages | None = None
    asked: tuple[int, ...] = ()  # The largest staging buffers of any plan.


_places: WeakKeyDictionary[Any, _Place] = WeakKeyDictionary()


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


def messages_for(comm: Group, problem: Problem, rows: tuple[int, int], device: torch.device) -> Group:
    """The transport for a planner's schedule of this problem. Collective: all ranks call it at the same place with the
    same problem, and all get the same result.

    Args:
        rows: of q and of k and v on each rank, padding included.

    Raises:
        ValueError: ranks choose differently. RuntimeError: peer memory is required but not available.
    """
    if device.type != "cuda" or problem.cp_size == 1:
        return comm
    if isinstance(comm, PairGroup):
        across = _member_messages(comm.a2a, problem, rows, "heads", device)
        along = _member_messages(comm.p2p, problem, rows, "ring", device)
        return comm if across is comm.a2a and along is comm.p2p else Crossed(across, along)
    way = {"p2p": "ring", "all_gather": "gather"}.get(problem.cp_comm_type, "heads")
    return _member_messages(comm, problem, rows, way, device)


def _member_messages(member: Group, problem: Problem, rows: tuple[int, int], way: str, device: torch.device) -> Group:
    if not isinstance(member, ProcessMember) or member.size == 1 or not _on_gpus(member):
        return member
    place = _places.setdefault(member.group, _Place())
    if place.most == 0 and place.why_not is None:
        _meet(member, place)
    if place.why_not is not None:
        return member
    sizes = staging_sizes(problem, rows, way, member.size)
    asked = tuple(map(max, sizes, place.asked or sizes))
    if asked != place.asked:
        total = sum(asked)
        fitting = asked if total <= place.most else tuple(s * place.most // total // 4096 * 4096 for s in asked)
        place.messages, reason = share(member, fitting, device)  # Older plans keep the old ones.
        if place.messages is None:
            _refuse(place, reason)
        place.asked = asked
    return place.messages or member


def _on_gpus(member: ProcessMember) -> bool:
    """Whether NCCL carries the group's messages between GPUs."""
    return "nccl" in str(dist.get_backend_config(member.group))


def _meet(member: ProcessMember, place: _Place) -> None:
    """Decide together whether all ranks can share memory. Collective."""
    facts = _Facts(carried_by(), why_not(), socket.gethostname(), _most())
    everyone = [_Facts(*x) for x in member.all_gather_object(tuple(facts))]
    if len({x.choice for x in everyone}) > 1:
        raise ValueError(f"{VARIABLE} differs between ranks: {[x.choice for x in everyone]}")
    reasons = [f"rank {rank}: {x.why_not}" for rank, x in enumerate(everyone) if x.why_not]
    if len({x.host for x in everyone}) > 1:
        reasons.append("the ranks are on several hosts")
    place.most = min(x.most for x in everyone)
    if facts.choice == "group":
        place.why_not = f"{VARIABLE}=group"
    elif reasons:
        _refuse(place, reasons[0])


def _most() -> int:
    if not torch.cuda.is_available():
        return 1
    return max(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory // _SHARE, 1)


def _refuse(place: _Place, reason: str) -> None:
    if carried_by() == "peer_memory":
        raise RuntimeError(f"{VARIABLE}=peer_memory requires a transport that is not available: {reason}")
    place.why_not = reason
    log_once(
        f"messages go through NCCL kernels, slower than peer memory ({reason}); {VARIABLE}=group takes them "
        "without a word"
    )
