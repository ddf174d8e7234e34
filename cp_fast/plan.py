"""A plan: all host-side work and device tables of one batch, made once and shared by every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from cp_fast.backends import KERNEL_FEATURES, Backend, choose
from cp_fast.context import ContextParallel
from cp_fast.devices import read_device
from cp_fast.features import EXECUTOR, required
from cp_fast.handles import OfThisProcess, forget, handle_for
from cp_fast.kernels.select import kernels
from cp_fast.packing import Packing
from cp_fast.planning.batch import position_spans
from cp_fast.planning.columns import spread
from cp_fast.planning.compile import DraftProgram, compile_program, draft_program
from cp_fast.planning.fixed import FixedProgram
from cp_fast.planning.shape import shape_of
from cp_fast.program import RankProgram
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
    describe,
    make_schedule,
    next_batch,
    read_problem,
    read_room,
    signature_of,
    split_plan_arguments,
)

__all__ = ["Plan", "backend_for", "make_plan", "plan_together", "read_call", "supports"]

Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)  # one plan is itself alone: its tables are tensors
class Plan(OfThisProcess):
    """Everything about a batch that does not depend on the tensors' values.

    Attributes:
        problem: what is computed.
        rank: this rank.
        device: where the tables lie.
        backend: the kernel library that computes the tiles.
        packing: how the user's tensors are seen as packed rows.
        program: this rank's steps, with every row looked up.
        room: what `update` has room for; None for a plan that is not updated.

    A copy, deep or not, is a plan of its own, with the same tables, which nobody writes to. A plan that is updated in
    place is not copied, and no plan is pickled: TypeError.
    """

    problem: Problem
    rank: int
    device: torch.device
    backend: Backend
    packing: Packing
    program: RankProgram
    room: Room | None = None
    fixed: FixedProgram | None = field(default=None, repr=False, compare=False)  # `program`'s tables, if there is room
    handle: torch.Tensor = field(init=False, repr=False, compare=False)  # see `cp_fast.handles`

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", handle_for(self))

    def __copy__(self) -> Plan:
        if self.room is not None:
            raise TypeError(
                "a cp_fast.Plan that is updated in place cannot be copied, as both would have the same tables; make "
                "another one by make_plan"
            )
        return replace(self)

    def __deepcopy__(self, memo: Any) -> Plan:
        return self.__copy__()

    @cached_property
    def schedule(self) -> Schedule:
        """What every rank sends, receives and computes, step by step: the data that `program` was compiled from, for
        all ranks.
        """
        return make_schedule(self.problem)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """This rank's query positions inside each sequence, for RoPE: int64 [t/cp] for thd, [s/cp] for bshd and
        sbhd. With `room`, [max_tokens_q / cp], 0 in the tail; `update` writes the new ones to the same memory.
        """
        if self.program.position_ids is not None:
            return self.program.position_ids
        return torch.from_numpy(spread(*position_spans(self.problem, self.rank))).to(self.device)

    def update(
        self,
        *,
        cp: ContextParallel,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
    ) -> None:
        """Give the plan another batch, in place: the same problem with other lengths. Collective, like `make_plan`.

        For plans made with `max_sequences`. All tables are overwritten by one copy, on the current stream, without
        waiting for the device: what was launched before still finds the old batch, and a CUDA graph of `attention` that
        is replayed after it computes the new one. Addresses, sizes, messages and launches stay those of the batch that
        the plan was made with; it should be one that needs all of them, such as one sequence of the full length.

        A backward pass belongs to the batch of its forward pass: do not update between the two (an eager call raises
        RuntimeError; activation checkpointing and a replayed graph cannot tell).

        Args:
            cp ... cu_seqlens_kv_padded: as in `make_plan`. The lengths are read on the host: give them on the CPU.

        Raises:
            ValueError, TypeError: the lengths are wrong, here or on another rank; a CUDA graph is being captured; the
            plan has no room for them (more sequences or tokens, or a message or launch that the first batch did not
            have, such as another window of a large tile); or it was made without `max_sequences`. The plan is then as
            it was, on every rank.
        """

        def read() -> tuple[Agreement, DraftProgram, torch.Tensor]:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ValueError("plan.update is called while a CUDA graph is captured; update before it is replayed")
            check_plan_owner(self.problem, self.rank, cp)
            lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
            padded = {"cu_seqlens_q_padded": cu_seqlens_q_padded, "cu_seqlens_kv_padded": cu_seqlens_kv_padded}
            problem = next_batch(self.problem, self.room, **lengths, **padded)
            assert self.fixed is not None
            return Agreement(problem, self.room), *self.fixed.draft(draft_program(problem, self.rank))

        agreement, draft, tables = _together(cp, read, lambda found: found[0])
        assert self.fixed is not None
        forget(self.handle)
        changed = {
            "problem": agreement.problem,
            "packing": Packing(agreement.problem),
            "program": self.fixed.overwrite(draft, tables),
            "handle": handle_for(self),
        }
        for name, value in changed.items():
            object.__setattr__(self, name, value)
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
        The plan, for `attention(q, k, v, cp=cp, plan=plan)`, which then reads no device value on the host;
        `plan.schedule`, `plan.position_ids`, `str(plan)`.

    Raises:
        ValueError, TypeError: an argument is wrong, here or on another rank. Unsupported: naming what is missing, by
        backend.
    """
    arguments = dict(locals())  # every argument, by name
    return plan_together(cp, lambda: _read_plan_arguments(**arguments))


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


