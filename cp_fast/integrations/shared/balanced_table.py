"""Layout "balanced" for the integrations: the rows of each rank of a batch, decided once for all layers.

`make_plan` decides it by the mask of one kind of layer. A model may have several, with and without a window, and all
must have the same rows on each rank. So this module decides by the lengths alone, as for a causal mask, and passes
every layer the table: right for every mask, and balanced for causal ones.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan_cache import PlanCache
from cp_ref.contract import plan_arguments as plans
from cp_ref.contract.attention_call import problem_arguments
from cp_ref.contract.plan_arguments import read_call
from cp_ref.contract.read_problem import Sizes
from cp_ref.schedules.problem import table_of

__all__ = ["BalancedTable", "table_of_batch"]

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
