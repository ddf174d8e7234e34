"""Entries of a table: named problems that are always played, and how each is judged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from conformance.case import Case
from conformance.checks.calls import check_determinism, check_plan
from conformance.checks.hygiene import check_hygiene
from conformance.checks.metamorphic import check_metamorphic
from conformance.checks.probes import check_probes
from conformance.checks.reference import UnsupportedCase
from conformance.checks.values import check_budget, check_logic, check_logic_of
from conformance.implementation import Implementation
from conformance.problems.capabilities import Capabilities, adapted, capabilities_of, judged_plainly
from conformance.problems.malformed import MalformedCall
from conformance.problems.problem import NamedProblem
from conformance.record import Judged, Verdict
from conformance.tensors import GlobalTensors, build
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.words import CP_COMM_TYPES

__all__ = [
    "PADDED",
    "NamedCases",
    "TableEntry",
    "case",
    "dense",
    "entry",
    "every_schedule",
    "one_dominant_key",
    "problem",
    "reported",
]

_CHECKS: dict[str, Callable[[Implementation, Case, str], list[str]]] = {
    "budget": check_budget,
    "determinism": check_determinism,
    "hygiene": check_hygiene,
    "logic": check_logic,
    "metamorphic": check_metamorphic,
    "plan": check_plan,
    "probes": check_probes,
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
            `conformance.problems.capabilities`.
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
                return check_logic_of(impl, attempt, self.change(build(attempt, device)))
            return _CHECKS[tier](impl, attempt, device)

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


def _malformed(impl: Implementation, name: str, device: str) -> Attempt:
    """The tier errors' findings.

    Raises:
        UnsupportedCase: the call is refused whole; the tier `errors` itself asks whether the well-formed one is.
    """
    call = MalformedCall(name)
    found = call.check(impl, device)
    refusals = tuple(f" raised {name}:" for name in (impl.Unsupported.__name__, "NotImplementedError"))
    if found and all(any(refusal in finding for refusal in refusals) for finding in found):
        raise UnsupportedCase(found[0])
    return str(call), found


class NamedCases(NamedProblem):
    """Base of the entries of a table of cases: `table` has them by name."""

    table: ClassVar[dict[str, TableEntry]] = {}

    @classmethod
    def names(cls) -> Collection[str]:
        """All names of the table."""
        return cls.table

    @classmethod
    def items(cls, capabilities: Capabilities) -> list[str]:
        """Those that are quick enough for the device. An unsupported entry says so itself."""
        on_gpu = capabilities.device.startswith("cuda")
        return [name for name, entry in cls.table.items() if on_gpu or not entry.gpu]

    @property
    def cases(self) -> tuple[Case, ...]:
        """The problems that it plays."""
        return self.table[self.name].cases

    def check(self, impl: Implementation, device: str = "cpu") -> Judged:
        """Findings. Raises UnsupportedCase where the implementation has none of it."""
        return self.table[self.name].play(impl, device)


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
    short of all ranks. On two ranks that is a group of one, which is p2p. So it is left out where p2p is played: the
    special case inner-group-of-one has it.
    """
    p, found = case.problem, []
    for comm in only:
        sizes = [n for n in range(p.cp_size, 0, -1) if p.cp_size % n == 0 and _heads_allow(p, n)]
        if comm == "a2a":
            sizes = sizes[:1] if sizes[0] == p.cp_size else []
        elif comm == "a2a+p2p":
            sizes = [n for n in sizes if n < p.cp_size and (n > 1 or "p2p" not in only)][:1]
        else:
            sizes = [1]
        found += [replace(case, problem=replace(p, cp_comm_type=comm, a2a_size=n)) for n in sizes]
    return tuple(found)


def _heads_allow(p: Problem, a2a_size: int) -> bool:
    return p.heads_q % a2a_size == 0 and (p.heads_kv % a2a_size == 0 or a2a_size % p.heads_kv == 0)


PADDED = (Sequence(5, 5, 8, 8), Sequence(8, 8, 8, 8), Sequence(0, 0, 8, 8))
_FREE = ("qkv_format", "layout", "heads_kv")  # where an entry does not name them, it is not about them


def entry(
    text: str,
    cp_size: int,
    *sequences: Sequence,
    tails: tuple[int, int] = (0, 0),
    tiers: tuple[str, ...] = ("logic", "probes"),
    change: Change | None = None,
    call: dict[str, object] | None = None,
    gpu: bool = False,
    **fields: object,
) -> TableEntry:
    """An entry under every schedule; `call` has fields of the case, `fields` those of the problem; `gpu` for one that
    takes a CPU too long.
    """
    options = {"return_lse": True, "return_max_logit": True, "loss": "out+lse", "seed": 7, **(call or {})}
    p = problem(cp_size, *sequences, **fields)
    case = Case(p, tail_q=tails[0], tail_kv=tails[1], **options)  # pyright: ignore[reportArgumentType]
    cases = (case,) if "cp_comm_type" in fields else every_schedule(case)
    free = tuple(name for name in _FREE if name not in fields)
    return TableEntry(text, cases, tiers, change, free=free, gpu=gpu)


def one_dominant_key(t: GlobalTensors) -> GlobalTensors:
    """The first slot's key takes all the weight of whoever sees it."""
    k = t.k.clone()
    k[0] = k[0] * 0 + 40.0
    return replace(t, q=t.q.abs() + 1.0, k=k)


def case(cp_size: int, *sequences: Sequence, tails: tuple[int, int] = (0, 0), call: str = "", **fields: object) -> Case:
    """A case of `entries.problem`, with lse and its gradient; `call` names flags of the case, separated by spaces."""
    flags = dict.fromkeys(call.split(), True)
    return Case(
        problem(cp_size, *sequences, **fields),
        tail_q=tails[0],
        tail_kv=tails[1],
        seed=11,
        return_lse=True,
        loss="out+lse",
        **flags,  # pyright: ignore[reportArgumentType]
    )


def reported(
    text: str,
    *cases: Case,
    schedules: tuple[str, ...] = ("p2p",),
    tiers: tuple[str, ...] = ("logic", "probes"),
    errors: tuple[str, ...] = (),
    by_hand: Callable[[Implementation, str], list[str]] | None = None,
) -> TableEntry:
    """A report of a bug, which cases show under the schedules that had it."""
    played = tuple(c for one in cases for c in every_schedule(one, schedules))
    return TableEntry(text, played, tiers, errors=errors, by_hand=by_hand)
