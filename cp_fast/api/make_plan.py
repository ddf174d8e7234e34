"""`make_plan`: from arguments to a plan on which all ranks agree."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan import Plan, agree_on
from cp_fast.backends import KERNEL_FEATURES, Backend, choose
from cp_fast.backends.required_features import EXECUTOR, required
from cp_fast.compile.buffers import in_order
from cp_fast.compile.chosen_schedule import choose_head_chunks, chosen_rank_schedule
from cp_fast.compile.in_place import FixedTables, Shape
from cp_fast.compile.index_tables import check_row_numbers
from cp_fast.compile.instruction_passes import low_precision_grads, may_have_low_precision
from cp_fast.compile.pipeline import lowered, optimized, upload
from cp_fast.movers.select_movers import kernels
from cp_fast.passes import is_on
from cp_fast.runtime.packed_tensors import Packing
from cp_fast.runtime.row_positions import RowPositions
from cp_fast.transport import carried_by, messages_for
from cp_ref.contract import plan_arguments as plans
from cp_ref.contract.declared import bind, implements, same_parameters
from cp_ref.contract.plan_arguments import read_plan_arguments
from cp_ref.contract.room import Agreement
from cp_ref.contract.score_mod import ScoreMod, frozen
from cp_ref.schedules.planners.make_schedule import saved_kinds
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.values import check_flag
from cp_ref.schedules.words import Feature, Unsupported, describe

__all__ = ["Made", "backend_for", "make_plan", "prepared", "supports"]


@same_parameters(plans.make_plan)
def make_plan(**arguments: Any) -> Plan:
    if torch.compiler.is_compiling():
        from cp_fast.dispatch.graph_break import graph_break  # Imports Dynamo, as slow as PyTorch's import.

        return graph_break(make_plan, **arguments)
    cp: Any = arguments.get("cp")
    custom = arguments.get("schedule")

    def make() -> Made:
        given = bind(plans.make_plan, arguments)
        agreement, backend, device = _read_plan_arguments(given)
        how = agreement, backend, device, custom, given["score_mod"]
        plan = prepared(cp, *how, linear=given["linear"])
        _ = plan.position_ids  # made now: a compiled layer that asks for them first could not
        return Made(agreement, plan)

    plan = agree_on(cp, make).plan
    if custom is None:
        _choose_messages(cp, plan)
    return plan


@implements(plans.supports)
def supports(**arguments: Any) -> tuple[bool, str]:
    try:
        _read_plan_arguments(bind(plans.make_plan, arguments))
    except Unsupported as refusal:
        return False, str(refusal)
    return True, ""


def backend_for(
    cp: ContextParallel,
    problem: Problem,
    device: str,
    *,
    deterministic: bool,
    return_max_logit: bool,
    in_place: bool = False,
    more: Set[Feature] = frozenset(),
) -> Backend:
    """The library for the problem by this choice, with the features `more` of a call too; raises ValueError, TypeError
    or Unsupported.
    """
    check_flag("deterministic", deterministic)
    check_flag("return_max_logit", return_max_logit)
    needs = required(problem, device, deterministic=deterministic, max_logit=return_max_logit, in_place=in_place) | more
    if missing := needs - KERNEL_FEATURES - EXECUTOR:
        raise Unsupported("this problem", {"cp_fast": missing}, f"cp_fast has {describe(EXECUTOR)}")
    return choose(needs, cp.backend)


class Made(NamedTuple):
    """A plan, and the arguments that must be equal on all ranks."""

    agreement: Agreement
    plan: Plan


@torch.inference_mode(False)  # an evaluation may make a plan, or the tables of its first call, and training use them
def prepared(
    cp: ContextParallel,
    agreement: Agreement,
    backend: Backend,
    device: torch.device,
    custom: Schedule | None = None,
    score_mod: ScoreMod | None = None,
    *,
    linear: bool = False,
) -> Plan:
    """This rank's plan, made before the ranks agree on it. An error on one rank (a failed build, no memory for the
    tables) is then raised on all. Sends nothing, and keeps no reference to the group.
    """
    kernels(device.type)
    carried_by()  # a wrong word in the environment raises, on a CPU too
    problem, room = agreement.problem, agreement.room
    if custom is None:
        head_chunks = choose_head_chunks(problem)
        steps, saved = chosen_rank_schedule(problem, cp.rank, head_chunks), saved_kinds(problem)
    else:
        head_chunks = ()
        steps, saved = (in_order(custom.forward[cp.rank]), in_order(custom.backward[cp.rank])), custom.saved
    packing = Packing(problem, may_fold=custom is None and is_on("fold_batch"))
    if room is None:
        draft = lowered(packing, cp.rank, steps, saved, shares_keys=backend.shares_keys)
        fixed, instructions = None, upload(optimized(draft), device)
    else:
        draft = lowered(packing, cp.rank, steps, saved)
        fixed = FixedTables(Shape(optimized(draft, in_place=True).plan, draft.tables, problem, cp.rank, room), device)
        instructions = fixed.overwrite(fixed.fitted(draft, problem))
    positions = RowPositions(instructions, packing.packed_problem, device)
    if not problem.position_free_scores:
        positions.make()
    return Plan(
        problem,
        cp.rank,
        device,
        backend,
        packing,
        instructions,
        positions,
        steps,
        head_chunks,
        custom=custom,
        score_mod=score_mod and frozen(score_mod),
        room=room,
        fixed=fixed,
        linear=linear,
    )


def _choose_messages(cp: ContextParallel, plan: Plan) -> None:
    """Give a new plan the transport and the sizes of messages that the ranks choose together. Collective."""
    problem, room, instructions = plan.problem, plan.room, plan.instructions
    tokens = (problem.starts_q[-1], problem.starts_kv[-1]) if room is None else (room.max_tokens_q, room.max_tokens_kv)
    rows = -(-tokens[0] // cp.size), -(-tokens[1] // cp.size)
    with cp.alone("an agreement on the messages of a plan"):
        carried = messages_for(cp.comm, problem, rows, plan.device)
        if "low_precision_grads" not in instructions.skipped and may_have_low_precision(problem):
            instructions = low_precision_grads(instructions, cp.comm, rounded=plan.backend.rounded_gradients)
    messages = None if carried is cp.comm else carried
    vars(plan).update(messages=messages, instructions=instructions)  # There is no other reference to the plan yet.


def _read_plan_arguments(given: dict[str, Any]) -> tuple[Agreement, Backend, torch.device]:
    agreement, device = read_plan_arguments(given, ContextParallel)
    check_row_numbers(agreement.problem, agreement.room)
    how = {name: given[name] for name in ("deterministic", "return_max_logit")}
    in_place = agreement.room is not None
    return agreement, backend_for(given["cp"], agreement.problem, device.type, **how, in_place=in_place), device
