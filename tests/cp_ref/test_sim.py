"""The simulated group: what it delivers, and each mistake that it names."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from cp_ref import SimGroup
from cp_ref.groups.group import Parcel
from cp_ref.reference.simulator import Deadlock, MessageError, SimMember


def test_a_ring_and_the_poison_before_the_wait() -> None:
    def fn(member: SimMember) -> tuple[bool, float]:
        box = torch.zeros(2)
        mine = torch.full((2,), float(member.rank))
        pending = member.exchange([Parcel((member.rank + 1) % 3, 5, mine)], [Parcel((member.rank - 1) % 3, 5, box)])
        poisoned = bool(box.isnan().all())
        pending.wait()
        return poisoned, box[0].item()

    assert SimGroup(3).run(fn) == [(True, 2.0), (True, 0.0), (True, 1.0)]


def test_a_rank_that_cannot_take_its_gpu_leaves_no_rank_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise RuntimeError("device-side assert")

    for name, stand_in in {"is_available": lambda: True, "current_device": lambda: 0, "set_device": refuse}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with pytest.raises(RuntimeError, match="device-side assert"):
        SimGroup(2).run(lambda member: member.rank)


def test_a_deadlock_names_who_waits_for_what() -> None:
    def fn(member: SimMember) -> None:
        member.exchange([], [Parcel(1 - member.rank, 7, torch.zeros(1))]).wait()

    with pytest.raises(Deadlock, match=r"rank 0 waits for a receive from rank 1 with tag 7\n.*rank 1 waits for"):
        SimGroup(2).run(fn)


def test_a_send_needs_its_receive() -> None:
    def fn(member: SimMember) -> None:
        if member.rank == 0:
            member.exchange([Parcel(1, 3, torch.ones(1))], []).wait()

    with pytest.raises(Deadlock, match=r"rank 0 waits for a send to rank 1 with tag 3\n  rank 1 has finished"):
        SimGroup(2).run(fn)


def test_a_message_that_nobody_took() -> None:
    def fn(member: SimMember) -> None:
        if member.rank == 0:
            member.exchange([Parcel(1, 3, torch.ones(1))], [])

    with pytest.raises(MessageError, match="rank 0 sent a message with tag 3 to rank 1, which never took it"):
        SimGroup(2).run(fn)


@pytest.mark.parametrize(
    ("box", "tag", "complaint"),
    [
        (torch.zeros(2), 1, "has tag 0, but tag 1 is expected"),
        (torch.zeros(3), 0, "the buffer torch.float32 \\[3\\]"),
        (torch.zeros(2, dtype=torch.float64), 0, "the buffer torch.float64"),
    ],
)
def test_messages_that_do_not_fit(box: torch.Tensor, tag: int, complaint: str) -> None:
    def fn(member: SimMember) -> None:
        if member.rank == 0:
            member.exchange([Parcel(1, 0, torch.zeros(2))], [])
        else:
            member.exchange([], [Parcel(0, tag, box)]).wait()

    with pytest.raises(MessageError, match=complaint):
        SimGroup(2).run(fn)


@pytest.mark.parametrize("verb", ["sends", "recvs"])
def test_tensors_that_are_not_contiguous(verb: str) -> None:
    """Neither gloo nor NCCL takes them."""
    parcels: dict[str, list[Parcel]] = {"sends": [], "recvs": []}
    parcels[verb].append(Parcel(1, 3, torch.zeros(4, 2)[:, 0]))

    def fn(member: SimMember) -> None:
        if member.rank == 0:
            member.exchange(**parcels)

    with pytest.raises(MessageError, match="rank 0: the tensor of a message with tag 3 and rank 1 is not contiguous"):
        SimGroup(2).run(fn)


def test_a_send_buffer_must_not_change_before_its_wait() -> None:
    def fn(member: SimMember) -> None:
        mine, box = torch.ones(1), torch.zeros(1)
        pending = member.exchange([Parcel(1 - member.rank, 0, mine)], [Parcel(1 - member.rank, 0, box)])
        mine.add_(1)
        pending.wait()

    with pytest.raises(MessageError, match="changed before its wait"):
        SimGroup(2).run(fn)


def test_a_failing_rank_is_what_is_raised() -> None:
    def fn(member: SimMember) -> None:
        if member.rank == 2:
            raise KeyError("mine")
        member.all_gather_object(1)

    with pytest.raises(KeyError, match="mine"):
        SimGroup(3).run(fn)


def test_backward_runs_in_the_ranks_own_thread() -> None:
    def fn(member: SimMember) -> list[float]:
        x = torch.tensor(float(member.rank), requires_grad=True)
        (x * x).backward()
        assert x.grad is not None
        return member.all_gather_object(x.grad.item())

    assert SimGroup(3).run(fn) == [[0.0, 2.0, 4.0]] * 3


@pytest.mark.parametrize("size", [0, -1, 1.5, None])
def test_sizes_that_are_none(size: object) -> None:
    with pytest.raises(ValueError, match="cp_size is"):
        SimGroup(size)  # type: ignore[arg-type]


def test_what_was_delivered_is_forgotten() -> None:
    """A long run needs no more memory than a short one."""

    class Value:
        pass

    def one(member: SimMember) -> int:
        x = value = None
        gone: list[weakref.ref[Any]] = []
        for _ in range(3):
            x, box, value = torch.ones(2), torch.zeros(2), Value()
            gone += [weakref.ref(x), weakref.ref(value)]
            peer = 1 - member.rank
            member.exchange([Parcel(peer, 0, x)], [Parcel(peer, 0, box)]).wait()
            member.all_gather_object(value)
        del x, value
        member.all_gather_object(None)
        return sum(ref() is not None for ref in gone)

    assert SimGroup(2).run(one) == [0, 0]
