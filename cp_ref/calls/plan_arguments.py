"""`make_plan`, `supports` and `Plan.update`, declared; and readers of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Unpack

import torch

from cp_ref.batches.tensors import read_device
from cp_ref.calls.declared import bind, same_parameters
from cp_ref.calls.score_mod import ScoreMod, with_digest
from cp_ref.groups.context import ContextParallel
from cp_ref.groups.group import Group, PairGroup
from cp_ref.problems.arguments import ARGUMENTS, ProblemArguments, features_of, takes
from cp_ref.problems.call_checks import check_context
from cp_ref.problems.read_problem import Sizes, check_one_document, read_problem
from cp_ref.problems.room import Agreement, Room, read_room
from cp_ref.schedules.compressed import entry_problem
from cp_ref.schedules.linear_schedules import conv_schedule, make_states
from cp_ref.schedules.planners.choose_schedule import choose_schedule, why_chosen
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.values import check_flag, kind_of, read_count
from cp_ref.schedules.verify.costs import report
from cp_ref.schedules.verify.proof import verify
from cp_ref.schedules.words import Feature, Unsupported

__all__ = [
    "Entries",
    "Plan",
    "check_plan",
    "check_schedule",
    "check_sparse",
    "check_sparse_scores",
    "choices",
    "lengths_of_update",
    "make_plan",
    "read_call",
    "read_linear",
    "read_plan_arguments",
    "supports",
    "update",
]


def check_schedule(schedule: Any, problem: Problem, room: Room | None, group: Group) -> tuple[tuple[str, str], ...]:
    """Check that a schedule computes the problem and that its messages can be sent.

    Args:
        schedule: for all ranks, as the user gave it; None for the planner's.
        room: the plan's room.
        group: of the ranks that will play it.

    Returns:
        The values that the ranks have to agree on, for the `extras` of their `Agreement`: a hash of the schedule's
        text; nothing for None.

    Raises:
        TypeError: it is no Schedule. InvalidSchedule: with every finding. ValueError: the plan is to be updated, or a
        message goes to a rank that the group does not reach.
    """
    if schedule is None:
        return ()
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule is a {type(schedule).__name__}; it must be a cp_ref.schedules.schedule.Schedule, such as "
            "Schedule.parse(text)"
        )
    if room is not None:
        raise ValueError(
            f"schedule is given, but max_sequences is {room.max_sequences}; a schedule is for one batch, a plan with "
            "max_sequences is for several"
        )
    verify(problem, schedule)
    if isinstance(group, PairGroup):
        _check_reach(schedule, group)
    return (("schedule", blake2b(str(schedule).encode(), digest_size=16).hexdigest()),)


def _check_reach(schedule: Schedule, group: PairGroup) -> None:
    for direction, rank, number, step in schedule.steps():
        for message in step.sends:
            if not group.joins(rank, message.peer):
                raise ValueError(
                    f"schedule has {schedule.message_text(message, 'send')!r} in {direction} step {number} of rank "
                    f"{rank}, but the two ranks have neither their a2a group nor their p2p group in common"
                )


class Entries(NamedTuple):
    """The windows that a rank's compressed keys are made of.

    Attributes:
        rate: tokens of a window.
        documents: the number of each one's document in the batch, int64 [n].
        numbers: which of the windows of its document it is, int64 [n].

    >>> Entries(4, torch.tensor([0, 0]), torch.tensor([0, 2])).last.tolist()
    [3, 11]
    """

    rate: int
    documents: torch.Tensor
    numbers: torch.Tensor

    @property
    def first(self) -> torch.Tensor:
        """The position of each window's first token in its document, as RoPE may have it."""
        return self.numbers * self.rate

    @property
    def last(self) -> torch.Tensor:
        """The position of its last token, from which on it is seen."""
        return self.first + self.rate - 1


_FEW = 8  # Sequences whose lengths a summary names.
_SIZES = ("heads_q", "heads_kv", "d_qk", "d_v", "batch_size", "seqlen_q", "seqlen_kv")


