"""The fast path's context: its backends are the kernel libraries, and one thread at a time calls on its group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_fast.kernels.attention.choose_backend import BACKENDS
from cp_fast.runtime.handles import OfThisProcess, new_handle
from cp_ref.groups import context
from cp_ref.groups.process_groups import error_context

__all__ = [
    "PLAIN_TENSORS",
    "WORDS",
    "Agreements",
    "ContextParallel",
    "GroupLock",
    "HoldLocks",
    "PlanCache",
    "Signature",
    "agreements_of",
    "call_key",
    "locks_of",
]

# ---- one call at a time on a group
#
# Allow one call at a time on a group: the messages of two calls would mix.
#
# Calls of one thread follow each other, forward and backward. If two threads call at once, the second raises. Waiting
# would only hide that the ranks may begin the calls in different orders.


class GroupLock:
    """The lock of one group: the thread inside a call and the call's name, and how many checked calls there were."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.what = ""
        self.number = 0


_locks: WeakKeyDictionary[Any, GroupLock] = WeakKeyDictionary()
_making = threading.Lock()


def locks_of(group: Any) -> tuple[GroupLock, ...]:
    """The locks of a user's group; contexts of the same group share them."""
    if isinstance(group, DeviceMesh):
        group = tuple(group.get_all_groups())
    parts = group if isinstance(group, tuple | list) else (group,)
    with _making:
        return tuple(_lock_of(part) for part in parts)


def _lock_of(part: Any) -> GroupLock:
    try:
        return _locks.setdefault(part, GroupLock())
    except TypeError:  # A user's group without a hash or weak references: a lock for each context.
        return GroupLock()


class HoldLocks(error_context):
    """Hold all of a context's locks while `what` is called, which errors of messages then name. Locks that this thread
    already holds stay with it.

    Raises:
        RuntimeError: another thread has one of them.
    """

    __slots__ = ("_locks", "_taken")

    def __init__(self, locks: tuple[GroupLock, ...], what: str) -> None:
        self._locks, self._what = locks, what
        self._taken: list[GroupLock] = []

    def __enter__(self) -> None:
        here, what = threading.current_thread(), self._what
        error_context.__enter__(self)
        for lock in self._locks:
            if lock.thread is here:
                continue
            if not lock.lock.acquire(blocking=False):
                other = lock.thread
                self.__exit__(None, None, None)
                raise RuntimeError(
                    f"{what} begins in thread {here.name!r} while {lock.what} runs in thread "
                    f"{'?' if other is None else other.name!r} on the same group: their messages would mix. Call one "
                    "after the other, in the same order on all ranks, or give each thread a group of its own "
                    "(torch.distributed.new_group)"
                )
            lock.thread, lock.what = here, what
            self._taken.append(lock)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            error_context.__exit__(self, kind, error, trace)
        finally:
            while self._taken:
                held = self._taken.pop()
                held.thread = None
                held.lock.release()


# ---- caches of plans and calls
#
# The one cache of plans and compiled calls. A value is found by the values of everything that it depends on.
#
# No key has a tensor's address or version: a replayed CUDA graph can change the values of a tensor without changing
# either. The oldest entry is dropped first, even if it is used often. Threads may use a cache at the same time.
#
# A plan's batch has caches of its known calls (`KnownCalls`). A group has a cache of agreements, by fingerprint. Each
# agreement has a cache of this rank's plans, by signature.
#
# All ranks must make the same decision whether to send messages to agree. It depends only on whether this agreement
# (the problem and the flags) is in the group's cache. An agreement is stored when all ranks have it, and the oldest is
# dropped first, so all ranks always have the same ones. Each rank then chooses the plan of a call alone, by its device,
# its stream and its kernel library. A rank without a plan makes one, without a message.


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
        """The value of a key. A new key's value is made."""
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


PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}
WORDS = {str, int, float, bool, type(None)}  # Equal values of one of these types mean the same.


