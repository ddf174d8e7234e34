"""Tier `metamorphic`: problems that must have the same answer. No oracle is asked, so this tier shares no formula with
one, and it holds in every dtype.

    one rank in place of all       cp_size N gives what cp_size 1 gives
    sequences reversed             the sequences in another order give the same results in that order
    the last sequence left out     nothing changes for the others (so adding one changes nothing either)
    the first sequence by itself   gives what it gives among the others
    a sequence of padding more     a sequence that is all padding, appended, changes nothing
    v times 2                      gives out times 2, the same lse and dv, and dq, dk and d_offset times 2, to the last
                                   bit of normal numbers
    auto in place of the ring      cp_comm_type "auto" gives what "p2p" gives; for implementations that claim it by
                                   `chooses_schedule = True`

Equal means up to rounding. An implementation that promises more, by an attribute `batch_invariant`, is held to it under
deterministic=True wherever every sequence is cut by itself (not in contiguous thd): to the last bit, whoever else is in
the batch. The attribute is True, or a function of two problems that says whether their bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from conformance.case import Case
from conformance.checks.budgets import Tensors, close, same_bits
from conformance.checks.play import play
from conformance.checks.reference import UnsupportedCase
from conformance.implementation import Implementation
from conformance.scores import depends_on_number
from conformance.tensors import GlobalTensors, build, real_tokens
from cp_ref.schedules.ownership import divisor
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.problem import Sequence as OneSequence
from cp_ref.schedules.schedule import side_of

__all__ = ["RELATIONS", "check_metamorphic"]

_PER_SEQUENCE = ("out", "lse", "dq", "dk", "dv")


def check_metamorphic(impl: Implementation, case: Case, device: str = "cpu") -> list[str]:
    """Relations that do not hold.

    Raises:
        UnsupportedCase: the implementation does not have this, and says so on every rank.
    """
    tensors = build(case, device)
    base = play(impl, case, tensors)
    if base.findings:
        return base.findings
    offered = getattr(impl, "offered", impl)
    promise = getattr(offered, "batch_invariant", False)
    relations = RELATIONS if getattr(offered, "chooses_schedule", False) is True else _without_choice()

    def bitwise(other: Case) -> bool:
        if not (promise and case.deterministic and _cut_by_itself(case.problem)):
            return False
        return promise is True or promise(case.problem, other.problem)

    found: list[str] = []
    refused: UnsupportedCase | None = None
    judged = 0
    for name, relation in relations.items():
        for other, other_tensors, expect in relation(case, tensors):
            try:
                played = play(impl, other, other_tensors)
            except UnsupportedCase as refusal:  # the others may still find something
                refused = refusal
                continue
            judged += 1
            if played.findings:
                found += [f"with {name}: {finding}" for finding in played.findings]
                continue
            want, got, exactly = expect(base.results, played.results)
            same, beside = exactly if exactly is not None else bitwise(other), f"with {name}"
            found += same_bits(beside, want, got) if same else close(beside, case, want, got)
    if refused is not None and not judged:
        raise refused
    return found


# (results of the base, of the other problem) -> the pair to be equal, and whether bit by bit (None: if promised)
Expectation = Callable[[Tensors, Tensors], tuple[Tensors, Tensors, bool | None]]
Related = Iterator[tuple[Case, GlobalTensors, Expectation]]


def _of_one_rank(case: Case, tensors: GlobalTensors) -> Related:
    if case.problem.cp_size > 1:
        yield replace(case, problem=replace(case.problem, cp_size=1, a2a_size=1)), tensors, lambda a, b: (a, b, False)


def _of_auto(case: Case, tensors: GlobalTensors) -> Related:
    if case.problem.cp_comm_type == "p2p":
        chosen = replace(case.problem, cp_comm_type="auto")
        yield replace(case, problem=chosen), tensors, lambda a, b: (a, b, False)


def _scaled(case: Case, tensors: GlobalTensors) -> Related:
    if case.problem.dtype == "float16":  # the range of float16 is too small
        return
    factors = {"out": 2.0, "lse": 1.0, "max_logit": 1.0, "dv": 1.0}
    if case.loss == "out":
        factors |= {"dq": 2.0, "dk": 2.0, "d_offset": 2.0}

    def expect(base: Tensors, got: Tensors) -> tuple[Tensors, Tensors, bool]:
        want = {n: _up_to_underflow(x * factors[n], got[n]) for n, x in base.items() if n in factors}
        return want, {n: got[n] for n in want}, case.deterministic

    yield case, replace(tensors, v=tensors.v * 2.0), expect


def _up_to_underflow(want: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """`want`, or `got` where both differ by less than the smallest normal number. Below it, twice a rounded value is
    not the rounded double.
    """
    return torch.where((got - want).abs() < torch.finfo(want.dtype).tiny, got, want)


def _regrouped(order: Callable[[int], Sequence[int]], extra: int = 0) -> Callable[[Case, GlobalTensors], Related]:
    """Other sequences of the batch, by number, in the order given; then `extra` sequences of padding alone. Where
    scores depend on the number of a sequence, the numbers stay.
    """

    def relation(case: Case, tensors: GlobalTensors) -> Related:
        count = len(case.problem.sequences)
        chosen = list(order(count))
        if count == 0 or not chosen or (chosen == list(range(count)) and not extra):
            return
        if depends_on_number(case) and chosen != list(range(len(chosen))):
            return
        problem = _with_sequences(case.problem, chosen, extra)
        if problem is None:
            return
        other = replace(case, problem=problem)
        if (other.tail_q, other.tail_kv) != (case.tail_q, case.tail_kv):  # With these lengths the tail has to grow.
            return
        everyone = sorted(chosen) == list(range(count))

        def expect(base: Tensors, got: Tensors) -> tuple[Tensors, Tensors, None]:
            want, have = {}, {}
            for name in _PER_SEQUENCE:
                for place, n in enumerate(chosen if name in base else []):
                    label = f"{name} of sequence {n}"
                    want[label], have[label] = _part(case, name, base[name], n), _part(other, name, got[name], place)
            if everyone and "max_logit" in base:
                want["max_logit"], have["max_logit"] = base["max_logit"], got["max_logit"]
            return want, have, None

        yield other, _take(case, tensors, chosen, other), expect

    return relation


RELATIONS: dict[str, Callable[[Case, GlobalTensors], Related]] = {
    "one rank (cp_size 1) in place of all": _of_one_rank,
    "sequences reversed": _regrouped(lambda count: range(count - 1, -1, -1)),
    "the last sequence left out": _regrouped(lambda count: range(count - 1)),
    "the first sequence by itself": _regrouped(lambda count: [0] if count > 2 else []),
    "a sequence of padding more": _regrouped(range, extra=1),
    "v times 2": _scaled,
    "auto in place of the ring": _of_auto,
}


def _without_choice() -> dict[str, Callable[[Case, GlobalTensors], Related]]:
    return {name: relation for name, relation in RELATIONS.items() if relation is not _of_auto}


def _cut_by_itself(problem: Problem) -> bool:
    """Whether which rank owns which token of a sequence does not depend on the other sequences."""
    if problem.qkv_format != "thd" or problem.layout != "dual_chunk":
        return problem.qkv_format != "thd" and problem.layout != "balanced"
    lengths, parts = problem.lengths, divisor(problem.layout, problem.cp_size)
    return not any(n % parts for n in (*lengths.slots_q, *lengths.slots_kv))


def _with_sequences(problem: Problem, chosen: Sequence[int], extra: int) -> Problem | None:
    """None if the layout cannot cut these, or if areas would move: their rows are those of the whole
    buffer.
    """
    if problem.areas is not None:
        return None
    sequences = [problem.sequences[n] for n in chosen]
    if extra:
        if problem.qkv_format == "thd":
            unit = divisor(problem.layout, problem.cp_size)
            sequences += [OneSequence(0, 0, unit, unit)] * extra
        elif problem.attn_mask_type.startswith("padding"):
            slots_q, slots_kv = problem.sequences[0].slots_q, problem.sequences[0].slots_kv
            sequences += [OneSequence(0, 0, slots_q, slots_kv)] * extra
        else:
            return None
    if problem.layout == "contiguous" and problem.qkv_format == "thd":
        totals = (sum(s.slots_q for s in sequences), sum(s.slots_kv for s in sequences))
        if any(total % problem.cp_size for total in totals):
            return None
    return replace(problem, sequences=tuple(sequences))


def _part(case: Case, name: str, x: torch.Tensor, n: int) -> torch.Tensor:
    """Sequence n's slots of a result or an input."""
    p = case.problem
    if p.qkv_format == "thd":
        starts = p.starts(side_of(name))
        rows = slice(starts[n], starts[n + 1])
        return x[:, rows] if name in ("lse", "dlse") else x[rows]
    return x[:, n] if p.qkv_format == "sbhd" and name not in ("lse", "dlse") else x[n]


