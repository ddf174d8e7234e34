"""A plan: all host-side work and device tables of one batch, made once and shared by every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from cp_fast.backends import KERNEL_FEATURES, Backend, choose
from cp_fast.context import ContextParallel
from cp_fast.features import EXECUTOR, required
from cp_fast.handles import handle_for
from cp_fast.packing import Packing
from cp_fast.planning.batch import position_spans, spread
from cp_fast.planning.compile import compile_program
from cp_fast.program import RankProgram
from cp_ref.spec import (
    Problem,
    Schedule,
    Sizes,
    Unsupported,
    agree,
    describe,
    make_schedule,
    read_problem,
    signature_of,
    split_plan_arguments,
)

__all__ = ["Plan", "make_plan", "plan_together", "read_call", "supports"]


@dataclass(frozen=True)
class Plan:
    """Everything about a batch that does not depend on the tensors' values.

    Attributes:
        problem: what is computed.
        rank: this rank.
        device: where the tables lie.
        backend: the kernel library that computes the tiles.
        packing: how the user's tensors are seen as packed rows.
        program: this rank's steps, with every row looked up.
    """

    problem: Problem
    rank: int
    device: torch.device
    backend: Backend
    packing: Packing
    program: RankProgram
    handle: torch.Tensor = field(init=False, repr=False, compare=False)  # see `cp_fast.handles`

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", handle_for(self))

    @cached_property
    def schedule(self) -> Schedule:
        """What every rank sends, receives and computes, step by step: the data that `program` was compiled from, for
        all ranks.
        """
        return make_schedule(self.problem)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """This rank's query positions inside each sequence, for RoPE: int64 [t/cp] for thd, [s/cp] for bshd and
        sbhd.
        """
        return torch.from_numpy(spread(*position_spans(self.problem, self.rank))).to(self.device)

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
        The plan, for `attention(q, k, v, cp=cp, plan=plan)`, which then reads no device value on the host;
        `plan.schedule`, `plan.position_ids`, `str(plan)`.

    Raises:
        ValueError, TypeError: an argument is wrong, here or on another rank. Unsupported: naming what is missing, by
        backend.
    """
    arguments = dict(locals())  # every argument, by name
    return plan_together(cp, torch.device(device), lambda: _read_plan_arguments(**arguments))


@signature_of(make_plan)
def supports(**arguments: Any) -> tuple[bool, str]:
    """Whether `make_plan` and `attention` take these arguments (those of `make_plan`) here, and if not, why. Sends
    nothing.

    Raises:
        ValueError, TypeError: the arguments are no problem at all.
    """
    try:
        _read_plan_arguments(**arguments)
    except Unsupported as refusal:
        return False, str(refusal)
    return True, ""


def read_call(
    cp: ContextParallel, sizes: Sizes, device: str, *, deterministic: bool, return_max_logit: bool, **arguments: Any
) -> tuple[Problem, Backend]:
    """The problem of one call and the library that computes it; raises ValueError, TypeError or Unsupported. Sends
    nothing.
    """
    problem = read_problem(
        cp_size=cp.size,
        cp_comm_type=cp.cp_comm_type,
        a2a_size=cp.a2a_size,
        layout=cp.layout,
        sizes=sizes,
        **arguments,
    )
    needs = required(problem, device, deterministic=deterministic, max_logit=return_max_logit)
    if missing := needs - KERNEL_FEATURES - EXECUTOR:
        raise Unsupported("this problem", {"cp_fast": missing}, f"cp_fast has {describe(EXECUTOR)}")
    return problem, choose(needs, cp.backend)


def plan_together(cp: ContextParallel, device: torch.device, read: Callable[[], tuple[Problem, Backend]]) -> Plan:
    """Read this rank's arguments and compare notes with the other ranks: all get their plan, or all raise."""
    found, error = None, None
    try:
        found = read()
    except (ValueError, TypeError, Unsupported) as caught:
        error = caught
    agree(cp.comm, found and found[0], error)
    assert found is not None
    problem, backend = found
    packing = Packing(problem)
    return Plan(problem, cp.rank, device, backend, packing, compile_program(packing.packed_problem, cp.rank, device))


def _read_plan_arguments(**arguments: Any) -> tuple[Problem, Backend]:
    sizes, of_the_problem = split_plan_arguments(make_plan, arguments)
    how = {name: bool(arguments.get(name, False)) for name in ("deterministic", "return_max_logit")}
    return read_call(arguments["cp"], sizes, torch.device(arguments["device"]).type, **how, **of_the_problem)
