"""Python objects as tensors, so that a compiled graph carries them from call to call without looking inside.

An operator of `torch.library` takes tensors and numbers. A plan and a context go in as a handle: a number in a tensor
on the CPU. A compiled graph guards numbers, so it would be recompiled for every batch's plan; it does not guard a
tensor's value.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

__all__ = ["OfThisProcess", "forget", "object_of", "opaque_for"]

_numbers = count(1)
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()


class OfThisProcess:
    """An object with a handle, tables on a device and places in groups. They are valid only in this process."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = type(self).__qualname__
        raise TypeError(f"a cp_fast.{kind} belongs to its process and cannot be pickled; make one in every process")


@torch.inference_mode(False)  # autograd saves a handle
def opaque_for(thing: Any) -> torch.Tensor:
    """A new handle, int64 [], of an object; it does not keep the object alive."""
    number = next(_numbers)
    _objects[number] = thing
    return torch.tensor(number, dtype=torch.int64, device="cpu")  # for any default device


def forget(handle: torch.Tensor) -> None:
    """Invalidate a handle: its object has changed and has a new one."""
    _objects.pop(int(handle), None)


def object_of(handle: torch.Tensor) -> Any:
    """The object of a handle.

    Raises:
        RuntimeError: it is gone.

    >>> class Thing: pass
    >>> thing = Thing()
    >>> object_of(opaque_for(thing)) is thing
    True
    """
    found = _objects.get(int(handle))
    if found is None:
        raise RuntimeError(
            f"handle {int(handle)} is of a plan or context that no longer exists, or of a plan that was updated since; "
            "keep both as they are until backward"
        )
    return found