def call_key(cp: ContextParallel, words: tuple[Any, ...], tensors: Iterable[Any]) -> Any:
    """The key of a call among the known calls of its plan: all values that its checks read. None for a call that is
    always checked, such as one with a wrong context.

    Args:
        words: its arguments that are no tensors.
        tensors: its tensors; None for those that it lacks.
    """
    types = (*map(type, words),)  # since True == 1 == 1.0
    if not isinstance(cp, ContextParallel) or not WORDS.issuperset(types):
        return None
    kinds, differentiable = list[Any](), False
    for x in tensors:
        if x is None:
            kinds.append(None)
        elif type(x) not in PLAIN_TENSORS or x.is_nested:  # nested ones have no shape, and are refused
            return None
        else:
            kinds.append((x.shape, x.dtype, x.device, x.layout))
            differentiable = differentiable or x.requires_grad
    return cp.token, words, types, differentiable and torch.is_grad_enabled(), *kinds


class Signature(NamedTuple):
    """A call's arguments as given, and the state of this rank that its plan depends on. Equal signatures have equal
    plans.
    """

    words: tuple[Any, ...]
    stream: int  # The plan's tables are written on it, and freed to its memory.
    lengths: tuple[Any, ...]  # Of every sequence, by value.


class Agreements(PlanCache[bytes, PlanCache[Signature, Any]]):
    """A group's last agreements by fingerprint, the same on all ranks, each with this rank's plans for it, each a
    `cp_fast.Plan`.
    """

    SIZE = 16  # a model's kinds of layers, with and without gradients, for the batches of an accumulation step.
    CALLS = 8  # the same problem written in several ways, or on several streams.

    def __init__(self) -> None:
        super().__init__(self.SIZE)

    @property
    def fingerprints(self) -> set[bytes]:
        """Those of the agreements."""
        return {fingerprint for fingerprint, _ in self.items()}

    def plan_of(self, signature: Signature) -> Any:
        """The plan of an equal call."""
        return next((plan for _, calls in self.items() if (plan := calls.get(signature)) is not None), None)

    def plans(self, stream: int) -> list[Any]:
        """All plans whose tables were written on a stream."""
        return [plan for _, calls in self.items() for known, plan in calls.items() if known.stream == stream]

    def keep(self, fingerprint: bytes, signature: Signature, plan: Any) -> None:
        """Keep the plan of a call for as long as its agreement, which all ranks have."""
        self.find(fingerprint, lambda: PlanCache(self.CALLS)).find(signature, lambda: plan)


# A cache is freed with its groups.
_caches: WeakKeyDictionary[GroupLock, WeakKeyDictionary[GroupLock, Agreements]] = WeakKeyDictionary()


def agreements_of(locks: tuple[GroupLock, ...]) -> Agreements:
    """The agreements of the group, or the pair of groups, that these locks belong to.

    >>> one, other = GroupLock(), GroupLock()
    >>> agreements_of((one,)) is agreements_of((one,)), agreements_of((one, other)) is agreements_of((one,))
    (True, False)
    """
    with _making:
        return _caches.setdefault(locks[0], WeakKeyDictionary()).setdefault(locks[-1], Agreements())


# ---- the context


class ContextParallel(OfThisProcess, context.ContextParallel):
    __doc__ = context.ContextParallel.__doc__
    backends = ("auto", *(backend.name for backend in BACKENDS))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._locks = locks_of(self.group)
        self.agreements = agreements_of(self._locks)  # of all contexts of the group
        self.token = object()  # what known calls know it by: a plan keeps no group alive
        self.handle = new_handle(self)  # what torch.compile knows it by

    def naming_errors(self, what: str) -> AbstractContextManager[None]:
        """While a call is made, also: RuntimeError where another thread is inside one on the same group."""
        return HoldLocks(self._locks, what)

    def next_number(self) -> int:
        """Of the checked calls on the group, from 1."""
        first = self._locks[0]
        first.number += 1
        return first.number
