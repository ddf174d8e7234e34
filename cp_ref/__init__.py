"""The readable reference of context-parallel attention: plain PyTorch, every step in the open. Import it to debug.

The names are those of `cp_fast`, with the same signatures: swap the import. This package also has the oracle
`dense_attention` (float64, by the definition), the simulated group `SimGroup`, the helpers `thd`, and `trace` and
`compare`, which find the first step and rank at which two runs differ.

A name is imported when it is first asked for: `cp_fast` needs `cp_ref.spec` and `cp_ref.common` alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_WHERE = {
    "ContextParallel": "context",
    "Plan": "plan",
    "SimGroup": "sim",
    "Trace": "tracing",
    "Unsupported": "spec",
    "attention": "api",
    "compare": "comparison",
    "compare_layouts": "spec",
    "dense_attention": "oracle",
    "make_plan": "plan",
    "position_ids": "common.slices",
    "roll": "common.slices",
    "shard": "common.slices",
    "supports": "plan",
    "trace": "recorder",
    "unshard": "common.slices",
}


def __getattr__(name: str) -> Any:
    """A public name, or a module of the package."""
    if name in _WHERE:
        found = getattr(importlib.import_module(f"cp_ref.{_WHERE[name]}"), name)
        globals()[name] = found
        return found
    try:
        return importlib.import_module(f"cp_ref.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"cp_ref.{name}":
            raise
    raise AttributeError(f"module 'cp_ref' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
