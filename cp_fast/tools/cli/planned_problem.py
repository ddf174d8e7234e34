"""From the options of `plan` to a problem and its schedule, by the same `make_plan` as a model's calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

import cp_fast
from cp_ref.contract.cli.options import ProblemOptions
from cp_ref.contract.group import PaperGroup
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule

__all__ = ["Request", "planned", "problem_of"]


@dataclass(frozen=True)
class Request(ProblemOptions):
    """The options, with defaults of a model's size."""

    seqlen: Annotated[int | None, Option(help="Length of every sequence of a bshd or sbhd batch; 8192.")] = None
    layout: Annotated[
        str, Option(help="dual_chunk (or zigzag), contiguous or balanced; dual_chunk unless given, with --predict all.")
    ] = ""
    heads_q: Annotated[int, Option(help="Query heads.")] = 32
    heads_kv: Annotated[int, Option(help="Key and value heads.")] = 8
    d_qk: Annotated[int, Option(help="Head dim of queries and keys.")] = 128
    dtype: Annotated[str, Option(help="float16, bfloat16, float32 or float64.")] = "bfloat16"

    @property
    def length(self) -> int:
        """The default length of a sequence."""
        return 8192 if self.seqlen is None else self.seqlen


def planned(request: Request) -> tuple[Problem, Schedule]:
    """The problem and the schedule of all ranks.

    Raises:
        ValueError, TypeError: naming what is wrong. Unsupported: naming what is missing.
    """
    plan = cp_fast.make_plan(**_arguments(request))
    return plan.problem, plan.schedule


def problem_of(request: Request) -> Problem:
    """The problem alone: nothing is planned, and no kernels are built for it.

    Raises:
        ValueError, TypeError: naming what is wrong.
    """
    from cp_ref.contract import plan_arguments as plans
    from cp_ref.contract.declared import bind

    agreement, _ = plans.read_plan_arguments(bind(plans.make_plan, _arguments(request)), cp_fast.ContextParallel)
    return agreement.problem


def _arguments(request: Request) -> dict[str, Any]:
    """The arguments of `make_plan`, for rank 0."""
    size, inner = request.cp_size, request.exchanging
    pair = PaperGroup(inner), PaperGroup(size // inner)
    group = pair if request.cp_comm_type == "a2a+p2p" else PaperGroup(size)
    words: Any = request.cp_comm_type, request.layout or "dual_chunk"  # Any text; the context refuses others.
    cp = cp_fast.ContextParallel(group, words[0], layout=words[1])
    cp.comm = PaperGroup(size)  # A pair asks every rank for its place in the grid; here all are rank 0.
    return {"cp": cp, "device": "cpu", **request.said(), **request.sizes()}
