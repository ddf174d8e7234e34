"""The one cache of plans and compiled calls. A value is found by the values of everything that it depends on.

No key has a tensor's address or version: a replayed CUDA graph can change the values of a tensor without changing
either. The oldest entry is dropped first, even if it is used often. Threads may use a cache at the same time.

A plan has a cache of compiled calls, by the shapes of q, k and v. A group has a cache of agreements, by fingerprint.
Each agreement has a cache of this rank's plans, by signature.

All ranks must make the same decision whether to send messages to agree. It depends only on whether this agreement (the
problem and the flags) is in the group's cache. An agreement is stored when all ranks have it, and the oldest is dropped
first, so all ranks always have the same ones. Each rank then chooses the plan of a call alone, by its device, its
stream and its kernel library. A rank without a plan makes one, without a message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from cp_fast.dispatch.group_lock import GroupLock

if TYPE_CHECKING:
    from cp_fast.api.plan import Plan

__all__ = ["Agreements", "PlanCache", "Signature", "agreements_of"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class PlanCache(Generic[K, V]):
    """The values of the last few new keys.

    >>> cache = PlanCache(2)
    >>> [cache.find(key, lambda key=key: key.upper()) for key in "abac"]
    ['A', 'B', 'A', 'C']
    >>> cache.get("a"), cache.get("b")
    (None, 'B')
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._values: dict[K, V] = {}  # The oldest first.

    def get(self, key: K) -> V | None:
        """The value of a key; None without one."""
        return self._values.get(key)

    def find(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made if there is none."""
        if (found := self._values.get(key)) is not None:
            return found
        made = make()
        with self._lock:
            found = self._values.setdefault(key, made)
            while len(self._values) > self._size:
                del self._values[next(iter(self._values))]
            return found

    def items(self) -> list[tuple[K, V]]:
        """The keys and values, the newest first."""
        with self._lock:
            return [*self._values.items()][::-1]


class Signature(NamedTuple):
    """A call's arguments as given, and the state of this rank that its plan depends on. Equal signatures have equal
    plans.
    """

    words: tuple[Any, ...]
    stream: int  # The plan's tables are written on it, and freed to its memory.
    lengths: tuple[Any, ...]  # Of every sequence, by value.


class Agreements(PlanCache[bytes, PlanCache[Signature, "Plan"]]):
    """A group's last agreements by fingerprint, the same on all ranks, each with this rank's plans for it."""

    SIZE = 16  # a model's kinds of layers, with and without gradients, for the batches of an accumulation step.
    CALLS = 8  # the same problem written in several ways, or on several streams.

    def __init__(self) -> None:
        super().__init__(self.SIZE)

    @property
    def fingerprints(self) -> frozenset[bytes]:
        """Those of the agreements."""
        return frozenset(fingerprint for fingerprint, _ in self.items())

    def plan_of(self, signature: Signature) -> Plan | None:
        """The plan of an equal call."""
        return next((plan for _, calls in self.items() if (plan := calls.get(signature)) is not None), None)

    def plans(self, stream: int) -> list[Plan]:
        """All plans whose tables were written on a stream."""
        return [plan for _, calls in self.items() for known, plan in calls.items() if known.stream == stream]

    def keep(self, fingerprint: bytes, signature: Signature, plan: Plan) -> None:
        """Keep the plan of a call for as long as its agreement, which all ranks have."""
        self.find(fingerprint, lambda: PlanCache(self.CALLS)).find(signature, lambda: plan)


# A cache is freed with its groups.
_caches: WeakKeyDictionary[GroupLock, WeakKeyDictionary[GroupLock, Agreements]] = WeakKeyDictionary()
_making = threading.Lock()


def agreements_of(locks: tuple[GroupLock, ...]) -> Agreements:
    """The agreements of the group, or the pair of groups, that these locks belong to.

    >>> one, other = GroupLock(), GroupLock()
    >>> agreements_of((one,)) is agreements_of((one,)), agreements_of((one, other)) is agreements_of((one,))
    (True, False)
    """
    with _making:
        return _caches.setdefault(locks[0], WeakKeyDictionary()).setdefault(locks[-1], Agreements())