class Plan:
    """The result of `make_plan` in both packages: the problem, the plan's rank, the device of `position_ids`. Each
    package's own `Plan` is one of these.

    `print(plan)` is a summary; `print(plan.schedule)` has every message and every tile.
    """

    problem: Problem
    rank: int
    device: torch.device
    room: Room | None = None
    linear: bool = False  # Whether it serves linear layers.
    sparse: bool = False  # Whether it was made for attention to chosen keys.
    custom: Schedule | None = None  # The schedule that `make_plan` was given.
    agreed: set[bytes]  # Calls of linear and sparse layers that the ranks have agreed on.
    head_chunks: tuple[int, ...] = ()  # See `make_schedule`.
    score_mod: ScoreMod | None = None  # A frozen copy of the function. The problem has its digest.
    chosen_from: tuple[str, ...] = ()  # "auto" chose from these schedules; (): it had no choice.

    @property
    def same_bits(self) -> tuple[str, ...] | None:
        """The results that have the bits of one launch over the whole batch; None where nothing is promised of bits."""
        return None

    @property
    def schedule(self) -> Schedule:
        """The messages and tiles of every rank, step by step."""
        raise NotImplementedError

    @property
    def states(self) -> Schedule:
        """The messages and scans of linear layers, of every rank: see `make_states`.

        Raises:
            ValueError: the plan was made without `linear=True`.
        """
        self._check_linear()
        return make_states(self.problem)

    def halo(self, kernel_size: int) -> Schedule:
        """The messages and tiles of a causal convolution, of every rank: see `conv_schedule`.

        Raises:
            ValueError: the plan was made without `linear=True`.
        """
        self._check_linear()
        return conv_schedule(self.problem, read_count("kernel_size", kernel_size, at_least=1))

    def entries(self, rate: int) -> Entries:
        """This rank's compressed keys, in the order of its buffer of them: those of the windows of `rate` tokens whose
        last token it has. See `compress_keys`.

        Raises:
            ValueError, TypeError: the rate is no positive integer.
        """
        of = entry_problem(self.problem, read_count("rate", rate, at_least=1))
        own = of.entries.take(of.entries.rank == self.rank)
        return Entries(rate, *(torch.as_tensor(x).to(self.device) for x in (own.document, own.number)))

    def _check_linear(self) -> None:
        if not self.linear:
            raise ValueError("plan was made without linear=True; it has schedules of attention alone")

    def __str__(self) -> str:
        p = self.problem
        found = report(p, self.schedule)
        lengths = [str(n) if n == m else f"{n}x{m}" for n, m in zip(p.lengths.len_q, p.lengths.len_kv, strict=True)]
        more = f" and {len(lengths) - _FEW} more" if len(lengths) > _FEW else ""
        steps, bits = len(self.schedule.forward[self.rank]), self.same_bits
        chunks = f", in head chunks of {', '.join(map(str, self.head_chunks))} kv heads" if self.head_chunks else ""
        return "\n".join(
            (
                f"plan of rank {self.rank}, on {self.device}: {p.cp_comm_type}, cp_size {p.cp_size}, {p.layout_name}",
                f"  {p.qkv_format}, {'areas' if p.areas else p.attn_mask_type}, window {p.window_size}, {p.dtype}, "
                f"{p.heads_q} query heads over {p.heads_kv}, head dims {p.d_qk} and {p.d_v}",
                f"  {sum(p.lengths.len_q):,} tokens in sequences of {', '.join(lengths[:_FEW]) or 'none'}{more}",
                f"  {steps} steps forward{chunks}; balance {found.balance:.3f}; "
                f"{found.sent_bytes:,} bytes sent by all ranks",
                *self._choice(),
                "  plan.schedule has every message and every tile",
                *([] if bits is None else [f"  bits of one launch over the whole batch: {', '.join(bits) or 'none'}"]),
                *(["  linear layers too: plan.states has every message and every scan"] if self.linear else []),
                *(["  sparse attention too: an indexer's keys travel as in all_gather"] if self.sparse else []),
            )
        )

    def _choice(self) -> list[str]:
        """Say what "auto" chose, and why."""
        if not self.chosen_from:
            return []
        later = "" if self.room is None else " (the choice is that for the first batch, the estimates are of this one)"
        return [f"  {why_chosen(self.problem, self.chosen_from)}{later}"]


