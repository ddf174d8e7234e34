"""Which kernel libraries serve a plan that is updated in place.

A CUDA graph that was captured with one batch is replayed with the next one. Whatever a library reads from the host's
lengths when it is launched (sizes of a grid, a window's corner, one launch a segment) stays that of the first batch. So
on a GPU only those are taken that read the lengths on the device alone. On the CPU nothing is captured.
"""

from __future__ import annotations

from cp_fast.backends.base import Backend
from cp_fast.backends.largest import LargestLogit
from cp_ref.spec import Unsupported

__all__ = ["check_in_place"]

_READS_THE_HOST = {
    "cudnn": "its graphs, and whether a band is said from the top-left corner, follow the lengths on the host",
    "fa2": "it has one launch a segment where it is deterministic, and was not checked with segments of length zero",
    "torch": "it cuts its blocks by the lengths on the host",
}


def check_in_place(backend: Backend, device: str) -> None:
    """Raise `Unsupported`, naming the reason, unless a captured graph of the library finds new lengths by itself."""
    if device == "cpu":
        return
    reason = _READS_THE_HOST.get(backend.name)
    if isinstance(backend, LargestLogit):
        reason = "max_logit is found by a pass that cuts its blocks by the lengths on the host"
    if reason is not None:
        raise Unsupported(
            f"a plan with max_sequences and backend {backend.name!r} on {device}",
            {},
            f"{reason}: a captured graph would keep those of the first batch; make a plan for each batch instead",
        )