def read_call(cp: ContextParallel, sizes: Sizes, **arguments: Any) -> Problem:
    """The problem of one call; raises ValueError or TypeError. Sends nothing."""
    return read_problem(
        cp_size=cp.size,
        cp_comm_type=cp.cp_comm_type,
        a2a_size=cp.a2a_size,
        layout=cp.layout,
        sizes=sizes,
        **arguments,
    )


def backend_for(
    cp: ContextParallel,
    problem: Problem,
    device: str,
    *,
    deterministic: bool,
    return_max_logit: bool,
    in_place: bool = False,
) -> Backend:
    """The library that computes the problem, asked in this way; raises ValueError, TypeError or Unsupported."""
    check_flag("deterministic", deterministic)
    check_flag("return_max_logit", return_max_logit)
    needs = required(problem, device, deterministic=deterministic, max_logit=return_max_logit, in_place=in_place)
    if missing := needs - KERNEL_FEATURES - EXECUTOR:
        raise Unsupported("this problem", {"cp_fast": missing}, f"cp_fast has {describe(EXECUTOR)}")
    return choose(needs, cp.backend)


def plan_together(cp: ContextParallel, read: Callable[[], tuple[Agreement, Backend, torch.device]]) -> Plan:
    """Read this rank's arguments and compare notes with the other ranks: all get their plan, or all raise."""

    def read_and_load() -> tuple[Agreement, Backend, torch.device]:
        found = read()
        kernels(found[2].type)  # what is built or loaded on first use may fail, and then fails on all ranks
        return found

    (problem, room, _), backend, device = _together(cp, read_and_load, lambda found: found[0])
    packing = Packing(problem)
    if room is None:
        program = compile_program(packing.packed_problem, cp.rank, device)
        return Plan(problem, cp.rank, device, backend, packing, program)
    draft = draft_program(problem, cp.rank)
    fixed = FixedProgram(shape_of(draft, room), device)
    program = fixed.overwrite(*fixed.draft(draft))
    return Plan(problem, cp.rank, device, backend, packing, program, room, fixed)


def _together(cp: ContextParallel, read: Callable[[], Found], agreement: Callable[[Found], Agreement]) -> Found:
    """What this rank reads, once all ranks have read theirs and agree; else all raise."""
    check_context(cp, ContextParallel)
    found, error = None, None
    try:
        found = read()
    except Exception as caught:  # whatever it is, the other ranks must not wait for this one
        error = caught
    with cp.alone("an agreement on a plan"):
        agree(cp.comm, None if found is None else agreement(found), error)
    assert found is not None
    return found


def _read_plan_arguments(**arguments: Any) -> tuple[Agreement, Backend, torch.device]:
    sizes, of_the_problem = split_plan_arguments(make_plan, arguments)
    check_context(arguments["cp"], ContextParallel)
    check_flag("return_lse", arguments.get("return_lse", False))
    how = {name: arguments.get(name, False) for name in ("deterministic", "return_max_logit")}
    device = read_device(arguments["device"])
    problem = read_call(arguments["cp"], sizes, **of_the_problem)
    room = read_room(problem, arguments)
    backend = backend_for(arguments["cp"], problem, device.type, **how, in_place=room is not None)
    return Agreement(problem, room), backend, device
