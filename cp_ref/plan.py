"""A plan: the problem of one batch and the schedule that computes it, made once and used by every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cp_ref.context import ContextParallel
from cp_ref.sharding import numbers
from cp_ref.spec import (
    Problem,
    Schedule,
    Sizes,
    Unsupported,
    agree,
    make_schedule,
    q_fragments,
    read_problem,
    signature_of,
    spans_of,
    split_plan_arguments,
)

__all__ = ["Plan", "make_plan", "plan_together", "read_call", "supports"]


@dataclass(frozen=True)
class Plan:
    """Everything about a batch that does not depend on the tensors' values.

    Attributes:
        problem: what is computed.
        rank: this rank.
        device: where `position_ids` lie.
    """

    problem: Problem
    rank: int
    device: torch.device

    @cached_property
    def schedule(self) -> Schedule:
        """What every rank sends, receives and computes, step by step."""
        return make_schedule(self.problem)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """This rank's query positions inside each sequence, for RoPE: int64 [t/cp] for thd, [s/cp] for bshd and
        sbhd.
        """
        fragments = q_fragments(self.problem, self.rank)
        if self.problem.qkv_format != "thd":
            fragments = tuple(f for f in fragments if f.seq == 0)
        return numbers(spans_of(fragments), self.device)

    def __str__(self) -> str:
        return f"{self.problem}\n{self.schedule}"


def make_plan(
    *,
    cp: ContextParallel,
    qkv_format: str = "bshd",
    attn_mask_type: str = "causal",
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    softmax_type: str = "vanilla",
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logit: bool = False,
    batch_size: int | None = None,
    seqlen_q: int | None = None,
    seqlen_kv: int | None = None,
    heads_q: int,
    heads_kv: int,
    d_qk: int,
    d_v: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Plan:
    """Plan one batch. Collective: every rank calls it, and all of them find out here when their problems differ.

    Args:
        cp ... return_max_logit: as in `attention`.
        batch_size, seqlen_q, seqlen_kv: bshd and sbhd only; global. seqlen_kv defaults to seqlen_q; with a padding mask
            the batch size may be left to `cu_seqlens_q`.
        heads_q, heads_kv, d_qk, d_v, dtype, device: of the tensors to come.

    Returns:
        The plan, for `attention(q, k, v, cp=cp, plan=plan)`; `plan.schedule`, `plan.position_ids`, `str(plan)`.

    Raises:
        ValueError, TypeError: an argument is wrong, here or on another rank. Unsupported: naming what is missing.
    """
    arguments = dict(locals())  # every argument, by name
    return plan_together(cp, lambda: _read_plan_arguments(**arguments), torch.device(device))


@signature_of(make_plan)
def supports(**arguments: Any) -> tuple[bool, str]:
    """Whether `make_plan` and `attention` take these arguments (those of `make_plan`), and if not, why. Sends nothing.

    Raises:
        ValueError, TypeError: the arguments are no problem at all.
    """
    try:
        _read_plan_arguments(**arguments)
    except Unsupported as refusal:
        return False, str(refusal)
    return True, ""


def _read_plan_arguments(**arguments: Any) -> Problem:
    """How it is computed and what is returned matter to nobody here: all results are there, and deterministic."""
    sizes, of_the_problem = split_plan_arguments(make_plan, arguments)
    return read_call(arguments["cp"], sizes, **of_the_problem)


def read_call(cp: ContextParallel, sizes: Sizes, **arguments: Any) -> Problem:
    """The problem of one call; raises ValueError, TypeError or Unsupported. Sends nothing."""
    return read_problem(
        cp_size=cp.size,
        cp_comm_type=cp.cp_comm_type,
        a2a_size=cp.a2a_size,
        layout=cp.layout,
        sizes=sizes,
        **arguments,
    )


def plan_together(cp: ContextParallel, read: Callable[[], Problem], device: torch.device) -> Plan:
    """Read this rank's arguments and compare notes with the other ranks: all get their plan, or all raise."""
    problem, error = None, None
    try:
        problem = read()
    except (ValueError, TypeError, Unsupported) as caught:
        error = caught
    agree(cp.comm, problem, error)
    assert problem is not None
    return Plan(problem, cp.rank, device)
