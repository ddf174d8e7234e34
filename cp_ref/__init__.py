"""The readable reference of context-parallel attention: plain PyTorch, every step in the open. Import it to debug.

The names are those of `cp_fast`, with the same signatures: swap the import. This package also has the oracle
`dense_attention` (float64, by the definition), the simulated group `SimGroup`, the helpers `thd`, and `trace` and
`compare`, which find the first step and rank at which two runs differ.

To understand how it works, read for an hour, in this order. Begin with `python -m cp_ref explain`, which walks through
a schedule of your choice, message by message. (The repository has the four schedules in pictures too:
docs/concepts.md.) Read of each file the part that is named here; the rest can wait.

    schedules/table                      tables of integers as columns, and `Spans`: what all that follows is made of
    schedules/areas                      the three tables: who sees whom (up to the reading of what users give),
    schedules/ownership                  who holds which row (up to the layouts by name),
    schedules/schedule                   who computes and sends what, step by step (up to its text form)
    schedules/problem                    one call as integers: `Problem`, and `Workload`, the first two tables of it
    schedules/planners/ring_members      who sees which keys of whom: what all planners ask (up to how it is found)
    schedules/planners/all_gather        the schedules, the simplest one first
    schedules/planners/p2p
    schedules/planners/a2a
    schedules/planners/make_schedule     their list, `SCHEDULES`; a new schedule is a planner, an entry there, and its
                                         name in `ScheduleName` and `CPCommType` (schedules/words)
    contract/group                       how messages travel: `Group`, which a simulated group and processes have
    simulator                            the group that is one process (its first page)
    executor/play_schedule               a few lines play every schedule, forward and backward
    executor/rank_tensors                what a rank holds meanwhile
    executor/tile_attention              the arithmetic of one tile
    executor/merge_partials              how partial results become one
    reference_attention                  a call: read it, run the passes, add the sink, return
    oracle                               the definition, which all of this has to agree with
    schedules/verify/proof               why a schedule is right, without a tensor. It asks three things:
    schedules/verify/well_formed         does every line mean something?
    schedules/verify/rehearsal           does every message meet its receive?
    schedules/verify/coverage            is every visible pair computed exactly once?

Of the rest, `contract` has what both packages promise (arguments, checks, groups, masks), `layer_calls` the way of a
call of a linear or sparse layer, `linear` the linear layers,
`sparse` attention to chosen keys, `thd` helpers for packed batches, and `tracing` the traces.

A name is imported when it is first asked for: `cp_fast` needs `cp_ref.schedules` and `cp_ref.contract` alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cp_ref import masks, thd
    from cp_ref.contract.compare_layouts import compare_layouts
    from cp_ref.contract.sharding import position_ids, roll, shard, unshard
    from cp_ref.contract.version import __version__ as __version__
    from cp_ref.linear.layers import causal_conv1d, linear_attention
    from cp_ref.oracle import dense_attention
    from cp_ref.reference_attention import attention
    from cp_ref.reference_plan import ContextParallel, Plan, make_plan, supports
    from cp_ref.schedules.words import Unsupported
    from cp_ref.simulator import SimGroup
    from cp_ref.sparse import index_loss, select_keys, sparse_attention
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
    "ContextParallel": "reference_plan",
    "Plan": "reference_plan",
    "SimGroup": "simulator",
    "Trace": "tracing.recorded_trace",
    "Unsupported": "schedules.words",
    "__version__": "contract.version",
    "attention": "reference_attention",
    "causal_conv1d": "linear.layers",
    "compare": "tracing.compare_traces",
    "compare_layouts": "contract.compare_layouts",
    "dense_attention": "oracle",
    "index_loss": "sparse",
    "linear_attention": "linear.layers",
    "make_plan": "reference_plan",
    "position_ids": "contract.sharding",
    "roll": "contract.sharding",
    "select_keys": "sparse",
    "shard": "contract.sharding",
    "sparse_attention": "sparse",
    "supports": "reference_plan",
    "trace": "tracing.recorder",
    "unshard": "contract.sharding",
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
