"""Who takes part, and how the work is shared: the one object that every call of the API takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from cp_fast.backends import BACKENDS
from cp_fast.comm import as_group, during
from cp_fast.handles import OfThisProcess, handle_for
from cp_fast.turns import Turn, alone_in, turns_of
from cp_ref.spec import CP_COMM_TYPES, LAYOUTS, check_choice

__all__ = ["ContextParallel"]


class ContextParallel(OfThisProcess):
    """A group of ranks, the schedule they follow and the kernels they compute with.

    Args:
        group: a torch.distributed ProcessGroup, a 1-D DeviceMesh, or one member of a `SimGroup`; for "a2a+p2p" a pair
            (a2a_group, p2p_group) of these (`member.split(a2a_size)`), or a 2-D DeviceMesh [p2p, a2a].
        cp_comm_type: "p2p" (ring attention), "all_gather", "a2a" (Ulysses) or "a2a+p2p".
        layout: which rank owns which tokens: "dual_chunk" (balanced under causal masks) or "contiguous".
        backend: "auto" takes the first kernel library that works here and has what the problem needs; a name ("fa4",
            "cudnn", "fa2", "cpu", "torch") takes that one and never another.

    Attributes:
        rank, size: this rank and the number of ranks.
        a2a_size: how many ranks exchange heads: all of them in "a2a", the inner group in "a2a+p2p", else 1.
        comm: the group as a `cp_ref.spec.Group`.

    A copy, deep or not, is the context itself; it cannot be pickled, as it belongs to its process.

    Raises:
        TypeError: `group` is none of the above. ValueError: a name that does not exist.
    """

    def __init__(
        self, group: Any, cp_comm_type: str = "p2p", *, layout: str = "dual_chunk", backend: str = "auto"
    ) -> None:
        check_choice("cp_comm_type", cp_comm_type, CP_COMM_TYPES)
        check_choice("layout", layout, LAYOUTS)
        check_choice("backend", backend, ("auto", *(b.name for b in BACKENDS)))
        self.group = group
        self.cp_comm_type = cp_comm_type
        self.layout = layout
        self.backend = backend
        self.comm = as_group(group, cp_comm_type)
        self.rank = self.comm.rank
        self.size = self.comm.size
        self.handle = handle_for(self)
        self._turns = turns_of(group)
        self.a2a_size = {"a2a": self.size, "a2a+p2p": getattr(self.comm, "a2a", self.comm).size}.get(cp_comm_type, 1)

    def alone(self, what: str) -> AbstractContextManager[None]:
        """While a call is made: RuntimeError where another thread is inside one on the same group; a PeerError says
        what was called.
        """
        return _call(self._turns, what)

    def next_number(self) -> int:
        """Of the checked calls on the group, from 1."""
        return self._turns[0].next_number()

    def __copy__(self) -> ContextParallel:
        return self  # nothing of it changes: a model's deep copy takes part in the same group

    def __deepcopy__(self, memo: Any) -> ContextParallel:
        return self

    def __repr__(self) -> str:
        return (
            f"ContextParallel(rank {self.rank} of {self.size}, cp_comm_type={self.cp_comm_type!r}, "
            f"layout={self.layout!r}, backend={self.backend!r})"
        )


@contextmanager
def _call(turns: tuple[Turn, ...], what: str) -> Iterator[None]:
    with alone_in(turns, what), during(what):
        yield
