"""From the options that describe a problem to a plan, tensors and a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import torch
from typer import Option

from cp_ref.contract.cli.options import ProblemOptions, cumulative
from cp_ref.contract.sharding import shard
from cp_ref.reference_attention import attention, to_format
from cp_ref.reference_plan import ContextParallel, Plan, make_plan
from cp_ref.schedules.layouts import divisor
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import side_of
from cp_ref.simulator import SimGroup, SimMember
from cp_ref.tracing.recorded_trace import Trace
from cp_ref.tracing.recorder import trace

__all__ = ["Request"]


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
        return SimGroup(self.cp_size).run(lambda member: self._plan_of(self._context(member)))[0]

    def _plan_of(self, cp: ContextParallel) -> Plan:
        return make_plan(cp=cp, device="cpu", **self.sizes(), **self.arguments)

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

    def tensors(self) -> dict[str, torch.Tensor]:
        """Global random q, k, v and dout in the problem's format. Padding is NaN: it never reaches anything."""
        p = self.problem
        shapes = {"q": (p.heads_q, p.d_qk), "k": (p.heads_kv, p.d_qk), "v": (p.heads_kv, p.d_v)}
        made: dict[str, torch.Tensor] = {}
        for number, (name, shape) in enumerate((shapes | {"dout": (p.heads_q, p.d_v)}).items()):
            generator = torch.Generator().manual_seed(4 * self.seed + number)
            starts, lengths = p.starts(side_of(name)), p.lengths.tokens(side_of(name))
            x = torch.full((starts[-1], *shape), float("nan"), dtype=torch.float64)
            for start, length in zip(starts, lengths, strict=False):
                x[start : start + length] = torch.randn(length, *shape, generator=generator, dtype=torch.float64)
            made[name] = to_format(x.to(getattr(torch, p.dtype)), self.in_format, len(p.sequences))
        return made

    def run(self) -> Trace:
        """Forward and backward of the random tensors over a simulated group, recorded."""
        tensors = self.tensors()

        def rank_main(member: SimMember) -> None:
            cp = self._context(member)
            plan = self._plan_of(cp)

            def cut(name: str) -> dict[str, Any]:
                """The arguments of `shard`: the lengths of this tensor's side, or the plan for "balanced"."""
                if self.layout == "balanced":
                    return {"plan": plan}
                cu = torch.tensor(self.problem.starts(side_of(name))) if self.in_format == "thd" else None
                return {"qkv_format": self.in_format, "cu_seqlens_padded": cu}

            mine = {name: shard(x, cp=cp, **cut(name)) for name, x in tensors.items()}
            q, k, v = (mine[name].requires_grad_() for name in ("q", "k", "v"))
            attention(q, k, v, cp=cp, plan=plan).backward(mine["dout"])  # pyright: ignore[reportUnknownMemberType]

        with trace() as recorded:
            SimGroup(self.cp_size).run(rank_main)
        return recorded

    def _context(self, member: SimMember) -> ContextParallel:
        group = member.split(self.exchanging) if self.cp_comm_type == "a2a+p2p" else member
        words: Any = self.cp_comm_type, self.layout  # any text; the context refuses wrong words
        return ContextParallel(group, words[0], layout=words[1])
