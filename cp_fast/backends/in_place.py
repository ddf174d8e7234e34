"""Which kernel libraries serve a plan that is updated in place.

A CUDA graph that was captured with one batch is replayed with the next one. Whatever a library reads from the host's
lengths when it is launched (sizes of a grid, a window's corner, one launch a segment) stays that of the first batch. So
on a GPU only those are taken that read the lengths on the device alone. On the CPU nothing is captured.
"""

from __future__ import annotations

from functools import cache

from cp_fast.backends.base import Backend
from cp_fast.backends.fa2 import Fa2Backend
from cp_fast.backends.largest import LargestLogit
from cp_ref.spec import Feature, Unsupported

__all__ = ["check_in_place"]

_READS_THE_HOST = {
    "cudnn": "its graphs, and whether a band is said from the top-left corner, follow the lengths on the host",
    "torch": "it cuts its blocks by the lengths on the host",
}


def check_in_place(backend: Backend, device: str, *, deterministic: bool = False) -> Backend:
    """The backend as it serves such a plan, without what it then lacks.

    Raises:
        Unsupported: a captured graph of the library would not find new lengths by itself, naming the reason.
    """
    if device == "cpu":
        return backend
    reason = _READS_THE_HOST.get(backend.name)
    if isinstance(backend, LargestLogit):
        reason = "max_logit is found by a pass that cuts its blocks by the lengths on the host"
    if isinstance(backend, Fa2Backend) and deterministic:
        reason = "where it is deterministic it has a launch for each segment"
    if reason is not None:
        raise Unsupported(
            f"a plan with max_sequences and backend {backend.name!r} on {device}",
            {},
            f"{reason}: a captured graph would keep those of the first batch; make a plan for each batch instead",
        )
    return _without_determinism(backend) if isinstance(backend, Fa2Backend) else backend


@cache
def _without_determinism(backend: Fa2Backend) -> Fa2Backend:
    """One for each backend, so that plans of equal problems have the same."""
    return Fa2Backend(backend.kernels, lacks=frozenset({Feature.DETERMINISTIC}))
