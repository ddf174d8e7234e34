"""What a kernel library is chosen as: itself, with max_logit from a pass of its own, or for plans updated in place.

A CUDA graph that was captured with one batch is replayed with the next one. Whatever a library reads from the host's
lengths when it is launched (sizes of a grid, a window's corner, one launch a segment) stays that of the first batch. So
only those serve a plan that is updated in place which on a GPU read the lengths on the device alone: cudnn does not,
nor fa2 where it is deterministic.
"""

from __future__ import annotations

from functools import cache

from cp_fast.backends.base import Backend
from cp_fast.backends.fa2 import Fa2Backend
from cp_fast.backends.largest import LargestLogit
from cp_ref.spec import Feature

__all__ = ["IN_PLACE_RULE", "missing_in", "variants"]

IN_PLACE_RULE = (
    "a captured graph finds new lengths only where its kernels read them on the device; 'cudnn', and 'fa2' where it is "
    "deterministic, follow the host's: make a plan for each batch instead"
)


@cache
def variants(backend: Backend) -> tuple[Backend, ...]:
    """All that a library is chosen as, the plainest first; the same ones each time, so that plans of equal problems
    have the same.
    """
    plain = (backend, type(backend)(in_place=True)) if isinstance(backend, Fa2Backend) else (backend,)
    return (*plain, *map(LargestLogit, plain))


def missing_in(backend: Backend, wanted: frozenset[Feature]) -> frozenset[Feature]:
    """What the library lacks of `wanted`, whatever it is chosen as; of the variants the one that lacks least."""
    return min((wanted - v.features for v in variants(backend)), key=len)
