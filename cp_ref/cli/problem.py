"""The options that describe a problem, shared by the commands, and what becomes of them: a problem, tensors, a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from inspect import Parameter, Signature, signature
from itertools import accumulate
from math import gcd
from typing import Annotated, Any

import torch
from typer import Option

from cp_ref import masks
from cp_ref.api import attention
from cp_ref.cli.common import integers, readable_errors
from cp_ref.common.slices import shard
from cp_ref.context import ContextParallel
from cp_ref.formats import to_format
from cp_ref.plan import Plan, make_plan
from cp_ref.recorder import trace
from cp_ref.sim import SimGroup, SimMember
from cp_ref.spec import Problem, divisor
from cp_ref.tracing import Trace

__all__ = ["Request", "with_problem"]


@dataclass(frozen=True)
class Request:
    """The options as given; `plan` is what they come to."""

    cp_comm_type: Annotated[str, Option(help="The schedule: p2p, all_gather, a2a or a2a+p2p.")] = "p2p"
    cp_size: Annotated[int, Option(help="Number of ranks.", min=1)] = 4
    a2a_size: Annotated[int | None, Option(help="a2a+p2p only: how many ranks exchange heads; 2 if even.")] = None
    seqlens: Annotated[str, Option(help="Lengths of the sequences, such as 10,6; thd unless said otherwise.")] = ""
    seqlens_kv: Annotated[str, Option(help="Key lengths where they differ (cross attention), one a sequence.")] = ""
    seqlen: Annotated[int | None, Option(help="Length of every sequence of a bshd or sbhd batch; 4 a rank.")] = None
    seqlen_kv: Annotated[int | None, Option(help="The same for keys where they differ.")] = None
    batch: Annotated[int, Option(help="Number of sequences of a bshd or sbhd batch.")] = 1
    qkv_format: Annotated[str, Option(help="bshd, sbhd or thd; thd where --seqlens is given, else bshd.")] = ""
    layout: Annotated[str, Option(help="Who owns which tokens: dual_chunk, contiguous or balanced.")] = "dual_chunk"
    mask: Annotated[str, Option(help="attn_mask_type: causal, no_mask, padding_causal_bottom_right, ...")] = "causal"
    window: Annotated[str, Option(help="LEFT,RIGHT; -1 is unbounded.")] = "-1,-1"
    areas: Annotated[str, Option(help="Instead of mask and window, thd: a call of a maker of cp_ref.masks.")] = ""
    heads_q: Annotated[int | None, Option(help="Query heads; 2 for each rank that exchanges heads.")] = None
    heads_kv: Annotated[int | None, Option(help="Key and value heads; 1 for each rank that exchanges heads.")] = None
    d_qk: Annotated[int, Option(help="Head dim of queries and keys.")] = 8
    d_v: Annotated[int | None, Option(help="Head dim of values; d_qk by default.")] = None
    dtype: Annotated[str, Option(help="float16, bfloat16, float32 or float64.")] = "float32"
    seed: Annotated[int, Option(help="Of random tensors; a token's numbers do not depend on who owns it.")] = 0

    @cached_property
    def plan(self) -> Plan:
        """Rank 0's plan: the problem and the schedule of all ranks.

        Raises:
            ValueError, TypeError, Unsupported: naming what is wrong.
        """
        return SimGroup(self.cp_size).run(lambda member: self._plan_of(self._context(member)))[0]

    def _plan_of(self, cp: ContextParallel) -> Plan:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"--dtype is {self.dtype!r}; it must be one of float16, bfloat16, float32, float64")
        heads_q = 2 * self._exchanging if self.heads_q is None else self.heads_q
        heads_kv = gcd(heads_q, self._exchanging) if self.heads_kv is None else self.heads_kv
        d_v = self.d_qk if self.d_v is None else self.d_v
        sizes = {"heads_q": heads_q, "heads_kv": heads_kv, "d_qk": self.d_qk, "d_v": d_v}
        if self._format != "thd":
            lengths = self._lengths_q
            sizes |= {"batch_size": self.batch if lengths is None else len(lengths), "seqlen_q": self._seqlen}
            sizes |= {} if self.seqlen_kv is None else {"seqlen_kv": self.seqlen_kv}
        return make_plan(cp=cp, dtype=dtype, device="cpu", **sizes, **self.arguments)

    @property
    def problem(self) -> Problem:
        """What is computed."""
        return self.plan.problem

    @property
    def padded(self) -> int:
        """How many slots of padding were added to make lengths divide."""
        added = (s.slots_q - s.len_q + s.slots_kv - s.len_kv for s in self.problem.sequences)
        return sum(added) if self._format == "thd" else 0

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `attention` and `dense_attention` that describe the problem."""
        left_right = "LEFT,RIGHT, two integers such as 128,0; -1 is unbounded"
        window = integers("--window", self.window, left_right, -1)
        if len(window) != 2:
            raise ValueError(f"--window is {self.window!r}; it must be {left_right}")
        said: dict[str, Any] = {"qkv_format": self._format, "attn_mask_type": self.mask, "window_size": tuple(window)}
        if self.areas:
            said |= {"attn_mask_type": None, "areas": masks.from_call(self.areas)}
        q, kv = self._lengths_q, self._lengths_kv
        if self._format == "thd":
            q = [self._seqlen] * self.batch if q is None else q
            kv = q if kv is None else kv
            multiple = divisor(self.layout, self.cp_size)
            said["cu_seqlens_q_padded"], said["cu_seqlens_kv_padded"] = (
                _cumulative([-(-n // multiple) * multiple for n in lengths]) for lengths in (q, kv)
            )
        said["cu_seqlens_q"] = None if q is None else _cumulative(q)
        said["cu_seqlens_kv"] = None if kv is None else _cumulative(kv)
        return said

    def tensors(self) -> dict[str, torch.Tensor]:
        """Global random q, k, v and dout in the problem's format. Padding is NaN: it never reaches anything."""
        p = self.problem
        shapes = {"q": (p.heads_q, p.d_qk), "k": (p.heads_kv, p.d_qk), "v": (p.heads_kv, p.d_v)}
        made: dict[str, torch.Tensor] = {}
        for number, (name, shape) in enumerate((shapes | {"dout": (p.heads_q, p.d_v)}).items()):
            generator = torch.Generator().manual_seed(4 * self.seed + number)
            starts = self._starts(name)
            x = torch.full((starts[-1], *shape), float("nan"), dtype=torch.float64)
            for start, s in zip(starts, p.sequences, strict=False):
                length = s.len_kv if name in ("k", "v") else s.len_q
                x[start : start + length] = torch.randn(length, *shape, generator=generator, dtype=torch.float64)
            made[name] = to_format(x.to(getattr(torch, p.dtype)), self._format, len(p.sequences))
        return made

    def run(self) -> Trace:
        """Forward and backward of the random tensors over a simulated group, recorded."""
        tensors = self.tensors()

        def rank_main(member: SimMember) -> None:
            cp = self._context(member)
            plan = self._plan_of(cp)

            def cut(name: str) -> dict[str, Any]:
                """Lengths, which the sides of cross attention have of their own, or the plan that alone knows."""
                if self.layout == "balanced":
                    return {"plan": plan}
                cu = torch.tensor(self._starts(name)) if self._format == "thd" else None
                return {"qkv_format": self._format, "cu_seqlens_padded": cu}

            mine = {name: shard(x, cp=cp, **cut(name)) for name, x in tensors.items()}
            q, k, v = (mine[name].requires_grad_() for name in ("q", "k", "v"))
            attention(q, k, v, cp=cp, plan=plan).backward(mine["dout"])

        with trace() as recorded:
            SimGroup(self.cp_size).run(rank_main)
        return recorded

    def _starts(self, name: str) -> tuple[int, ...]:
        return self.problem.starts_kv if name in ("k", "v") else self.problem.starts_q

    def _context(self, member: SimMember) -> ContextParallel:
        group = member.split(self._exchanging) if self.cp_comm_type == "a2a+p2p" else member
        return ContextParallel(group, self.cp_comm_type, layout=self.layout)

    @property
    def _exchanging(self) -> int:
        """How many ranks exchange heads."""
        if self.cp_comm_type == "a2a+p2p":
            return self.a2a_size if self.a2a_size is not None else 2 if self.cp_size % 2 == 0 else self.cp_size
        if self.a2a_size is not None:
            raise ValueError(f"--a2a-size is {self.a2a_size}, but --cp-comm-type is {self.cp_comm_type}, not a2a+p2p")
        return self.cp_size if self.cp_comm_type == "a2a" else 1

    @property
    def _format(self) -> str:
        return self.qkv_format or ("thd" if self.seqlens else "bshd")

    @property
    def _seqlen(self) -> int:
        return 4 * self.cp_size if self.seqlen is None else self.seqlen

    @property
    def _lengths_q(self) -> list[int] | None:
        return _lengths("--seqlens", self.seqlens)

    @property
    def _lengths_kv(self) -> list[int] | None:
        return _lengths("--seqlens-kv", self.seqlens_kv)


def with_problem(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, whose first argument is a `Request`, the options of a request in front of its own."""
    first, *own = signature(command, eval_str=True).parameters.values()
    of_request = signature(Request, eval_str=True).parameters.values()

    @wraps(command)
    def run(**options: Any) -> None:
        with readable_errors():
            request = Request(**{p.name: options.pop(p.name) for p in of_request})
            command(**{first.name: request}, **options)

    parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*of_request, *own)]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _lengths(option: str, text: str) -> list[int] | None:
    return integers(option, text, "lengths of at least 0 separated by commas, such as 10,6", 0) if text else None


def _cumulative(lengths: list[int]) -> torch.Tensor:
    """Cumulative lengths as the API takes them, int32 [b + 1]."""
    return torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)
