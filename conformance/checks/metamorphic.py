"""Tier `metamorphic`: problems that must have the same answer. No oracle is asked, so this tier shares no formula with
one, and it holds in every dtype.

    one rank in place of all       cp_size N gives what cp_size 1 gives
    another layout                 tokens may lie on other ranks (played where bits are claimed)
    sequences reversed             the sequences in another order give the same results in that order
    the last sequence left out     nothing changes for the others (so adding one changes nothing either)
    the first sequence by itself   gives what it gives among the others
    a sequence of padding more     a sequence that is all padding, appended, changes nothing
    v times 2                      gives out times 2, the same lse and dv, and dq, dk and d_offset times 2, to the last
                                   bit of normal numbers
    auto in place of the ring      cp_comm_type "auto" gives what "p2p" gives; for implementations that claim it by
                                   `chooses_schedule = True`

Equal means up to rounding. An implementation that promises more is held to it, to the last bit:

    same_bits          a function of a `Case` that names those of out, lse, dq, dk and dv that have the bits of the same
                       problem on one rank: for every cp_size and layout, and whoever else is in the batch
    batch_invariant    under deterministic=True all results, whoever else is in the batch, wherever every sequence is
                       cut by itself (not in contiguous thd). True, or a function of two problems that says whether
                       their bits are the same
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch

from conformance.case import Case
from conformance.checks.budgets import Tensors, close, same_bits
from conformance.checks.play import play
from conformance.checks.reference import UnsupportedCase
from conformance.implementation import RESULTS_WITH_BITS, Implementation, as_implementation
from conformance.scores import depends_on_number
from conformance.tensors import GlobalTensors, build, real_tokens
from cp_ref.schedules.ownership import divisor
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.problem import Sequence as OneSequence
from cp_ref.schedules.schedule import side_of
from cp_ref.schedules.words import LAYOUTS

__all__ = ["RELATIONS", "check_metamorphic"]

_PER_SEQUENCE = RESULTS_WITH_BITS
_WHERE_CLAIMED = "another layout"


def check_metamorphic(impl: Implementation, case: Case, device: str = "cpu") -> list[str]:
    """Relations that do not hold.

    Raises:
        UnsupportedCase: the implementation does not have this, and says so on every rank.
    """
    tensors = build(case, device)
    base = play(impl, case, tensors)
    if base.findings:
        return base.findings
    impl = as_implementation(impl)
    promise: bool | Callable[[Problem, Problem], bool] = getattr(impl.offered, "batch_invariant", False)
    claimed = impl.same_bits(case)
    relations = RELATIONS if getattr(impl.offered, "chooses_schedule", False) is True else _without_choice()

    def exact(how: How, other: Case) -> frozenset[str]:
        """The results that must have the same bits."""
        invariant = promise and case.deterministic and _cut_by_itself(case.problem)
        if how == "of a batch" and invariant:
            invariant = promise(case.problem, other.problem) if callable(promise) else promise
        if how == "bits" or (how == "of a batch" and invariant):
            return frozenset((*_PER_SEQUENCE, "max_logit", "d_offset"))
        return frozenset() if how == "rounded" else claimed & impl.same_bits(other)

    found: list[str] = []
    refused: UnsupportedCase | None = None
    judged = 0
    for name, relation in relations.items():
        if name == _WHERE_CLAIMED and not claimed:
            continue
        for other, other_tensors, expect in relation(case, tensors):
            try:
                played = play(impl, other, other_tensors)
            except UnsupportedCase as refusal:  # The others may still find something.
                refused = refusal
                continue
            judged += 1
            if played.findings:
                found += [f"with {name}: {finding}" for finding in played.findings]
                continue
            want, got, how = expect(base.results, played.results)
            to_the_bit = exact(how, other)
            same = {label: x for label, x in want.items() if label.partition(" ")[0] in to_the_bit}
            found += same_bits(f"with {name}", same, got)
            found += close(f"with {name}", case, {label: x for label, x in want.items() if label not in same}, got)
    if refused is not None and not judged:
        raise refused
    return found


# Results are equal up to rounding; bit by bit; bit by bit if an implementation claims it, or promises it of batches.
How = Literal["rounded", "bits", "claimed", "of a batch"]
# (Results of the base, of the other problem) -> the pair to be equal, and how.
Expectation = Callable[[Tensors, Tensors], tuple[Tensors, Tensors, How]]
Related = Iterator[tuple[Case, GlobalTensors, Expectation]]


def _of_one_rank(case: Case, tensors: GlobalTensors) -> Related:
    if case.problem.cp_size > 1:
        yield replace(case, problem=replace(case.problem, cp_size=1, a2a_size=1)), tensors, _as_claimed


def _of_other_layouts(case: Case, tensors: GlobalTensors) -> Related:
    p = case.problem
    alike = all((s.len_q, s.slots_q) == (s.len_kv, s.slots_kv) for s in p.sequences)
    balances = alike and (p.qkv_format == "thd" or p.attn_mask_type.startswith("padding"))
    for layout in LAYOUTS if isinstance(p.layout, str) else ():
        other, unit = replace(p, layout=layout), divisor(layout, p.cp_size)
        if layout == p.layout or (layout == "balanced" and not balances):
            continue
        if p.qkv_format == "thd" and any(s.slots_q % unit or s.slots_kv % unit for s in p.sequences):
            continue
        if _with_sequences(other, range(len(p.sequences)), 0) is not None:
            yield replace(case, problem=other), tensors, _as_claimed


def _as_claimed(base: Tensors, got: Tensors) -> tuple[Tensors, Tensors, How]:
    return base, got, "claimed"


def _of_auto(case: Case, tensors: GlobalTensors) -> Related:
    if case.problem.cp_comm_type == "p2p":
        chosen = replace(case.problem, cp_comm_type="auto")
        yield replace(case, problem=chosen), tensors, lambda a, b: (a, b, "rounded")


def _scaled(case: Case, tensors: GlobalTensors) -> Related:
    if case.problem.dtype == "float16":  # The range of float16 is too small.
        return
    factors = {"out": 2.0, "lse": 1.0, "max_logit": 1.0, "dv": 1.0}
    if case.loss == "out":
        factors |= {"dq": 2.0, "dk": 2.0, "d_offset": 2.0}

    def expect(base: Tensors, got: Tensors) -> tuple[Tensors, Tensors, How]:
        want = {n: _up_to_underflow(x * factors[n], got[n]) for n, x in base.items() if n in factors}
        return want, {n: got[n] for n in want}, "bits" if case.deterministic else "rounded"

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

        def expect(base: Tensors, got: Tensors) -> tuple[Tensors, Tensors, How]:
            want, have = {}, {}
            for name in _PER_SEQUENCE:
                for place, n in enumerate(chosen if name in base else []):
                    label = f"{name} of sequence {n}"
                    want[label], have[label] = _part(case, name, base[name], n), _part(other, name, got[name], place)
            if everyone and "max_logit" in base:
                want["max_logit"], have["max_logit"] = base["max_logit"], got["max_logit"]
            return want, have, "of a batch"

        yield other, _take(case, tensors, chosen, other), expect

    return relation


RELATIONS: dict[str, Callable[[Case, GlobalTensors], Related]] = {
    "one rank (cp_size 1) in place of all": _of_one_rank,
    _WHERE_CLAIMED: _of_other_layouts,
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
