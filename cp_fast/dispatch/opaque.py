"""Python objects as tensors, so that a compiled graph carries them from call to call without looking inside.

An operator of `torch.library` takes tensors and numbers. A plan and a context go in as a handle: a number in a tensor
on the CPU. A compiled graph guards numbers, so it would be recompiled for every batch's plan; it does not guard a
tensor's value.

A graph saves the handle for its backward pass, perhaps longer than the caller keeps the plan. So the memory of the
handle has what the object had, for as long as any tensor shares it. It cannot have the object itself: the object has
the handle, and Python does not see a circle through a tensor's memory.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary, ref

import numpy as np
import torch

__all__ = ["OfThisProcess", "again", "forget", "object_of", "opaque_for"]

_numbers = count(1)


class _Number(np.ndarray):
    """A handle's memory: a number, the object of the handle, and another one with the same attributes; or of the handle
    once more, the first one's memory.
    """

    thing: ref[Any]
    same: Any


_handles: WeakValueDictionary[int, _Number] = WeakValueDictionary()


class OfThisProcess:
    """An object with a handle, tables on a device and places in groups. They are valid only in this process."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = type(self).__qualname__
        raise TypeError(f"a cp_fast.{kind} belongs to its process and cannot be pickled; make one in every process")


def opaque_for(thing: Any) -> torch.Tensor:
    """A new handle, int64 [], of an object that has all its attributes; it keeps their values alive."""
    if torch.compiler.is_compiling():
        from cp_fast.dispatch.graph_break import graph_break  # Imports Dynamo, as slow as PyTorch's import.

        return graph_break(_made, thing)
    return _made(thing)


@torch.inference_mode(False)  # autograd saves a handle
def _made(thing: Any) -> torch.Tensor:
    number = next(_numbers)
    memory = np.array(number, dtype=np.int64).view(_Number)
    memory.thing, memory.same = ref(thing), object.__new__(type(thing))
    vars(memory.same).update({name: value for name, value in vars(thing).items() if name != "handle"})
    _handles[number] = memory
    return torch.from_numpy(memory)  # which keeps the array


@torch.inference_mode(False)
def again(handle: torch.Tensor) -> torch.Tensor:
    """The handle once more, in memory of its own, which keeps what the object had as the handle's memory does. For
    operators: a compiled graph may write over the memory of their results.
    """
    memory = np.array(int(handle), dtype=np.int64).view(_Number)
    memory.same = _handles[int(handle)]
    return torch.from_numpy(memory)


def forget(handle: torch.Tensor) -> None:
    """Invalidate a handle: its object has changed and has a new one."""
    _handles.pop(int(handle), None)


def object_of(handle: torch.Tensor) -> Any:
    """The object of a handle, or if it is gone another one with the same attributes.

    Raises:
        RuntimeError: the handle is no longer valid, or a copy of one whose memory is gone.

    >>> class Thing: pass
    >>> thing = Thing()
    >>> object_of(opaque_for(thing)) is thing
    True
    """
    memory = _handles.get(int(handle))
    if memory is None:
        raise RuntimeError(
            f"handle {int(handle)} is of a plan or context that no longer exists, or of a plan that was updated since; "
            "keep both as they are until backward"
        )
    thing = memory.thing()
    return memory.same if thing is None else thing
