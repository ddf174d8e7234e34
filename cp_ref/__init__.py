"""The readable reference of context-parallel attention: plain PyTorch, every step in the open. Import it to debug.

The names are those of `cp_fast`, with the same signatures: swap the import. Only here are the oracle
`dense_attention` (float64, by the definition), the simulated group `SimGroup`, the helpers `thd`, and `trace` and
`compare`, which find the first step and rank where two runs part.
"""

from cp_ref import masks, thd
from cp_ref.api import attention
from cp_ref.common.slices import position_ids, roll, shard, unshard
from cp_ref.comparison import compare
from cp_ref.context import ContextParallel
from cp_ref.oracle import dense_attention
from cp_ref.plan import Plan, make_plan, supports
from cp_ref.recorder import trace
from cp_ref.sim import SimGroup
from cp_ref.spec import Unsupported, compare_layouts
from cp_ref.tracing import Trace

__all__ = [
    "ContextParallel",
    "Plan",
    "SimGroup",
    "Trace",
    "Unsupported",
    "attention",
    "compare",
    "compare_layouts",
    "dense_attention",
    "make_plan",
    "masks",
    "position_ids",
    "roll",
    "shard",
    "supports",
    "thd",
    "trace",
    "unshard",
]
