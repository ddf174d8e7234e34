"""Entries of a table: named problems that are always played, and how each is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from conformance.case import Case
from conformance.draw.adapted import adapted, judged_plainly
from conformance.draw.capabilities import capabilities_of
from conformance.implementation import Implementation
from conformance.judge.ranks import UnsupportedCase
from conformance.judge.run_record import Judged, Verdict
from conformance.run.case_tensors import GlobalTensors, build
from conformance.tiers import budget, determinism, hygiene, logic, metamorphic, plan, probes
from conformance.tiers.calls import errors
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.words import CP_COMM_TYPES

__all__ = ["TableEntry", "dense", "every_schedule", "problem"]

_TIERS = {
    module.__name__.rsplit(".", 1)[1]: module.check
    for module in (budget, determinism, hygiene, logic, metamorphic, plan, probes)
}

Change = Callable[[GlobalTensors], GlobalTensors]
Attempt = tuple[str, list[str]]  # the text of what was played, and the findings


@dataclass(frozen=True)
class TableEntry:
    """An entry of a table, and how it is judged: every case by every tier, every malformed call, and then `by_hand`.

    Attributes:
        text: what is special about it, or what went wrong where it was found.
        cases: problems that have to be right.
        tiers: drawn tiers that judge each case, by name.
        change: other values in the tensors, for the tier logic alone.
        errors: entries of the tier `errors`: calls that have to raise.
        by_hand: `by_hand(impl, device) -> findings`, for what is no case.
        gpu: whether a GPU alone is quick enough.
        free: fields of the problems that may be others for an implementation that has less; see
            `conformance.draw.adapted`.
    """

    text: str
    cases: tuple[Case, ...] = ()
    tiers: tuple[str, ...] = ("logic", "probes")
    change: Change | None = None
    errors: tuple[str, ...] = ()
    by_hand: Callable[[Implementation, str], list[str]] | None = None
    free: tuple[str, ...] = ()
    gpu: bool = False

    def play(self, impl: Implementation, device: str = "cpu") -> Judged:
        """All findings, each with the case it belongs to, and what became of every case.

        Raises:
            UnsupportedCase: nothing of the entry is supported; with the last reason.
        """
        found: list[str] = []
        cases: dict[str, Verdict] = {}
        reason, judged = "", 0
        for where, attempt in self._attempts(impl, device):
            try:
                text, findings = attempt()
            except UnsupportedCase as refusal:
                reason = str(refusal)
                if where.startswith("Case("):
                    cases.setdefault(where, "unsupported")
                continue
            found += [f"{finding} [{text}]" if text else finding for finding in findings]
            judged += 1
            if text.startswith("Case("):
                cases[text] = "wrong" if findings or cases.get(text) == "wrong" else "right"
        if not judged:
            raise UnsupportedCase(reason)
        return Judged(found, cases=cases)

    def _judge(self, impl: Implementation, case: Case, tier: str, device: str) -> Attempt:
        """The tier's findings; without lse and its gradient, or in another dtype, where the implementation has no more.

        Raises:
            UnsupportedCase: the implementation has none of these; with the reason of the case as it is.
        """

        def judge(attempt: Case) -> list[str]:
            if self.change is not None and tier == "logic":
                return logic.check_tensors(impl, attempt, self.change(build(attempt, device)))
            return _TIERS[tier](impl, attempt, device)

        capabilities = capabilities_of(impl, device)
        attempt, findings = judged_plainly(adapted(case, capabilities, self.free), capabilities, judge)
        return str(attempt), findings

    def _attempts(self, impl: Implementation, device: str) -> Iterator[tuple[str, Callable[[], Attempt]]]:
        for case in self.cases:
            for name in self.tiers:
                yield str(case), partial(self._judge, impl, case, name, device)
        for entry_id in self.errors:
            yield f"error {entry_id}", partial(_malformed, impl, entry_id, device)
        if (by_hand := self.by_hand) is not None:
            yield "", lambda: ("", by_hand(impl, device))


def _malformed(impl: Implementation, entry_id: str, device: str) -> Attempt:
    """The tier errors' findings.

    Raises:
        UnsupportedCase: the call is refused whole; the tier `errors` itself asks whether the well-formed one is.
    """
    found = errors.check(impl, entry_id, device)
    refusals = tuple(f" raised {name}:" for name in (impl.Unsupported.__name__, "NotImplementedError"))
    if found and all(any(refusal in finding for refusal in refusals) for finding in found):
        raise UnsupportedCase(found[0])
    return f"error {entry_id}", found


def dense(length: int, kv: int | None = None) -> Sequence:
    """A sequence without padding."""
    kv = length if kv is None else kv
    return Sequence(length, kv, length, kv)


def problem(cp_size: int, *sequences: Sequence, **fields: object) -> Problem:
    """A packed float64 problem with 4 query heads, 2 K/V heads and a causal mask, except for `fields`."""
    plain = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "heads_q": 4, "heads_kv": 2, "dtype": "float64"}
    return Problem(cp_size, sequences, **(plain | fields))  # pyright: ignore[reportArgumentType]


def every_schedule(case: Case, only: tuple[str, ...] = CP_COMM_TYPES) -> tuple[Case, ...]:
    """The case under every schedule whose a2a the heads allow; a2a+p2p with the inner group as large as it can be,
    short of all ranks.
    """
    p, found = case.problem, []
    for comm in only:
        sizes = [n for n in range(p.cp_size, 0, -1) if p.cp_size % n == 0 and _heads_allow(p, n)]
        if comm == "a2a":
            sizes = sizes[:1] if sizes[0] == p.cp_size else []
        elif comm == "a2a+p2p":
            sizes = [n for n in sizes if n < p.cp_size][:1]
        else:
            sizes = [1]
        found += [replace(case, problem=replace(p, cp_comm_type=comm, a2a_size=n)) for n in sizes]
    return tuple(found)


def _heads_allow(p: Problem, a2a_size: int) -> bool:
    return p.heads_q % a2a_size == 0 and (p.heads_kv % a2a_size == 0 or a2a_size % p.heads_kv == 0)
