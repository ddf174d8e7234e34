"""A plan: the problem of one batch and the schedule that computes it, made once and used by every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cp_ref.common.devices import check_usable, read_device
from cp_ref.context import ContextParallel
from cp_ref.sharding import numbers
from cp_ref.spec import (
    Agreement,
    Problem,
    Room,
    Schedule,
    Sizes,
    Unsupported,
    agree,
    check_context,
    check_flag,
    check_plan_owner,
    make_schedule,
    next_batch,
    q_fragments,
    read_problem,
    read_room,
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
        room: what `update` has room for; None for a plan that is not updated.
    """

    problem: Problem
    rank: int
    device: torch.device
    room: Room | None = None

    @cached_property
    def schedule(self) -> Schedule:
        """What every rank sends, receives and computes, step by step."""
        return make_schedule(self.problem)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """This rank's query positions inside each sequence, for RoPE: int64 [t/cp] for thd, [s/cp] for bshd and
        sbhd. With `room`, [max_tokens_q / cp], 0 in the tail.
        """
        fragments = q_fragments(self.problem, self.rank)
        if self.problem.qkv_format != "thd":
            fragments = tuple(f for f in fragments if f.seq == 0)
        ids = numbers(spans_of(fragments), self.device)
        return ids if self.room is None else torch.nn.functional.pad(ids, (0, self.room.rows_q - len(ids)))

    def update(
        self,
        *,
        cp: ContextParallel,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
    ) -> None:
        """Give the plan another batch: the same problem with other lengths. Collective. Here it is planned anew.

        Args:
            cp ... cu_seqlens_kv_padded: as in `make_plan`.

        Raises:
            ValueError, TypeError: the lengths are wrong, here or on another rank, the plan has no room for them, or was
            made without `max_sequences`. The plan is then as it was, on every rank.
        """

        def read() -> Agreement:
            check_plan_owner(self.problem, self.rank, cp)
            lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
            padded = {"cu_seqlens_q_padded": cu_seqlens_q_padded, "cu_seqlens_kv_padded": cu_seqlens_kv_padded}
            return Agreement(next_batch(self.problem, self.room, **lengths, **padded), self.room)

        made = plan_together(cp, lambda: (read(), self.device))
        object.__setattr__(self, "problem", made.problem)
        for name in ("schedule", "position_ids"):
            self.__dict__.pop(name, None)

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
    max_sequences: int | None = None,
    max_tokens_q: int | None = None,
    max_tokens_kv: int | None = None,
) -> Plan:
    """Plan one batch. Collective: every rank calls it, and all of them find out here when their problems differ.

    Args:
        cp ... return_max_logit: as in `attention`.
        batch_size, seqlen_q, seqlen_kv: bshd and sbhd only; global. seqlen_kv defaults to seqlen_q; with a padding mask
            the batch size may be left to `cu_seqlens_q`.
        heads_q, heads_kv, d_qk, d_v, dtype, device: of the tensors to come.
        max_sequences: thd only; makes a plan that `plan.update` gives other lengths, up to so many sequences.
        max_tokens_q, max_tokens_kv: with max_sequences; global, tails included: every rank's q (k, v) then has exactly
            max_tokens_q / cp_size rows. Default to what this batch needs; max_tokens_kv to max_tokens_q without
            `cu_seqlens_kv`.

    Returns:
        The plan, for `attention(q, k, v, cp=cp, plan=plan)`; `plan.schedule`, `plan.position_ids`, `str(plan)`.

    Raises:
        ValueError, TypeError: an argument is wrong, here or on another rank. Unsupported: naming what is missing.
    """
    arguments = dict(locals())  # every argument, by name
    return plan_together(cp, lambda: _read_plan_arguments(**arguments))


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


def _read_plan_arguments(**arguments: Any) -> tuple[Agreement, torch.device]:
    """How it is computed and what is returned matter to nobody here: all results are there, and deterministic."""
    sizes, of_the_problem = split_plan_arguments(make_plan, arguments)
    check_context(arguments["cp"], ContextParallel)
    for name in ("deterministic", "return_lse", "return_max_logit"):
        check_flag(name, arguments.get(name, False))
    device = read_device(arguments["device"])
    check_usable(device)
    problem = read_call(arguments["cp"], sizes, **of_the_problem)
    return Agreement(problem, read_room(problem, arguments)), device


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


def plan_together(cp: ContextParallel, read: Callable[[], tuple[Agreement, torch.device]]) -> Plan:
    """Read this rank's arguments and compare notes with the other ranks: all get their plan, or all raise."""
    check_context(cp, ContextParallel)
    found, error = None, None
    try:
        found = read()
    except Exception as caught:  # whatever it is, the other ranks must not wait for this one
        error = caught
    agree(cp.comm, None if found is None else found[0], error)
    assert found is not None
    (problem, room, _), device = found
    return Plan(problem, cp.rank, device, room)
