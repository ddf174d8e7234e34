"""`attention`, declared; and the handling of its arguments and results in both packages."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Unpack, overload

import torch

from cp_ref.calls.plan_arguments import Plan, read_call
from cp_ref.calls.score_mod import with_digest
from cp_ref.calls.scores import ScoreTensors
from cp_ref.groups.context import ContextParallel
from cp_ref.problems.arguments import CallArguments, takes
from cp_ref.problems.call_checks import (
    check_local_tensors,
    check_placements,
    check_plan_owner,
    check_settled,
    check_uneven,
)
from cp_ref.problems.read_problem import check_offset, read_sizes
from cp_ref.problems.room import Room
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.values import check_flag, kind_of

__all__ = [
    "AttentionCall",
    "CallFlags",
    "asked_for",
    "attention",
]


class Options(CallArguments, total=False):
    """The keyword options of `attention`, except the context and those that choose results, for type checkers."""

    deterministic: bool
    plan: Plan | None


Two = tuple[torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cp: ContextParallel,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **options: Unpack[Options],
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cp: ContextParallel,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = False,
    **options: Unpack[Options],
) -> Two: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cp: ContextParallel,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[True],
    **options: Unpack[Options],
) -> Two: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cp: ContextParallel,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[Options],
) -> Three: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cp: ContextParallel,
    return_lse: bool = False,
    return_max_logit: bool = False,
    **options: Unpack[Options],
) -> torch.Tensor | Two | Three: ...
@takes(CallArguments)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cp: ContextParallel,
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logit: bool = False,
    plan: Plan | None = None,
    **arguments: Unpack[CallArguments],
) -> Any:
    """Compute attention over sequences whose tokens are spread over the ranks of `cp`. Collective, forward and
    backward.

    Args:
        q: this rank's slice: bshd [b, s_q/cp, h_q, d_qk], sbhd [s_q/cp, b, h_q, d_qk], thd [t_q/cp, h_q, d_qk] (or
            longer: the rest is tail). float16, bfloat16, and float32 and float64 (in `cp_fast` on a CPU). Query head h
            uses kv head h // (h_q // h_kv). Under torch.autocast q, k and v are cast to its dtype, as for PyTorch's
            attention.
        k, v: the same with s_kv, h_kv, and d_v for v. A DTensor is taken as its local part if the context's group
            shards its sequence and the layout is "contiguous", like a DTensor's shards; if q is a DTensor, all results
            are DTensors.
        cp: the group, the schedule and the layout.
        qkv_format: "bshd", "sbhd" or "thd" (sequences of any lengths packed one after the other).
        attn_mask_type: "no_mask", "causal" (the default), "causal_bottom_right" (aligned to the last query and key), or
            one of these with "padding" ("padding", "padding_causal", "padding_causal_bottom_right"). In thd both
            spellings mean the same; in bshd and sbhd a padding mask takes each sequence's length from `cu_seqlens_*`.
        window_size: (left, right): query i sees keys i - left ... i + right (aligned); -1 is unbounded. Causal masks
            set right to 0.
        areas: thd only, instead of attn_mask_type and window_size: the visible pairs, int32 or int64 [n, 6];
            best on the CPU. A row is (q_start, q_stop, k_start, k_stop, left, right): rows of the global packed
            buffers, padding counted, and a window inside this rectangle, aligned to its last row and last column, -1
            for unbounded; so (-1, 0) makes a square causal. No pair may be in two areas. Pairs outside all areas are
            hidden, and padding is always hidden. `cu_seqlens_*` then only mark documents, for layouts and positions.
            `masks` has makers of areas.
        cu_seqlens_q, cu_seqlens_kv: GLOBAL cumulative lengths of real tokens, int32 or int64 [b + 1]; kv defaults to q.
            Best on the CPU: every call reads them on the host, which waits if they are on a GPU. Lengths that end at
            the number of rows of this rank's slice, where it needs fewer, are refused: they are not global.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: thd only, the same with padding; default to the real ones.
        softmax_scale: factor of q.k, finite and positive; default d_qk ** -0.5.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        softmax_type: "vanilla"; "off-by-one": the denominator gains 1; "learnable": it gains exp(softmax_offset[h]).
        softmax_offset: [h_q] or [1, h_q, 1, 1], any float dtype, for "learnable" only. Its gradient is this rank's
            share of the total, or the total, as `cp.softmax_offset_grad` says.
        alibi_slopes: float32 [h_q], or [b, h_q] with a row for each sequence, as flash-attn has them: query i and key j
            of a sequence gain -slope * |i + len_kv - len_q - j|. No gradient flows to them.
        score_mod: a function `score_mod(score, b, h, q_idx, kv_idx, **aux_tensors) -> score` with FlexAttention's
            signature, element-wise in PyTorch on tensors that broadcast. It gets scores after softcap and ALiBi, before
            the mask. b is the number of the sequence, h the global query head, q_idx and kv_idx are slots inside the
            sequence, all int32. It must take every pair of a sequence, hidden ones too; a result of -inf hides a pair.
            Its derivative is PyTorch's. It may capture plain values; tensors come by `aux_tensors`.
        aux_tensors: the tensors that score_mod takes by name, the same on all ranks, on q's device. No gradient flows
            to them.
        dropout_p: the probability that dropout drops a pair after the softmax; the others are divided by 1 - dropout_p.
            0, or from 2**-32 to 1 - 2**-32. lse and max_logit are those without dropout. Philox-4x32 with 7 rounds
            (Salmon et al., SC 2011) decides, from the seed, b, h, q_idx and kv_idx alone. So a seed gives the same mask
            for any number of ranks, schedule, layout and backend.
        dropout_seed: with dropout_p > 0, and only then: an int of 64 bits, or an int64 tensor of one element on q's
            device, the same on all ranks. Give every layer and every step its own.
        deterministic: choose only kernel libraries that give the same bits in every run. `cp_ref` always does.
        return_lse, return_max_logit: return these too.
        plan: from `make_plan`; the problem's arguments are then left out. Without one the call makes a plan, and
            `cp_fast` keeps the plans of the last few batches: the next layer's call reuses the first one's.

    Returns:
        out, or (out, lse), (out, max_logit), (out, lse, max_logit):
        out in q's format and dtype with d_v; lse float32 (float64 for float64), [b, h_q, s_q/cp], or [h_q, t_q/cp] for
        thd; max_logit the same dtype, [h_q], the largest score over all ranks, after ALiBi and score_mod and without
        dropout. Rows of padding and tail, and rows that see nothing: out 0, lse -inf (a real row with a sink: the
        sink's logit). Differentiable in q, k, v and softmax_offset, through out and lse.

    Raises:
        ValueError, TypeError: an argument is wrong, here or on another rank; named with its value and the rule, before
        anything is sent. Unsupported: naming what is missing.
    """
    raise NotImplementedError


class CallFlags(NamedTuple):
    """The flags of a call, as the caller gave them. `check` raises TypeError unless all are bools."""

    deterministic: bool
    return_max_logit: bool
    return_lse: bool

    def check(self) -> None:
        for name, flag in zip(self._fields, self, strict=True):
            check_flag(name, flag)


class AttentionCall(NamedTuple):
    """A call of `attention`, as the caller gave it, and the checks of it, which send nothing.

    Each check raises ValueError or TypeError, naming the argument, its value and the rule.

    Attributes:
        cp: the package's own ContextParallel.
        plan: of either package; anything else for a call without a plan.
        given: q, k, v, by name, as the caller gave them; DTensors are possible.
        tensors: q, k, v: their local parts, after autocast.
        offset: softmax_offset, one a head.
        scores: the tensors of scores.
        arguments: those that make the problem, by name, with defaults.
    """

    cp: Any
    plan: Any
    flags: CallFlags
    given: dict[str, Any]
    tensors: tuple[Any, Any, Any]
    offset: Any
    scores: ScoreTensors
    arguments: dict[str, Any]

    def read_problem(self, plan_kind: type) -> Problem:
        """The problem of a call without a plan; `check_tensors` follows. plan_kind: the package's own Plan."""
        cp, qkv_format = self.cp, self.arguments["qkv_format"]
        if self.plan is not None:
            package = plan_kind.__module__.split(".")[0]
            raise TypeError(f"plan is {kind_of(self.plan)}; it must be a {package}.Plan")
        self.flags.check()
        check_placements(cp, cp.layout, qkv_format, self.offset, **self.given)
        return read_call(cp, read_sizes(*self.tensors, qkv_format, cp.size), **self.arguments)

    def check_plan(self) -> None:
        """The plan is this context's, and the other arguments do not contradict it."""
        problem = self.plan.problem
        check_settled(problem, **with_digest(self.arguments))
        self.check_placements(problem)
        check_plan_owner(problem, self.plan.rank, self.cp)
        self.flags.check()

    def check_placements(self, problem: Problem) -> None:
        """Of DTensors the local parts are this rank's slices."""
        check_placements(self.cp, problem.layout, problem.qkv_format, self.offset, **self.given)

    def check_tensors(self, problem: Problem, room: Room | None = None) -> None:
        """q, k and v are this rank's slices of the problem, which is the plan's if there is one."""
        check_local_tensors(problem, room, self.cp.rank, *self.tensors)
        if self.plan is None:
            check_uneven(self.cp, problem, self.scores.features, max_logit=self.flags.return_max_logit)

    def check_offset(self, problem: Problem) -> None:
        """softmax_offset is there exactly when the problem has a learnable sink."""
        check_offset(problem, self.offset, self.tensors[0])


def asked_for(results: Any, return_lse: bool, return_max_logit: bool) -> Any:
    """(out, lse, max_logit) -> out, or a tuple of out and the other requested results."""
    out, lse, max_logit = results
    wanted = (out, *([lse] if return_lse else []), *([max_logit] if return_max_logit else []))
    return out if len(wanted) == 1 else wanted
