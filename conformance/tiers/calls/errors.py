"""Tier `errors`: malformed calls. Every rank has to raise, with a message that names the argument; none may hang or
compute.

Each entry of `ERRORS` is a good call with one thing changed. An entry is played twice: changed on every rank, and
changed on the last rank alone, where every other rank has to raise as well, or it would wait for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from conformance.case import Case
from conformance.draw.capabilities import Capabilities, capabilities_of, variants
from conformance.implementation import Implementation
from conformance.judge.ranks import UnsupportedCase
from conformance.judge.reference import Hang, Outcome, describe_error, run_ranks
from conformance.judge.run_record import Judged
from conformance.run.case_tensors import build
from conformance.run.play_case import play
from conformance.tiers import plan as plan_tier
from conformance.tiers.calls.error_cases import ERRORS, ErrorCase
from conformance.tiers.calls.small_calls import SmallCall, call_of
from cp_ref.schedules.problem import Problem, Sequence

__all__ = ["cases", "check", "ids"]

_LIMIT_S = 20.0
_HAS: dict[str, Callable[[Capabilities], bool]] = {
    "alibi_slopes": lambda has: "alibi" in has.wishes,
    "score_mod": lambda has: has.has("score_mod", "some"),
    "dropout_p": lambda has: has.has("dropout_p", "some"),
}


def ids(capabilities: Capabilities) -> list[str]:
    """The ids that `check` takes: the entries of the table, and every choice that `supports` refuses."""
    return ["well-formed", *ERRORS, *(f"unsupported {choice}" for choice in capabilities.refused)]


def cases(entry_id: str) -> tuple[Case, ...]:
    """The problem that has to be refused; none for a malformed call, which is no problem."""
    word, _, choice = entry_id.partition(" ")
    problems = _refusable() if word == "unsupported" else {}
    return (Case(problems[choice]),) if choice in problems else ()


def _refusable() -> dict[str, Problem]:
    base = Problem(2, (Sequence(16, 16, 16, 16),))
    return {f"{axis} {name}": problem for axis, name, problem in variants(base)}


def check(impl: Implementation, entry_id: str, device: str = "cpu") -> list[str]:
    """Findings about one entry.

    Raises:
        ValueError: there is no such entry.
        UnsupportedCase: the malformed call is refused on every rank, for what the implementation does not have.
    """
    if entry_id == "well-formed":  # The table means nothing if its calls are refused unchanged.
        return _well_formed(impl, device)
    if entry_id.startswith("unsupported "):
        return _check_refusal(impl, entry_id.removeprefix("unsupported "), device)
    if entry_id not in ERRORS:
        raise ValueError(f"there is no error case {entry_id!r}; there are: {', '.join(ERRORS)}")
    entry = ERRORS[entry_id]
    if entry.needs and not _HAS[entry.needs](capabilities_of(impl, device)):
        raise UnsupportedCase(f"{entry.needs} is unsupported")
    layout = call_of(impl, entry.base, device).context.get("layout", "dual_chunk")
    if entry.layout not in ("", layout):
        raise UnsupportedCase(f"it is malformed in the layout {entry.layout} alone, which is unsupported")
    found = [] if entry.one_rank_only else _check_everywhere(impl, entry, device)
    return found + (_check_alone(impl, entry, device) if entry.alone else [])


def _well_formed(impl: Implementation, device: str) -> list[str]:
    """Findings about the calls in bshd and thd, of those formats that are supported."""
    bases = [base for base in ("bshd", "thd") if capabilities_of(impl, device).has("qkv_format", base)]
    if not bases:
        raise UnsupportedCase("neither bshd nor thd is supported")
    runs = [_run(impl, [call_of(impl, base, device)] * 2) for base in bases]
    return [f"{_who(n)} raised {describe_error(o.error)}" for run in runs for n, o in enumerate(run) if o.error]


def _check_everywhere(impl: Implementation, entry: ErrorCase, device: str) -> list[str]:
    try:
        outcomes = _run(impl, [entry.change(call_of(impl, entry.base, device)) for _ in range(2)])
    except Hang as hang:
        return [f"wrong on every rank: {hang}"]
    if all(isinstance(o.error, impl.Unsupported) for o in outcomes):  # It need not know more of missing features.
        raise UnsupportedCase(str(outcomes[0].error))
    return [
        f"wrong on every rank: {finding}"
        for n, o in enumerate(outcomes)
        if (finding := _judge(_who(n), o, entry.names))
    ]


def _check_alone(impl: Implementation, entry: ErrorCase, device: str) -> list[str]:
    try:
        good = call_of(impl, entry.base, device)
        outcomes = _run(impl, [good, entry.change(good)])
    except Hang as hang:
        return [f"wrong on rank 1 alone: {hang}"]
    right, wrong = outcomes  # the rank that is right need not repeat the error
    findings = [_judge(_who(0), right, entry.names if entry.one_rank_only else ""), _judge(_who(1), wrong, entry.names)]
    return [f"wrong on rank 1 alone: {finding}" for finding in findings if finding]


def _run(impl: Implementation, calls: list[SmallCall]) -> list[Outcome]:
    return run_ranks(2, lambda member: calls[member.rank].run(impl, member), _LIMIT_S)


def _who(rank: int) -> str:
    return f"rank {rank}"


def _judge(who: str, outcome: Outcome, names: str) -> str:
    """Findings about the refusals of the ranks."""
    if outcome.error is None:
        return f"{who} returned, but should have raised a ValueError or TypeError that names {names or 'what is wrong'}"
    if not isinstance(outcome.error, ValueError | TypeError):
        return f"{who} raised {describe_error(outcome.error)}, but should have raised a ValueError or TypeError"
    if not re.search(names, str(outcome.error)):
        return f"{who}'s message does not match /{names}/: {describe_error(outcome.error)}"
    return ""


def _check_refusal(impl: Implementation, choice: str, device: str) -> Judged:
    """A choice outside `supports`: make_plan and attention raise `Unsupported` on every rank, with the reason."""
    problems = _refusable()
    if choice not in problems:
        raise ValueError(f"there is no choice {choice!r}; there are: {', '.join(problems)}")
    case, found = Case(problems[choice]), []
    attempts: dict[str, Callable[[], Any]] = {
        "make_plan": lambda: plan_tier.check(impl, case, device),
        "attention": lambda: play(impl, case, build(case, device), _LIMIT_S).findings,
    }
    for name, attempt in attempts.items():
        try:
            findings = attempt() or [f"{name} computed, but supports(...) is False"]
            found += [f"{name}: {finding}" for finding in findings]
        except UnsupportedCase as refusal:
            if choice.startswith("cp_comm_type") and choice.split()[1] not in str(refusal):
                found.append(f"{name}: the refusal does not name {choice.split()[1]!r}: {refusal}")
    return Judged(found, cases={str(case): "wrong" if found else "unsupported"})
