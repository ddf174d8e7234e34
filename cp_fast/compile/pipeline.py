"""The compiler: a rank's schedule is lowered, and passes make the plan fast.

`PASSES` lists every pass that can be switched off alone (`switched_off`); with all of them off the plan is slow and
right. Passes on tiles run before the plan has instructions, while a step's tiles become
launches (`cp_fast.compile.tiles.launches`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch

from cp_fast.compile.fold_batch import fold_batch
from cp_fast.compile.instructions import ExecutablePlan
from cp_fast.compile.link import linked
from cp_fast.compile.lower import Draft, lower
from cp_fast.compile.passes.accumulate_late import accumulate_late
from cp_fast.compile.passes.free_early import free_early
from cp_fast.compile.passes.hoist_copies import hoist_copies
from cp_fast.compile.passes.recv_in_place import recv_in_place
from cp_fast.compile.planning.choose_head_chunks import choose_head_chunks
from cp_fast.compile.planning.chosen_schedule import Schedules, chosen_program
from cp_fast.compile.tiles.windows import WindowRule, own_window
from cp_fast.runtime.packed_tensors import Packing
from cp_fast.runtime.row_selection import Rows
from cp_ref.spec import Problem, saved_kinds

__all__ = ["PASSES", "Pass", "Schedules", "compiled", "is_on", "lowered", "optimized", "switched_off", "upload"]

_LARGE = 2048  # query rows from which a tile of a packed batch keeps its own window


@dataclass(frozen=True)
class Pass:
    """One line of the table of passes.

    Attributes:
        on: what it changes: tiles before they are launches, the instructions of a plan, or the runtime's launches.
        does: what it does, in one sentence.
        reorders_keys: whether a launch may read keys in another order than their positions. Scores that depend on
            positions then need the positions of every row.
    """

    name: str
    on: Literal["tiles", "instructions", "launches"]
    does: str
    reorders_keys: bool = False


PASSES = (
    Pass(
        "accumulate_late", "instructions", "Partial results are accumulated beside messages, those of one sum together."
    ),
    Pass("recv_in_place", "instructions", "Messages are received where a launch reads them, without a copy."),
    Pass("hoist_copies", "instructions", "Copies that need no message run while messages travel."),
    Pass("free_early", "instructions", "Every buffer is freed after its last use."),
    Pass("low_precision_grads", "instructions", "Gradients from a single launch are sent in the launch's dtype."),
)


def lowered(packing: Packing, rank: int, schedules: Schedules, saved: tuple[str, ...]) -> Draft:
    """One rank's part of a schedule, lowered. `saved`: the kinds of operands that are kept between the passes."""
    problem, packed = packing.problem, packing.packed_problem
    if packing.folded:
        schedules = fold_batch(schedules, problem)
    rule = WindowRule(own_window(problem), _LARGE if problem.qkv_format == "thd" else 0)
    return lower(packed.workload, rank, *schedules, saved, rule, sink=problem.softmax_type != "vanilla")


def compiled(problem: Problem, rank: int, head_chunks: tuple[int, ...] | None = None) -> Draft:
    """The plan of one rank, made as for a call. `head_chunks`: see `make_schedule`; None for the chosen ones."""
    head_chunks = choose_head_chunks(problem) if head_chunks is None else head_chunks
    return optimized(lowered(Packing(problem), rank, chosen_program(problem, rank, head_chunks), saved_kinds(problem)))


_off: frozenset[str] = frozenset()


@contextmanager
def switched_off(*names: str) -> Iterator[None]:
    """Inside, these passes do not run, in any thread: plans are made without them.

    Raises:
        ValueError: a name that is not in `PASSES`.
    """
    global _off
    known = [one.name for one in PASSES]
    if unknown := set(names) - set(known):
        raise ValueError(f"names has {sorted(unknown)}, which are no compiler passes; the passes are {known}")
    before, _off = _off, _off | set(names)
    try:
        yield
    finally:
        _off = before


def is_on(name: str) -> bool:
    """Whether a pass runs."""
    return name not in _off


def optimized(draft: Draft, *, in_place: bool = False) -> Draft:
    """The draft after the passes on instructions.

    Args:
        in_place: whether the plan is updated in place: then its buffers and messages keep their places.
    """
    plan, tables = draft.plan, draft.tables
    kept = [number for number, _ in plan.saved]
    passes = [plan.forward, plan.backward]
    if is_on("accumulate_late"):
        passes = [accumulate_late(one) for one in passes]
    if is_on("recv_in_place") and not in_place:
        passes = [recv_in_place(one, tables, saved) for one, saved in zip(passes, (kept, ()), strict=True)]
    if is_on("hoist_copies") and not in_place:
        passes = [hoist_copies(one) for one in passes]
    if is_on("free_early"):
        passes = [free_early(one, saved) for one, saved in zip(passes, (kept, ()), strict=True)]
    forward, backward = passes
    return replace(draft, plan=plan.with_passes(forward, backward))


def upload(draft: Draft, device: torch.device) -> ExecutablePlan[Rows]:
    """The plan with its tables on the device, by one copy."""
    host = draft.tables.on_host(pinned=device.type == "cuda")
    return linked(draft.plan, draft.tables.on_device(host.to(device, non_blocking=True)))
