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
    schedules/planners/visibility        who sees which keys of whom: what all planners ask (up to how it is found)
    schedules/planners/all_gather        the schedules, the simplest one first
    schedules/planners/p2p
    schedules/planners/a2a
    schedules/planners/make_schedule     their list, `SCHEDULES`; a new schedule is a planner, an entry there, and its
                                         name in `ScheduleName` and `CPCommType` (schedules/words)
    groups/group                         how messages travel: `Group`, which a simulated group and processes have
    reference/simulator                  the group that is one process (its first page)
    reference/executor/play_schedule     a few lines play every schedule, forward and backward
    reference/executor/rank_tensors      what a rank holds meanwhile
    reference/executor/tile_attention    the arithmetic of one tile
    reference/executor/merge_partials    how partial results become one
    reference/reference_attention        a call: read it, run the passes, add the sink, return
    reference/oracle                     the definition, which all of this has to agree with
    schedules/verify/proof               why a schedule is right, without a tensor. It asks three things:
    schedules/verify/well_formed         does every line mean something?
    schedules/verify/rehearsal           does every message meet its receive?
    schedules/verify/coverage            is every visible pair computed exactly once?

The rooms, each above those that it imports; the first three know no tensor:

    schedules      integers: tables, planners, the proof
    problems       from arguments to a problem on integers; checks of a call against it; the rows of a slice
    show           pictures of schedules, and what both command lines print
    groups         ranks that exchange and agree, and the context that a call takes
    batches        tensors of a batch: cut, put together again; masks as areas; dtypes and derivatives
    calls          the public functions, declared: signature, docstring and checks; scores that depend on places
    thd_helpers    helpers for packed batches, declared
    reference      what computes: the oracle, the simulated group, the reference of attention and of every layer
    tracing        runs that are recorded and compared

`cp_fast` may enter all of these but the last two. A name is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cp_ref import masks, thd
    from cp_ref.batches.sharding import position_ids, roll, shard, unshard
    from cp_ref.problems.compare_layouts import compare_layouts
    from cp_ref.reference.compressed import compress_keys
    from cp_ref.reference.linear.layers import causal_conv1d, linear_attention
    from cp_ref.reference.oracle import dense_attention
    from cp_ref.reference.reference_attention import attention
    from cp_ref.reference.reference_plan import ContextParallel, Plan, make_plan, supports
    from cp_ref.reference.simulator import SimGroup
    from cp_ref.reference.sparse import compressed_attention, index_loss, select_keys, sparse_attention
    from cp_ref.schedules.words import Unsupported
    from cp_ref.show.version import __version__ as __version__
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
    "ContextParallel": "reference.reference_plan",
    "Plan": "reference.reference_plan",
    "SimGroup": "reference.simulator",
    "Trace": "tracing.recorded_trace",
    "Unsupported": "schedules.words",
    "__version__": "show.version",
    "attention": "reference.reference_attention",
    "causal_conv1d": "reference.linear.layers",
    "compare": "tracing.compare_traces",
    "compare_layouts": "problems.compare_layouts",
    "compress_keys": "reference.compressed",
    "compressed_attention": "reference.sparse",
    "dense_attention": "reference.oracle",
    "index_loss": "reference.sparse",
    "linear_attention": "reference.linear.layers",
    "make_plan": "reference.reference_plan",
    "position_ids": "batches.sharding",
    "roll": "batches.sharding",
    "select_keys": "reference.sparse",
    "shard": "batches.sharding",
    "sparse_attention": "reference.sparse",
    "supports": "reference.reference_plan",
    "trace": "tracing.recorder",
    "unshard": "batches.sharding",
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