@takes(ProblemArguments)
def make_plan(
    *,
    cp: ContextParallel,
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
    layout: torch.Tensor | Sequence[Sequence[int]] | None = None,
    schedule: Schedule | None = None,
    linear: bool = False,
    sparse: bool = False,
    **arguments: Unpack[ProblemArguments],
) -> Plan:
    """Plan one batch. Collective: every rank calls it, and all ranks raise if their problems differ.

    Args:
        cp ... return_max_logit: as in `attention`.
        batch_size, seqlen_q, seqlen_kv: bshd and sbhd only; global. seqlen_kv defaults to seqlen_q; with a padding mask
            the batch size may be left to `cu_seqlens_q`.
        heads_q, heads_kv, d_qk, d_v, dtype, device: of the tensors to come.
        max_sequences: thd only; makes a plan for `plan.update`, with up to this many sequences.
        max_tokens_q, max_tokens_kv: with max_sequences; global, tails included: every rank's q (k, v) then has exactly
            max_tokens_q / cp_size rows. Default to this batch's rows; max_tokens_kv to max_tokens_q without
            `cu_seqlens_kv`.
        layout: the owner of each row of this batch, instead of the context's layout: rows (rank, sequence, start,
            stop), integers [n, 4], positions inside the sequences, padding included; every position has one rank. A
            rank's slice has its rows in the order given, without gaps; all slices are as long as the longest. Give the
            plan to `shard`, `unshard` and `position_ids`. For self-attention; in bshd and sbhd with a padding mask.
        schedule: for all ranks; any that `cp_ref.schedules.verify` accepts for this problem, such as
            `Schedule.parse(text)`. By default the one that `cp_comm_type` names, or that "auto" chooses; a plan that
            is updated keeps the choice for its first batch. Not with max_sequences.
        linear: plan `linear_attention` and `causal_conv1d` too, for layers of the same batch. They need queries and
            keys of equal lengths, and no areas.
        sparse: refuse at once what `sparse_attention` would refuse; "auto" then never takes "p2p". It and `select_keys`
            take any other plan too.

    Returns:
        The plan, for `attention(q, k, v, cp=cp, plan=plan)`, which in `cp_fast` then reads no device value on the host;
        `plan.schedule`, `plan.position_ids`, `str(plan)`.

    Raises:
        ValueError, TypeError: an argument is wrong, here or on another rank. Unsupported: naming what is missing, by
        backend. InvalidSchedule: `schedule` does not compute this problem; it has every finding.
    """
    raise NotImplementedError


@same_parameters(make_plan)
def supports(**arguments: Any) -> tuple[bool, str]:
    """Say whether `make_plan` and `attention` take these arguments (those of `make_plan`) here, and if not, why. Sends
    nothing.

    Raises:
        ValueError, TypeError: the arguments are no problem at all.
    """
    raise NotImplementedError


