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
    from cp_ref.api.reference_attention import attention
    from cp_ref.api.reference_context import ContextParallel
    from cp_ref.api.reference_plan import Plan, make_plan, supports
    from cp_ref.common.sharding.shard import position_ids, roll, shard, unshard
    from cp_ref.linear.attention_layer import linear_attention
    from cp_ref.linear.convolution_layer import causal_conv1d
    from cp_ref.oracle import dense_attention
    from cp_ref.simulator.sim_group import SimGroup
    from cp_ref.spec import Unsupported, compare_layouts
    from cp_ref.tracing.compare_traces import compare
    from cp_ref.tracing.recorded_trace import Trace
    from cp_ref.tracing.recorder import trace

__all__ = [
    "ContextParallel",
    "Plan",
    "SimGroup",
    "Trace",
    "Unsupported",
    "attention",
    "causal_conv1d",
    "compare",
    "compare_layouts",
    "dense_attention",
    "linear_attention",
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
    "ContextParallel": "api.reference_context",
    "Plan": "api.reference_plan",
    "SimGroup": "simulator.sim_group",
    "Trace": "tracing.recorded_trace",
    "Unsupported": "spec",
    "attention": "api.reference_attention",
    "causal_conv1d": "linear.convolution_layer",
    "compare": "tracing.compare_traces",
    "compare_layouts": "spec",
    "dense_attention": "oracle",
    "linear_attention": "linear.attention_layer",
    "make_plan": "api.reference_plan",
    "position_ids": "common.sharding.shard",
    "roll": "common.sharding.shard",
    "shard": "common.sharding.shard",
    "supports": "api.reference_plan",
    "trace": "tracing.recorder",
    "unshard": "common.sharding.shard",
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
