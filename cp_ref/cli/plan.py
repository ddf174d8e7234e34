"""`plan`: one problem by the reference's schedule, in sections; `explain` is its walk-through, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from typer import Option

from cp_ref.reference.reference_plan import ContextParallel, Plan, make_plan
from cp_ref.reference.simulator import SimGroup, SimMember
from cp_ref.schedules.ownership import divisor
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule
from cp_ref.show.cli.description import (
    Description,
    HeadOption,
    RankOption,
    SectionsOption,
    SvgOption,
    TextOption,
)
from cp_ref.show.cli.options import ProblemOptions, cumulative, with_options

__all__ = ["Request", "plan"]


@dataclass(frozen=True)
class Request(ProblemOptions):
    """The options as given; `plan` is the resulting plan."""

    seed: Annotated[int, Option(help="Of random tensors; a token's numbers do not depend on who owns it.")] = 0

    @cached_property
    def plan(self) -> Plan:
        """Rank 0's plan: the problem and the schedule of all ranks.

        Raises:
            ValueError, TypeError, Unsupported: naming what is wrong.
        """
        return SimGroup(self.cp_size).run(lambda member: self.plan_of(self.context(member)))[0]

    def plan_of(self, cp: ContextParallel) -> Plan:
        """A rank's plan. Collective."""
        return make_plan(cp=cp, device="cpu", **self.sizes(), **self.arguments)

    def planned(self) -> tuple[Problem, Schedule]:
        return self.plan.problem, self.plan.schedule

    @property
    def problem(self) -> Problem:
        """The problem to compute."""
        return self.plan.problem

    @property
    def padded(self) -> int:
        """How many slots of padding were added to make lengths divide."""
        added = (s.slots_q - s.len_q + s.slots_kv - s.len_kv for s in self.problem.sequences)
        return sum(added) if self.in_format == "thd" else 0

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `attention` and `dense_attention` that describe the problem; thd is padded to divide."""
        said = self.said()
        if self.in_format == "thd":
            multiple = divisor(self.layout, self.cp_size)
            for side, lengths in (("q", self.lengths_q), ("kv", self.lengths_kv)):
                if lengths is not None:
                    said[f"cu_seqlens_{side}_padded"] = cumulative([-(-n // multiple) * multiple for n in lengths])
        return said

    def context(self, member: SimMember) -> ContextParallel:
        """A rank's context."""
        group = member.split(self.exchanging) if self.cp_comm_type == "a2a+p2p" else member
        words: Any = self.cp_comm_type, self.layout  # any text; the context refuses wrong words
        return ContextParallel(group, words[0], layout=words[1])


@with_options
def plan(
    request: Request,
    sections: SectionsOption = "",
    rank: RankOption = None,
    head: HeadOption = 0,
    svg: SvgOption = None,
    text: TextOption = False,
) -> None:
    """Describe a problem: walk (who owns, sends and computes what), schedule, costs and layouts. Nothing is computed.

    Exit code: 0, or 2 for a problem that is refused.
    """
    Description(request, sections, rank, head, svg, text).show()
