"""The ranks that take part, and how they share the work: the one object that every call of the API takes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self, cast
from weakref import WeakKeyDictionary

from cp_ref.calls.declared import not_a_dataclass, replaced
from cp_ref.groups.group import PairGroup
from cp_ref.groups.process_groups import as_group, error_context
from cp_ref.schedules.ownership import read_layout
from cp_ref.schedules.planners.make_schedule import SCHEDULES
from cp_ref.schedules.values import check_choice
from cp_ref.schedules.words import (
    AUTO,
    LAYOUTS,
    OFFSET_GRADS,
    CPCommType,
    Layout,
    OffsetGrad,
    ScheduleName,
    canonical_layout,
)

__all__ = [
    "ContextParallel",
]


@not_a_dataclass
@dataclass(eq=False, repr=False)
class ContextParallel:
    """A group of ranks, the schedule they follow and the kernels they compute with.

    Args:
        group: a torch.distributed ProcessGroup, a 1-D DeviceMesh, or one member of a `SimGroup`; for "a2a+p2p" a pair
            (a2a_group, p2p_group) of these (`member.split(a2a_size)`), or a 2-D DeviceMesh [p2p, a2a].
        cp_comm_type: "p2p" (ring attention), "all_gather", "a2a" (Ulysses), "a2a+p2p", or "auto": each plan, and each
            call without one, takes "all_gather", "a2a" or "p2p" by an estimate of time and memory, the same on all
            ranks; `print(plan)` says which and why. Over a pair of groups "auto" is "a2a+p2p".
        layout: which rank owns which tokens: "dual_chunk" (every sequence over all ranks, balanced under causal masks;
            "zigzag" is the same), "contiguous" (equal stretches), or "balanced" (whole documents where they fit, equal
            work on all ranks; decided by `make_plan`, whose plan `shard` and the like then take).
        backend: in `cp_fast`, "auto" takes the first kernel library that works here and supports the problem; a name
            ("fa4", "cudnn", "fa2", "cpu", "torch") takes only that one. `cp_ref` has only plain PyTorch, and takes
            "auto" alone.
        softmax_offset_grad: the meaning of a rank's gradient of softmax_offset. "share": from the rank's queries, as
            its gradients of all other weights are from its tokens; the ranks' shares add up to the total, so sum or
            average it over the group with the other gradients. "total": the sum over the group, the same on every rank;
            do not reduce it again.

    Attributes:
        rank: this rank, from 0.
        size: the number of ranks.
        schedules: those that its plans may follow: `cp_comm_type` alone, or what "auto" chooses from.
        a2a_size: how many ranks exchange heads: all of them in "a2a", the inner group in "a2a+p2p", else 1. Where
            "auto" has a choice it is 1, and a plan's problem has its own.
        uneven: rows of a slice -> length of the whole sequence. `shard` notes here each length that does not divide by
            the number of chunks, so that `attention` and `unshard` know it. All contexts of the group with this layout
            share it.
        comm: the group as a `cp_ref.groups.group.Group`.

    A copy, deep or not, is the context itself.

    Raises:
        TypeError: `group` is none of the above. ValueError: a name that does not exist. AttributeError: one of its
            arguments, or what follows from them, is set or deleted later; make another context.

    >>> from cp_ref import SimGroup
    >>> SimGroup(2).run(lambda member: str(ContextParallel(member)))[1]
    "ContextParallel(rank 1 of 2, cp_comm_type='p2p', layout='dual_chunk', backend='auto')"
    """

    backends: ClassVar[tuple[str, ...]] = ("auto",)  # The package takes these names.

    group: Any
    cp_comm_type: CPCommType = "p2p"
    _: KW_ONLY
    layout: Layout = "dual_chunk"
    backend: str = "auto"
    softmax_offset_grad: OffsetGrad = "share"

    def __post_init__(self) -> None:
        check_choice("cp_comm_type", self.cp_comm_type, (*SCHEDULES, "auto"))
        self.layout = canonical_layout(self.layout)
        check_choice("layout", self.layout, LAYOUTS)
        check_choice("softmax_offset_grad", self.softmax_offset_grad, OFFSET_GRADS)
        check_choice("backend", self.backend, self.backends)
        self.comm = as_group(self.group, self.cp_comm_type)
        self.rank = self.comm.rank
        self.size = self.comm.size
        self.uneven = _uneven_of(self.group, self.size, self.layout)
        row = getattr(self.comm, "a2a", self.comm)
        self.schedules = self._schedules()
        self.a2a_size = SCHEDULES[self.schedules[0]].a2a_size(self.size, row.size)

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_not_made(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._check_not_made(name)
        super().__delattr__(name)

    def _check_not_made(self, name: str) -> None:
        if name in _MADE_ONCE and "a2a_size" in vars(self):  # The last attribute that is made.
            raise AttributeError(f"{name} of a context is set when it is made; make another ContextParallel")

    def _schedules(self) -> tuple[ScheduleName, ...]:
        if self.cp_comm_type != "auto":
            return (self.cp_comm_type,)
        return ("a2a+p2p",) if isinstance(self.comm, PairGroup) else AUTO  # A pair joins no other ranks.

    def holding(self, table: Any) -> Self:
        """This context for the calls of one batch with a table as its layout: see `make_plan(layout=)`.

        `attention` without a plan takes it; `shard` and the like take a plan. The group and its caches are the same.
        """
        made = replaced(self)
        vars(made)["layout"] = read_layout(table)
        return made

    def naming_errors(self, what: str) -> AbstractContextManager[None]:
        """During a call on the group: a PeerError names the call."""
        return error_context(what)

    def __copy__(self) -> Self:
        return self  # Nothing of it changes: a model's deep copy takes part in the same group.

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __repr__(self) -> str:
        layout: Any = self.layout
        named = repr(layout) if isinstance(layout, str) else "a table"
        return (
            f"ContextParallel(rank {self.rank} of {self.size}, cp_comm_type={self.cp_comm_type!r}, "
            f"layout={named}, backend={self.backend!r})"
        )


_ARGUMENTS = ("group", "cp_comm_type", "layout", "backend", "softmax_offset_grad")
_MADE_ONCE = (*_ARGUMENTS, "rank", "size", "schedules", "uneven", "a2a_size")

# Freed with its group.
_uneven: WeakKeyDictionary[Any, dict[tuple[int, Layout], dict[int, int]]] = WeakKeyDictionary()


def _uneven_of(group: Any, size: int, layout: Layout) -> dict[int, int]:
    """The dictionary `uneven` of all contexts of a group with a layout."""
    parts = cast("tuple[Any, ...]", group) if isinstance(group, tuple | list) else (group,)
    try:
        return _uneven.setdefault(parts[0], {}).setdefault((size, layout), {})
    except TypeError:  # A user's group without a hash or weak references: a dictionary for each context.
        return {}
