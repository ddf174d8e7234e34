"""Context-parallel attention at the speed of the hardware. Import it in production; `cp_ref` has the same names, to
debug.

`SimGroup`, `Trace`, `compare` and `dense_attention` are those of `cp_ref`, which is imported when one is asked for.
"""

from typing import TYPE_CHECKING, Any

from cp_fast import masks, thd
from cp_fast.api import attention
from cp_fast.checking import checked
from cp_fast.context import ContextParallel
from cp_fast.debugging import OF_THE_REFERENCE, of_the_reference, trace
from cp_fast.plan import Plan, make_plan, supports
from cp_ref.common.slices import position_ids, roll, shard, unshard
from cp_ref.spec import Unsupported, compare_layouts

if TYPE_CHECKING:
    from cp_ref import SimGroup, Trace, compare, dense_attention

__all__ = [
    "ContextParallel",
    "Plan",
    "SimGroup",
    "Trace",
    "Unsupported",
    "attention",
    "checked",
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


def __getattr__(name: str) -> Any:
    if name in OF_THE_REFERENCE:
        return of_the_reference(name)
    raise AttributeError(f"module 'cp_fast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
