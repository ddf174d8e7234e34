"""A call as compiled graphs and checkpointing see it: Python objects as tensors, and attention as one operator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any
from weakref import WeakValueDictionary, ref

import numpy as np
import torch
from torch.utils import _python_dispatch as modes

__all__ = [
    "OfThisProcess",
    "copy_of",
    "forget",
    "hide_from_checkpointing",
    "is_selective",
    "new_handle",
    "object_of",
    "outside_of_graphs",
]

# ---- graph breaks


def outside_of_graphs(function: Callable[..., Any], *given: Any, **arguments: Any) -> Any:
    """Call a function that torch.compile has come to as a graph break."""
    from cp_fast.runtime.graph_break import graph_break  # Imports Dynamo, as slow as PyTorch's import.

    return graph_break(function, *given, **arguments)


# ---- handles
#
# An operator of `torch.library` takes tensors and numbers. A plan and a context go in as a handle: a number in a tensor
# on the CPU. A compiled graph guards numbers, so it would be recompiled for every batch's plan; it does not guard a
# tensor's value.
#
# A graph saves the handle for its backward pass, perhaps longer than the caller keeps the plan. So the memory of the
# handle has what the object had, for as long as any tensor shares it. It cannot have the object itself: the object has
# the handle, and Python does not see a circle through a tensor's memory.


_numbers = count(1)


class _Number(np.ndarray):
    """The memory of a handle: its number, and two ways to its object.

    Attributes:
        thing: the object, for as long as anybody else keeps it.
        same: another object with the same attributes, kept by this memory. In the memory of a copied handle: the first
            handle's memory.
    """

    thing: ref[Any]
    same: Any


_handles: WeakValueDictionary[int, _Number] = WeakValueDictionary()


class OfThisProcess:
    """An object with a handle, tables on a device and places in groups. They are valid only in this process."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = type(self).__qualname__
        raise TypeError(f"a cp_fast.{kind} belongs to its process and cannot be pickled; make one in every process")


def new_handle(thing: Any) -> torch.Tensor:
    """A new handle, int64 [], of an object that has all its attributes; it keeps their values alive."""
    return outside_of_graphs(_registered, thing) if torch.compiler.is_compiling() else _registered(thing)


@torch.inference_mode(False)  # autograd saves a handle
def _registered(thing: Any) -> torch.Tensor:
    number = next(_numbers)
    memory = np.array(number, dtype=np.int64).view(_Number)
    memory.thing, memory.same = ref(thing), object.__new__(type(thing))
    vars(memory.same).update({name: value for name, value in vars(thing).items() if name != "handle"})
    _handles[number] = memory
    return torch.from_numpy(memory)  # which keeps the array


@torch.inference_mode(False)
def copy_of(handle: torch.Tensor) -> torch.Tensor:
    """A copy of the handle in other memory, which keeps the object alive as the handle's memory does. For operators: a
    compiled graph may write over the memory of their results.
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
    >>> object_of(new_handle(thing)) is thing
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


# ---- selective checkpointing
#
# Whether PyTorch's selective checkpointing looks at each operator; then attention is one operator to it.
#
# Its modes count operators in the forward pass, and count again while they recompute. They must see the same ones in
# both passes. They see attention as one operator. They see none of the work that makes plans: a later call finds its
# plan in a cache.


# They define the modes. A mode that somebody derives from one of these counts too.
_MODULES = {"torch.utils.checkpoint", "cp_fast.checkpoint"}


def is_selective() -> bool:
    """Whether a mode of selective checkpointing is active: its first pass, or its recomputation."""
    if not torch._C._len_torch_dispatch_stack():  # Most calls end here, and the test is cheap.
        return False
    stack = modes._get_current_dispatch_mode_stack()  # pyright: ignore[reportPrivateUsage]
    return any(kind.__module__ in _MODULES for mode in stack for kind in type(mode).__mro__)


_NOTHING = nullcontext()  # made once, since every call asks for it


def hide_from_checkpointing() -> AbstractContextManager[Any]:
    """Work on the host that selective checkpointing must not count."""
    if is_selective():
        return modes._disable_current_modes()  # pyright: ignore[reportPrivateUsage]
    return _NOTHING
