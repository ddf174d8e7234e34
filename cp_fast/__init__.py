"""Context-parallel attention at the speed of the hardware. Import it in production; `cp_ref` has the same names, to
debug.
"""

from cp_fast import masks, thd
from cp_fast.api import attention
from cp_fast.checking import checked
from cp_fast.context import ContextParallel
from cp_fast.plan import Plan, make_plan, supports
from cp_ref.common.slices import position_ids, roll, shard, unshard
from cp_ref.spec import Unsupported, compare_layouts

__all__ = [
    "ContextParallel",
    "Plan",
    "Unsupported",
    "attention",
    "checked",
    "compare_layouts",
    "make_plan",
    "masks",
    "position_ids",
    "roll",
    "shard",
    "supports",
    "thd",
    "unshard",
]
