"""The readable reference of context-parallel attention: plain PyTorch, every step in the open. Import it to debug.

The names are those of `cp_fast`, with the same signatures: swap the import and the numbers can be compared step by
step. The oracle `dense_attention` (float64, by the definition) and the simulated group `SimGroup` are only here.
"""

from cp_ref.api import attention
from cp_ref.context import ContextParallel
from cp_ref.oracle import dense_attention
from cp_ref.plan import Plan, make_plan, supports
from cp_ref.sharding import position_ids, shard, unshard
from cp_ref.sim import SimGroup
from cp_ref.spec import Unsupported

__all__ = [
    "ContextParallel",
    "Plan",
    "SimGroup",
    "Unsupported",
    "attention",
    "dense_attention",
    "make_plan",
    "position_ids",
    "shard",
    "supports",
    "unshard",
]
