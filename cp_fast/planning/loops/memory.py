"""Memory for the columns of one plan after the other.

The loops are fast enough for fresh memory to be what costs most: every page of it is a fault, a microsecond or two, and
what `free` gets back in large pieces is given back to the system. So columns are cut from blocks that are kept for the
next plan. A block is used again when nobody has an array of it any more, which its reference count tells: numpy's views
refer to the array that owns their memory.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

from cp_fast.planning.columns import Array

__all__ = ["Memory"]

_BLOCK = 16 << 20  # bytes
_KEPT = 4  # blocks
_ALIGNED = 64  # bytes

_blocks: list[Array] = []
_lock = threading.Lock()


class Memory:
    """What one plan is written to."""

    def __init__(self) -> None:
        self._block = np.empty(0, dtype=np.uint8)
        self._at = 0

    def array(self, size: int, dtype: np.dtype[np.signedinteger]) -> Array:
        """An array that is not yet written."""
        space = size * dtype.itemsize
        if self._at + space > len(self._block):
            self._block, self._at = _block(space), 0
        found = np.frombuffer(self._block, dtype, size, self._at)
        self._at += -(-space // _ALIGNED) * _ALIGNED
        return found


def _block(space: int) -> Array:
    """A block with so much space: one that nobody uses, or a new one."""
    with _lock:
        for n in range(len(_blocks)):
            if _references(_blocks, n) == _UNUSED and len(_blocks[n]) >= space:
                return _blocks[n]
        block = np.empty(max(space, _BLOCK), dtype=np.uint8)
        if len(_blocks) < _KEPT:
            _blocks.append(block)
        return block


def _references(blocks: list[Array], n: int) -> int:
    return sys.getrefcount(blocks[n])


_UNUSED = _references([np.empty(0, dtype=np.uint8)], 0)  # of a block that nothing but the list refers to