def update(
    self: Any,
    *,
    cp: ContextParallel,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
) -> None:
    """Give the plan another batch, in place: the same problem with other lengths. Collective, like `make_plan`.

    For plans made with `max_sequences`. `cp_ref` makes a new plan. `cp_fast` overwrites all tables by one copy, on the
    current stream, without waiting for the device: earlier launches still read the old batch, and a CUDA graph of
    `attention` that is replayed later computes the new one. Addresses, sizes, messages and launches stay those of the
    batch that the plan was made with; that batch should need all of them, such as one sequence of the full length.

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
    raise NotImplementedError


def check_plan(plan: Any) -> None:
    """Raise TypeError for anything but None and a plan of either package."""
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan is {kind_of(plan)}; it must be a Plan, as make_plan gives it")


def lengths_of_update(plan: Plan, cp: ContextParallel, given: dict[str, Any]) -> dict[str, Any]:
    """The lengths that `update` was given, by name, with defaults; raises TypeError for an unknown name."""
    arguments = bind(update, {"self": plan, "cp": cp, **given})
    return {name: value for name, value in arguments.items() if name not in ("self", "cp")}


def read_plan_arguments(given: dict[str, Any], kind: type) -> tuple[Agreement, torch.device]:
    """All arguments of `make_plan` by name -> the values that all ranks must agree on, and the plan's device. Sends
    nothing.

    kind: the package's own ContextParallel. Options of the computation and of the results are only checked.
    """
    cp = given["cp"]
    check_context(cp, kind)
    for name in ("deterministic", "return_lse", "return_max_logit"):
        check_flag(name, given[name])
    device = read_device(given["device"])
    sizes = Sizes(dtype=str(given["dtype"]).removeprefix("torch."), **{name: given[name] for name in _SIZES})
    if isinstance(given["layout"], str):
        raise ValueError(f"layout is {given['layout']!r}; a layout's name belongs to the ContextParallel, a table here")
    names = choices(cp, given["schedule"], sparse=given["sparse"] is True)
    problem = read_call(cp, sizes, given["layout"], names, **{name: given[name] for name in ARGUMENTS})
    room = read_room(problem, given)
    extras = check_schedule(given["schedule"], problem, room, cp.comm) + read_linear(given["linear"], problem)
    if problem.cp_comm_type == "all_gather":  # Then it decides the messages of the fast package.
        extras += (("deterministic", given["deterministic"]),)
    check_flag("sparse", given["sparse"])
    if given["sparse"]:
        check_sparse("sparse attention", problem, given["schedule"])
        check_sparse_scores("sparse attention", problem)
    return Agreement(problem, room, extras), device


_OF_SPARSE = ("all_gather", "a2a")


def check_sparse(what: str, problem: Problem, schedule: Any) -> None:
    """Raise Unsupported, or ValueError, where rows of the problem cannot name their keys.

    Args:
        what: the function, for errors.
        schedule: that `make_plan` was given.

    >>> check_sparse("sparse_attention", Problem(2, ()), None)
    Traceback (most recent call last):
        ...
    cp_ref.schedules.words.Unsupported: sparse_attention by cp_comm_type 'p2p' is not supported:
      make the context with ContextParallel(..., cp_comm_type='all_gather'), or with 'auto' the plan with sparse=True
    """
    if problem.cp_comm_type not in _OF_SPARSE:
        cure = (
            "make the context with ContextParallel(..., cp_comm_type='all_gather'), or with 'auto' the plan with "
            "sparse=True"
        )
        raise Unsupported(f"{what} by cp_comm_type {problem.cp_comm_type!r}", {}, cure)
    if schedule is not None:
        raise Unsupported(f"{what} by a schedule given to make_plan", {}, "make the plan without schedule=")
    check_one_document(problem, "top_k" if what == "select_keys" else "indices")


def check_sparse_scores(what: str, problem: Problem) -> None:
    """Raise Unsupported for options of scores that sparse attention does not have.

    >>> check_sparse_scores("sparse_attention", Problem(2, (), softcap=30.0))
    Traceback (most recent call last):
        ...
    cp_ref.schedules.words.Unsupported: this problem is not supported:
      sparse_attention lacks softcap
      make the plan without it: the scores of chosen keys are softmax_scale * q.k alone, with softmax_offset or without
    """
    missing = set(features_of(problem.scores))
    if problem.softmax_type == "off-by-one":
        missing.add(Feature.OFF_BY_ONE)
    if missing:
        rule = "the scores of chosen keys are softmax_scale * q.k alone, with softmax_offset or without"
        raise Unsupported("this problem", {what: missing}, f"make the plan without it: {rule}")


def read_linear(linear: Any, problem: Problem) -> tuple[tuple[str, object], ...]:
    """The part of the agreement about linear layers. Raises ValueError if the problem has no documents to follow."""
    check_flag("linear", linear)
    if linear and problem.areas is not None:
        raise ValueError("linear is True, but areas are given; linear layers follow documents, from their first token")
    lengths = problem.lengths
    if linear and (lengths.len_q != lengths.len_kv or lengths.slots_q != lengths.slots_kv):
        raise ValueError(
            "linear is True, but the lengths of queries and keys differ; linear layers have one row for both"
        )
    return (("linear", True),) if linear else ()


def choices(cp: ContextParallel, schedule: Any = None, *, sparse: bool = False) -> tuple[str, ...]:
    """The schedules that a context may choose from; () where it has no choice.

    Args:
        schedule: that `make_plan` was given. It is for one schedule's problem, "all_gather" or "p2p": their problems
            have the same rows, heads and tables.
        sparse: as in `make_plan`.
    """
    if len(cp.schedules) == 1 or schedule is not None:
        return ()
    return tuple(name for name in cp.schedules if not sparse or name in _OF_SPARSE)


def read_call(
    cp: ContextParallel, sizes: Sizes, layout: Any = None, names: tuple[str, ...] | None = None, **arguments: Any
) -> Problem:
    """The problem of one call, by the schedule that its context names or chooses; raises ValueError or TypeError. Sends
    nothing.

    names: those to choose from, if not all `choices` of the context.
    """
    problem = read_problem(
        cp_size=cp.size,
        cp_comm_type=cp.schedules[0],
        a2a_size=cp.a2a_size,
        layout=cp.layout if layout is None else layout,
        sizes=sizes,
        **with_digest(arguments),
    )
    names = choices(cp) if names is None else names
    return choose_schedule(problem, names) if names else problem
