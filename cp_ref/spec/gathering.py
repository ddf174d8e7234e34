"""The arguments of `unshard`, which the ranks compare before they gather slices."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from cp_ref.spec.group import read_together
from cp_ref.spec.slices import Cut, read_cut

__all__ = ["agreed_cut"]


@dataclass(frozen=True)
class Gathering:
    """The arguments that all ranks must have in common, in the form that `agree` takes."""

    x: tuple[tuple[int, ...], str]
    qkv_format: str
    layout: str
    seqlen: int | None
    cu_seqlens_padded: tuple[int, ...] | None
    problem: str | None  # the plan's

    @property
    def fingerprint(self) -> bytes:
        """32 bytes of the text."""
        return blake2b(str(self).encode()).digest()[:32]


def agreed_cut(cp: Any, plan: Any, x: Any, qkv_format: str, cu_seqlens_padded: Any, seqlen: Any) -> Cut:
    """How the tensor was cut of which every rank has a slice. Collective: all ranks get it, or all raise.

    Args:
        cp: a ContextParallel. The others: as in `unshard`.

    Raises:
        ValueError, TypeError: an argument is wrong, here or on another rank, or not the same on all of them.
    """

    def read() -> tuple[Cut, Gathering]:
        cut = read_cut(cp, plan, x, qkv_format, cu_seqlens_padded, whole=False, seqlen=seqlen)
        lengths = None if cu_seqlens_padded is None else tuple(cu_seqlens_padded.tolist())
        of_plan = None if plan is None else plan.problem.fingerprint.hex()
        shape = tuple(x.shape), str(x.dtype)
        return cut, Gathering(shape, cut.qkv_format, cp.layout, seqlen, lengths, of_plan)

    return read_together(cp.comm, read, lambda found: found[1])[0]
