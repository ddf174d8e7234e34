"""The one cache of plans: those of a group's last few batches, for calls of `attention` without a plan.

Calls are compared by value, lengths too, never by a tensor's address or version. Threads may use it at the same time.

All ranks must make the same decision whether to send messages to agree. It depends only on whether this agreement (the
problem and the flags, as a fingerprint) is among their last `KEPT` ones. An agreement is stored when all ranks have it,
and the oldest is dropped first, even if it is used often. So all ranks always have the same ones. Each rank then
chooses the plan of a call alone, by its device, its stream and its kernel library. A rank without a plan makes one,
without a message.
"""

from __future__ import annotations

import threading
from collections.abc import Set
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from cp_fast.api.group_lock import Turn

if TYPE_CHECKING:
    from cp_fast.api.make_plan import Plan

__all__ = ["KEPT", "PlanCache", "Signature", "cache_of"]

KEPT = 16  # Agreements: a model's kinds of layers, with and without gradients, for the batches of an accumulation step.
_CALLS = 8  # Calls of an agreement: the same problem written in several ways, or on several streams.


class Signature(NamedTuple):
    """A call's arguments as given, and the state of this rank that its plan depends on. Equal signatures have equal
    plans.
    """

    words: tuple[Any, ...]
    stream: int  # The plan's tables are written on it, and freed to its memory.
    lengths: tuple[Any, ...]  # Of every sequence, by value.


class PlanCache:
    """A group's last agreements, and this rank's plans for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[bytes, list[tuple[Signature, Plan]]] = {}  # By the agreement's fingerprint, oldest first.

    @property
    def agreements(self) -> Set[bytes]:
        """The fingerprints of the last agreements, the same on all ranks."""
        with self._lock:
            return frozenset(self._calls)

    def agree(self, fingerprint: bytes) -> None:
        """Store an agreement of all ranks."""
        with self._lock:
            self._calls.setdefault(fingerprint, [])
            while len(self._calls) > KEPT:
                del self._calls[next(iter(self._calls))]

    def plan_of(self, signature: Signature) -> Plan | None:
        """The plan of an equal call."""
        with self._lock:
            for calls in reversed(self._calls.values()):
                for known, plan in calls:
                    if known == signature:
                        return plan
        return None

    def plans(self, stream: int) -> list[Plan]:
        """All plans whose tables were written on a stream."""
        with self._lock:
            return [plan for kept in self._calls.values() for known, plan in kept if known.stream == stream]

    def keep(self, fingerprint: bytes, signature: Signature, plan: Plan) -> None:
        """Keep a call's plan for as long as its agreement."""
        with self._lock:
            calls = self._calls.get(fingerprint, [])
            calls.append((signature, plan))
            del calls[:-_CALLS]


_caches: WeakKeyDictionary[Turn, WeakKeyDictionary[Turn, PlanCache]] = WeakKeyDictionary()  # Freed with their groups.
_making = threading.Lock()


def cache_of(turns: tuple[Turn, ...]) -> PlanCache:
    """The cache of the group, or the pair of groups, that these turns belong to.

    >>> one, other = Turn(), Turn()
    >>> cache_of((one,)) is cache_of((one,)), cache_of((one, other)) is cache_of((one,))
    (True, False)
    """
    with _making:
        return _caches.setdefault(turns[0], WeakKeyDictionary()).setdefault(turns[-1], PlanCache())
