"""Variants of a kernel library: plain, with max_logit from a separate pass, or for plans updated in place.

A CUDA graph captured with one batch is replayed with the next one. A value that a library derives from the host's
lengths at launch (sizes of a grid, a window's corner, one launch a segment) stays that of the first batch. So a plan
updated in place needs a library that reads lengths on a GPU from the device only. cudnn does not, nor does
deterministic fa2.
"""

from __future__ import annotations

from functools import cache

from cp_fast.backends.backend_protocol import Backend
from cp_fast.backends.fa2 import Fa2Backend
from cp_fast.backends.max_logit_launch import LargestLogit
from cp_ref.spec import Feature

__all__ = ["IN_PLACE_RULE", "features_of", "missing_in", "variants"]

IN_PLACE_RULE = (
    "a captured graph finds new lengths only where its kernels read them on the device; 'cudnn', and 'fa2' where it is "
    "deterministic, follow the host's: make a plan for each batch instead"
)


@cache
def variants(backend: Backend) -> tuple[Backend, ...]:
    """All variants of a library, the plainest first; the same objects each time, so that plans of equal problems share
    them.
    """
    plain = (backend, type(backend)(in_place=True)) if isinstance(backend, Fa2Backend) else (backend,)
    return (*plain, *map(LargestLogit, plain))


def features_of(backend: Backend) -> frozenset[Feature]:
    """All features that a backend can be chosen for, in any of its variants."""
    return frozenset().union(*(v.features for v in variants(backend)))


def missing_in(backend: Backend, wanted: frozenset[Feature]) -> frozenset[Feature]:
    """The features of `wanted` that the library lacks, in the variant that lacks least."""
    return min((wanted - v.features for v in variants(backend)), key=len)
