"""Who takes part, and how the work is shared: the one object that every call of the API takes."""

from __future__ import annotations

from typing import Any

from cp_fast.backends import BACKENDS
from cp_fast.comm import as_group
from cp_fast.handles import handle_for
from cp_ref.spec import CP_COMM_TYPES, LAYOUTS, OFFSET_GRADS, check_choice

__all__ = ["ContextParallel"]


class ContextParallel:
    """A group of ranks, the schedule they follow and the kernels they compute with.

    Args:
        group: a torch.distributed ProcessGroup, a 1-D DeviceMesh, or one member of a `SimGroup`; for "a2a+p2p" a pair
            (a2a_group, p2p_group) of these (`member.split(a2a_size)`), or a 2-D DeviceMesh [p2p, a2a].
        cp_comm_type: "p2p" (ring attention), "all_gather", "a2a" (Ulysses) or "a2a+p2p".
        layout: which rank owns which tokens: "dual_chunk" (balanced under causal masks) or "contiguous".
        backend: "auto" takes the first kernel library that works here and has what the problem needs; a name ("fa4",
            "cudnn", "fa2", "cpu", "torch") takes that one and never another.
        softmax_offset_grad: what a rank's gradient of softmax_offset is. "share": of its own queries, as its gradients
            of all other weights are of its own tokens; the ranks' shares add up to the total, so sum or average it over
            the group with the rest. "total": the sum over the group already, the same on every rank; leave it out then.

    Attributes:
        rank, size: this rank and the number of ranks.
        a2a_size: how many ranks exchange heads: all of them in "a2a", the inner group in "a2a+p2p", else 1.
        comm: the group as a `cp_ref.spec.Group`.

    Raises:
        TypeError: `group` is none of the above. ValueError: a name that does not exist.
    """

    def __init__(
        self,
        group: Any,
        cp_comm_type: str = "p2p",
        *,
        layout: str = "dual_chunk",
        backend: str = "auto",
        softmax_offset_grad: str = "share",
    ) -> None:
        check_choice("cp_comm_type", cp_comm_type, CP_COMM_TYPES)
        check_choice("layout", layout, LAYOUTS)
        check_choice("softmax_offset_grad", softmax_offset_grad, OFFSET_GRADS)
        check_choice("backend", backend, ("auto", *(b.name for b in BACKENDS)))
        self.group = group
        self.cp_comm_type = cp_comm_type
        self.layout = layout
        self.backend = backend
        self.softmax_offset_grad = softmax_offset_grad
        self.comm = as_group(group, cp_comm_type)
        self.rank = self.comm.rank
        self.size = self.comm.size
        self.handle = handle_for(self)
        self.a2a_size = {"a2a": self.size, "a2a+p2p": getattr(self.comm, "a2a", self.comm).size}.get(cp_comm_type, 1)

    def __repr__(self) -> str:
        return (
            f"ContextParallel(rank {self.rank} of {self.size}, cp_comm_type={self.cp_comm_type!r}, "
            f"layout={self.layout!r}, backend={self.backend!r})"
        )
