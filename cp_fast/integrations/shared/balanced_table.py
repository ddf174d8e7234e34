"""Layout "balanced" for the integrations: the rows of each rank of a batch, decided once for all layers.

`make_plan` decides it by the mask of one kind of layer. A model may have several, with and without a window, and all
must have the same rows on each rank. So this module decides by the lengths alone, as for a causal mask, and passes
every layer the table: right for every mask, and balanced for causal ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_fast.api.fast_context import ContextParallel, PlanCache
from cp_ref.calls import plan_arguments as plans
from cp_ref.calls.plan_arguments import read_call
from cp_ref.groups.group import Group
from cp_ref.groups.process_groups import as_group
from cp_ref.problems.arguments import problem_arguments
from cp_ref.problems.read_problem import Sizes
from cp_ref.schedules.problem import table_of

__all__ = [
    "BalancedTable",
    "check_holds",
    "groups_of",
    "table_of_batch",
]

# ---- whose tokens count
#
# Whose tokens count: the ranks that share a step, as a group, a mesh or a context says them.


def groups_of(over: Any) -> list[Group]:
    """This rank's groups: one, or of a mesh one for each dimension.

    Raises:
        TypeError: `over` is nothing of the kind. ValueError: this process is no member of it.
    """
    if isinstance(over, ContextParallel):
        return [over.comm]
    if isinstance(over, DeviceMesh) and over.ndim > 1:
        if over.get_coordinate() is None:
            raise ValueError(f"over is {over!r}, which this process (rank {dist.get_rank()}) is no member of")
        return [as_group(over.get_group(dim), "p2p") for dim in range(over.ndim)]
    if not isinstance(over, DeviceMesh | dist.ProcessGroup):
        raise TypeError(
            f"over is a {type(over).__name__}; it must be a ContextParallel, a ProcessGroup or a DeviceMesh"
        )
    return [as_group(over, "p2p")]


def check_holds(over: Any, groups: Sequence[Group], cp: ContextParallel) -> None:
    """Raise ValueError unless all ranks of a context are among those of `over`, if there is one; groups: its groups."""
    if over is None:
        return
    mine = _ranks([getattr(cp.comm, name) for name in ("a2a", "p2p") if hasattr(cp.comm, name)] or [cp.comm])
    theirs = set(over.mesh.flatten().tolist()) if isinstance(over, DeviceMesh) else _ranks(groups)
    if missing := sorted(mine - theirs):
        raise ValueError(
            f"over has global ranks {sorted(theirs)}, but not {missing}; it must have all ranks of cp, whose tokens "
            "are parts of the same sequences"
        )


def _ranks(groups: Sequence[Group]) -> set[int]:
    """The global ranks of process groups; none of simulated groups."""
    return {rank for group in groups for rank in getattr(group, "ranks", ())}


# ---- tables of balanced batches


_KEPT = 16  # Batches of an accumulation step.


class BalancedTable(plans.Plan):
    """One batch's rows on all ranks.

    `shard`, `unshard`, `roll` and `position_ids` take it as their plan, with its context.
    """

    def __init__(self, cp: ContextParallel, **lengths: Any) -> None:
        heads = cp.a2a_size  # No row depends on it.
        sizes = Sizes(heads, heads, 1, 1, "float32", lengths.pop("batch_size", None), lengths.pop("seqlen", None))
        given = problem_arguments(lengths | {"attn_mask_type": "padding_causal"})
        self.problem = table_of(read_call(cp, sizes, **given))
        self.rank, self.device = cp.rank, torch.device("cpu")
        self._contexts: WeakKeyDictionary[ContextParallel, ContextParallel] = WeakKeyDictionary()

    def over(self, cp: ContextParallel) -> ContextParallel:
        """The context for `attention` without a plan, for layers with this one: its layout is the table.

        Raises:
            ValueError: it has another number of ranks.
        """
        if cp.size != self.problem.cp_size:
            raise ValueError(f"the batch was cut for {self.problem.cp_size} ranks, but cp has {cp.size}")
        if cp not in self._contexts:
            self._contexts[cp] = cp.holding(self.problem.layout)
        return self._contexts[cp]


_tables: WeakKeyDictionary[ContextParallel, PlanCache[Any, BalancedTable]] = WeakKeyDictionary()


def table_of_batch(
    cp: ContextParallel,
    qkv_format: str,
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded: torch.Tensor | None = None,
    *,
    seqlen: int | None = None,
) -> BalancedTable:
    """The rows of each rank of a batch. Sends nothing: equal lengths give equal tables on all ranks.

    Args:
        cp: with layout "balanced".
        qkv_format: "bshd", "sbhd" or "thd".
        cu_seqlens: GLOBAL cumulative lengths of real tokens, int32 or int64 [b + 1], on the CPU.
        cu_seqlens_padded: thd only, the same with padding.
        seqlen: bshd and sbhd only, the global sequence length.

    Returns:
        The same object for equal lengths, of the last few batches.

    >>> from cp_ref import SimGroup
    >>> def one(member):
    ...     cp = ContextParallel(member, layout="balanced")
    ...     return table_of_batch(cp, "thd", torch.tensor([0, 6, 8, 10, 12])).problem.layout
    >>> SimGroup(2).run(one)[0]  # rank, sequence, start, stop
    ((0, 0, 5, 6), (0, 1, 0, 2), (0, 2, 0, 2), (0, 3, 0, 1), (1, 0, 0, 5), (1, 3, 1, 2))
    """
    given = (
        (qkv_format, seqlen),
        *(None if x is None else (x.dtype, x.numpy().tobytes()) for x in (cu_seqlens, cu_seqlens_padded)),
    )

    def make() -> BalancedTable:
        sizes: dict[str, Any] = {} if qkv_format == "thd" else {"batch_size": len(cu_seqlens) - 1, "seqlen": seqlen}
        lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_q_padded": cu_seqlens_padded}
        return BalancedTable(cp, qkv_format=qkv_format, **sizes, **lengths)

    return _tables.setdefault(cp, PlanCache(_KEPT)).find(given, make)