def _take(case: Case, tensors: GlobalTensors, chosen: Sequence[int], other: Case) -> GlobalTensors:
    """The tensors of the other case: those of the chosen sequences, NaN in new rows, the tail unchanged."""
    p, made = case.problem, {}
    axis = 0 if p.qkv_format != "sbhd" else 1
    for name in ("q", "k", "v", "dout", "dlse"):
        x = getattr(tensors, name)
        parts = [_part(case, name, x, n) for n in chosen]
        along = {"thd": 1 if name == "dlse" else 0}.get(p.qkv_format, 0 if name == "dlse" else axis)
        for s in other.problem.sequences[len(chosen) :]:
            shape = list(parts[0].shape) if parts else []
            if p.qkv_format == "thd":
                shape[along] = s.slots_kv if side_of(name) == "kv" else s.slots_q
            parts.append(x.new_full(shape, float("nan")))
        if p.qkv_format == "thd":
            start = p.starts(side_of(name))[-1]
            parts.append(x[:, start:] if name == "dlse" else x[start:])
            made[name] = torch.cat(parts, dim=along)
        else:
            made[name] = torch.stack(parts, dim=along)
    real_q, real_kv = (real_tokens(other, side).to(tensors.q.device) for side in ("q", "kv"))
    return GlobalTensors(**made, softmax_offset=tensors.softmax_offset, real_q=real_q, real_kv=real_kv)
