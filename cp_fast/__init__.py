"""Context-parallel attention at the speed of the hardware. Import it in production; `cp_ref` has the same names, to
debug.

To understand how it works, read the hour of `cp_ref` first (its `__init__` has an order), then for another hour, in the
order of one call. Read of each file the part that is named here; the rest can wait. DESIGN.md has the reasons.

    compile/program             what a schedule becomes: seven instructions on numbered buffers (up to its text form)
    compile/pipeline            the compiler on one page: lowering, passes, tables on the device
    runtime/run                 how an instruction becomes an operation, the loop, and what lies around it
    kernels/attention/backend_protocol
                                what a kernel library is asked (`Backend`; `varlen_batch` has its tiles)
    api/attention               the public call and its autograd function
    api/calls                   a call is checked, or known from before; the plan of a call without one
    api/plan                    what `make_plan` returns, and `update`
    api/compiled_batch          what a plan holds: a batch, compiled for this rank
    compile/chosen_schedule     which schedule runs, of those that a planner can make
    compile/lower               a step's messages and tiles as instructions, right and slow
    passes                      the table of what makes them fast; `print(plan.programs)` shows what they did
    compile/instruction_passes  the simplest of these: functions from program to program
    runtime/operations          the operations (the first few; the others are alike)
    movers/mover_protocol       copies, sums and merges of rows, behind one interface

Of the rest, `transport` moves messages through the memory of peers, `layers` has all other layers,
`integrations` has a module for each framework, and `tools` the commands and the cost
model.

Python imports a name's module when the name is asked for, so that command lines answer `--help` without PyTorch.
`SimGroup`, `Trace`, `compare` and `dense_attention` are those of `cp_ref`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cp_fast import masks, thd
    from cp_fast.api.attention import attention
    from cp_fast.api.checked_calls import checked
    from cp_fast.api.fast_context import ContextParallel
    from cp_fast.api.plan import Plan, make_plan, supports
    from cp_fast.layers.causal_conv1d import causal_conv1d
    from cp_fast.layers.compress_keys import compress_keys
    from cp_fast.layers.linear_attention import linear_attention
    from cp_fast.layers.sparse_attention import compressed_attention, index_loss, select_keys, sparse_attention
    from cp_fast.tools.fast_trace import trace
    from cp_ref import SimGroup, Trace, compare, dense_attention
    from cp_ref.batches.sharding import position_ids, roll, shard, unshard
    from cp_ref.problems.compare_layouts import compare_layouts
    from cp_ref.schedules.words import Unsupported
    from cp_ref.show.version import __version__ as __version__

__all__ = [
    "ContextParallel",
    "Plan",
    "SimGroup",
    "Trace",
    "Unsupported",
    "attention",
    "causal_conv1d",
    "checked",
    "compare",
    "compare_layouts",
    "compress_keys",
    "compressed_attention",
    "dense_attention",
    "index_loss",
    "linear_attention",
    "make_plan",
    "masks",
    "position_ids",
    "roll",
    "select_keys",
    "shard",
    "sparse_attention",
    "supports",
    "thd",
    "trace",
    "unshard",
]

_WHERE = {
    "ContextParallel": "cp_fast.api.fast_context",
    "Plan": "cp_fast.api.plan",
    "SimGroup": "cp_ref",
    "Trace": "cp_ref",
    "Unsupported": "cp_ref.schedules.words",
    "__version__": "cp_ref.show.version",
    "attention": "cp_fast.api.attention",
    "causal_conv1d": "cp_fast.layers.causal_conv1d",
    "checked": "cp_fast.api.checked_calls",
    "compare": "cp_ref",
    "compare_layouts": "cp_ref.problems.compare_layouts",
    "compress_keys": "cp_fast.layers.compress_keys",
    "compressed_attention": "cp_fast.layers.sparse_attention",
    "dense_attention": "cp_ref",
    "index_loss": "cp_fast.layers.sparse_attention",
    "linear_attention": "cp_fast.layers.linear_attention",
    "make_plan": "cp_fast.api.plan",
    "position_ids": "cp_ref.batches.sharding",
    "roll": "cp_ref.batches.sharding",
    "select_keys": "cp_fast.layers.sparse_attention",
    "shard": "cp_ref.batches.sharding",
    "sparse_attention": "cp_fast.layers.sparse_attention",
    "supports": "cp_fast.api.plan",
    "trace": "cp_fast.tools.fast_trace",
    "unshard": "cp_ref.batches.sharding",
}


def __getattr__(name: str) -> Any:
    """A public name, or a module of the package."""
    if name in _WHERE:
        found = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = found
        return found
    try:
        return importlib.import_module(f"cp_fast.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"cp_fast.{name}":
            raise
    raise AttributeError(f"module 'cp_fast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
