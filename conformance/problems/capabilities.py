"""The capabilities of an implementation, found by asking its `supports` about one small problem after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, TypeVar

from conformance.case import PRECISE_FIRST, Case
from conformance.checks.play import play
from conformance.checks.reference import Hang, UnsupportedCase, describe_error, run_ranks, watching
from conformance.implementation import as_implementation, context
from conformance.problems.features import SCORE_AXES
from conformance.tensors import build, plan_arguments
from cp_ref.schedules.ownership import divisor
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.words import CP_COMM_TYPES, LAYOUTS, MASKS, QKV_FORMATS

__all__ = [
    "AXES",
    "EVERYTHING",
    "WISHES",
    "Capabilities",
    "adapted",
    "ask",
    "capabilities_of",
    "first_of",
    "judged_plainly",
    "narrowed",
    "plainer",
    "probe",
    "probe_by",
    "try_case",
    "variants",
]

_SQUARE = (Sequence(16, 16, 16, 16),)

# axis -> choice -> how the choice changes a plain problem
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "cp_comm_type": {
        name: {"cp_comm_type": name, "heads_q": 2, "heads_kv": 2, "a2a_size": 2 if name.startswith("a2a") else 1}
        for name in CP_COMM_TYPES
    },
    "layout": {
        name: {"layout": name} | ({"attn_mask_type": "padding_causal"} if name == "balanced" else {})
        for name in LAYOUTS
    },
    "qkv_format": {name: {"qkv_format": name} for name in QKV_FORMATS},
    "attn_mask_type": {name: {"attn_mask_type": name} for name in MASKS},
    **{axis.option: {name: {axis.option: value} for name, value in axis.choices.items()} for axis in SCORE_AXES},
    "dtype": {name: {"dtype": name} for name in PRECISE_FIRST},
    "window": {
        "left": {"window_size": (2, -1)},
        "both": {"window_size": (2, 3), "attn_mask_type": "no_mask"},
        "right": {"window_size": (-1, 3), "attn_mask_type": "no_mask"},
    },
    "areas": {"areas": {"areas": ((0, 16, 0, 16, -1, 0), (0, 3, 1, 4, 0, -1)), "qkv_format": "thd"}},
    "lengths": {
        "cross": {"sequences": (Sequence(8, 16, 8, 16),)},
        "padded": {"sequences": (Sequence(3, 5, 8, 16),), "attn_mask_type": "padding"},
        "uneven": {"sequences": (Sequence(13, 13, 13, 13),)},
    },
    "heads": {"grouped": {"heads_q": 4, "heads_kv": 2}},
    "dims": {
        "d_v smaller": {"d_qk": 16, "d_v": 8},
        "d_v larger": {"d_qk": 8, "d_v": 16},
        "odd": {"d_qk": 5, "d_v": 5},
        "grouped, d_v smaller": {"d_qk": 16, "d_v": 8, "heads_q": 4, "heads_kv": 2},
    },
}

# what a case may ask for beyond the problem, as fields of `Case`
WISHES: dict[str, dict[str, Any]] = {
    "return_lse": {"return_lse": True},
    "lse gradient": {"return_lse": True, "loss": "out+lse"},
    "return_max_logit": {"return_max_logit": True},
    "deterministic": {"deterministic": True},
    "alibi": {"alibi": "head"},
}


_DEFAULTS = {f.name: f.default for f in fields(Case)}


@dataclass(frozen=True)
class Capabilities:
    """The choices that an implementation supports on each axis of `AXES`, taken one at a time from a plain problem.

    A combination may still be unsupported: every case asks again. `refused` has the reason of every choice that is not
    there. `hung` names the question that got no answer in time. Its feature and all later ones count as supported.
    """

    choices: dict[str, tuple[str, ...]]
    refused: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    wishes: tuple[str, ...] = ("use_plan", *WISHES)
    hung: str = ""

    def has(self, axis: str, choice: str) -> bool:
        """Whether the choice is supported."""
        return choice in self.choices[axis]


EVERYTHING = Capabilities({axis: tuple(choices) for axis, choices in AXES.items()})


def ask(impl: Any, problem: Problem, device: str = "cpu") -> tuple[bool, str]:
    """The answer of `supports` for a problem: (True, "") or (False, reason). Without a `supports` the problem is
    played.

    Raises:
        Hang: there was no answer in time.
        ValueError: `supports` raised something itself, or its ranks disagree.
    """
    impl = as_implementation(impl)
    if reason := impl.why_not(problem):
        return False, reason
    if not impl.offers("supports"):
        return try_case(impl, Case(problem), device)

    def one_rank(member: Any) -> tuple[bool, str]:
        try:
            cp = context(impl, problem, member)
        except impl.Unsupported as refusal:
            return False, str(refusal)
        supported, reason = impl.supports(cp=cp, **plan_arguments(problem, device))
        return bool(supported), str(reason)

    outcomes = run_ranks(problem.cp_size, one_rank)
    for outcome in outcomes:
        if outcome.error is not None:
            raise ValueError(f"supports raised {describe_error(outcome.error)} for {problem}") from outcome.error
    answers = [o.value for o in outcomes]
    if len({supported for supported, _ in answers}) > 1:
        raise ValueError(f"supports differs between ranks for {problem}: {answers}")
    return answers[0]


def try_case(impl: Any, case: Case, device: str) -> tuple[bool, str]:
    """Whether the case is refused; one that fails otherwise is no refusal, and the tiers will see it. Raises Hang."""
    with watching() as watch:
        try:
            play(impl, case, build(case, device))
        except UnsupportedCase as refusal:
            return False, str(refusal)
    if watch.hung:
        raise Hang(watch.hung[0])
    return True, ""


def variants(base: Problem) -> Iterator[tuple[str, str, Problem]]:
    """(axis, choice, problem) for every choice of every axis, each the base with that one change."""
    for axis, choices in AXES.items():
        for choice, change in choices.items():
            yield axis, choice, replace(base, **change)


def probe(impl: Any, device: str = "cpu") -> Capabilities:
    """Ask for a plain problem that is supported, and from there for every choice.

    Raises:
        ValueError: there is no plain problem that the implementation supports; with its reasons.
    """
    impl = as_implementation(impl)
    questions = (lambda problem: ask(impl, problem, device), lambda case: try_case(impl, case, device))
    return probe_by(*questions, impl.offers("make_plan"), device)


def probe_by(
    asked: Callable[[Problem], tuple[bool, str]], tried: Callable[[Case], tuple[bool, str]], plans: bool, device: str
) -> Capabilities:
    """`probe`, whoever answers: `asked` as `ask`, `tried` as `try_case`; `plans` is whether there is a `make_plan`.
    After the first question that raises Hang no other is asked.
    """
    reasons: set[str] = set()
    hung = ""

    def answer(question: Callable[[Any], tuple[bool, str]], about: Any) -> tuple[bool, str]:
        nonlocal hung
        try:
            return (True, "") if hung else question(about)
        except Hang as hang:
            hung = f"whether it has {about}: {hang}"
            return True, ""

    for comm, layout, dtype, fmt in product(CP_COMM_TYPES, LAYOUTS, AXES["dtype"], QKV_FORMATS):
        comm_fields = AXES["cp_comm_type"][comm] if comm != "p2p" else {}
        base = replace(Problem(2, _SQUARE, layout=layout, dtype=dtype, qkv_format=fmt), **comm_fields)
        supported, reason = answer(asked, base)
        if supported:
            break
        reasons.add(reason)
    else:
        raise ValueError(
            "the implementation supports no plain causal problem on " + device + ":\n" + "\n".join(sorted(reasons))
        )
    choices: dict[str, tuple[str, ...]] = dict.fromkeys(AXES, ())
    refused: dict[str, str] = {}
    for axis, choice, problem in variants(base):
        supported, reason = answer(asked, problem)
        if supported:
            choices[axis] += (choice,)
        else:
            refused[f"{axis} {choice}"] = reason
    wishes = tuple(wish for wish, call in WISHES.items() if answer(tried, Case(base, **call))[0])
    return Capabilities(choices, refused, device, (("use_plan",) if plans else ()) + wishes, hung)


def capabilities_of(impl: Any, device: str) -> Capabilities:
    """The capabilities that `probe` found, asked once of every `Implementation`. If the probe fails, all
    capabilities, so that everything is tried.
    """
    impl = as_implementation(impl)
    if device not in impl.probed:
        try:
            impl.probed[device] = probe(impl, device)
        except ValueError:
            impl.probed[device] = replace(EVERYTHING, device=device)
    return impl.probed[device]


def narrowed(case: Case, capabilities: Capabilities) -> Case:
    """The case without the wishes that the implementation refuses of a plain problem."""
    missing = [wish for wish in ("use_plan", *WISHES) if wish not in capabilities.wishes]
    changes: dict[str, Any] = {wish: _DEFAULTS[wish] for wish in missing if wish != "lse gradient"}
    if "return_lse" in missing or "lse gradient" in missing:
        changes["loss"] = "out"
    return replace(case, **changes)


# ---- a problem in the nearest words
#
# A named problem in the nearest words that an implementation has: a table is to tell something of those with less.


Found = TypeVar("Found")

_WITHOUT_PADDING = {
    "padding": "no_mask",
    "padding_causal": "causal",
    "padding_causal_bottom_right": "causal_bottom_right",
}
_NEAREST = {"float64": ("float64", "float32", "bfloat16"), "float32": ("float32", "bfloat16")}


def adapted(case: Case, capabilities: Capabilities, free: tuple[str, ...] = ()) -> Case:
    """The case without the wishes that are refused of a plain problem, and with other choices on the axes in `free`.

    Args:
        free: fields of the problem that are no part of what is special about it: qkv_format, layout, heads_kv,
            softmax_type. The fields change only where the implementation does not have what is there, and only if the
            problem stays the same otherwise: sequences of several lengths are no batch.

    >>> from conformance.problems.capabilities import EVERYTHING
    >>> from cp_ref.schedules.problem import Sequence
    >>> batch = Capabilities(EVERYTHING.choices | {"qkv_format": ("sbhd",), "layout": ("contiguous",)})
    >>> packed = Case(Problem(2, (Sequence(8, 8, 8, 8),), qkv_format="thd", attn_mask_type="padding_causal"))
    >>> print(adapted(packed, batch, ("qkv_format", "layout")).problem)
    Problem(cp_size=2, sequences=[(8, 8, 8, 8)], layout='contiguous', qkv_format='sbhd')
    """
    p, has = case.problem, capabilities.has
    if "layout" in free and not has("layout", p.layout_name):
        p = replace(p, layout=capabilities.choices["layout"][0])
    if "softmax_type" in free and not has("softmax_type", p.softmax_type):
        p = replace(p, softmax_type="vanilla")
    if "heads_kv" in free and p.heads_q != p.heads_kv and not has("heads", "grouped"):
        p = replace(p, heads_kv=p.heads_q)
    if "qkv_format" in free and not has("qkv_format", p.qkv_format) and not (case.tail_q or case.tail_kv):
        p = next((other for fmt in QKV_FORMATS if has("qkv_format", fmt) and (other := _in_format(p, fmt))), p)
    return narrowed(replace(case, problem=p), capabilities)


def _in_format(p: Problem, qkv_format: str) -> Problem | None:
    """The problem in another format; None where that has no room for it."""
    if qkv_format == "thd":
        return replace(p, qkv_format="thd")
    if len({(s.slots_q, s.slots_kv) for s in p.sequences}) != 1:
        return None
    if any(n % divisor(p.layout, p.cp_size) for n in (p.sequences[0].slots_q, p.sequences[0].slots_kv)):
        return None
    dense = all((s.len_q, s.len_kv) == (s.slots_q, s.slots_kv) for s in p.sequences)
    mask = _WITHOUT_PADDING.get(p.attn_mask_type, p.attn_mask_type) if dense else p.attn_mask_type
    if not dense and not mask.startswith("padding"):
        return None
    return replace(p, qkv_format=qkv_format, attn_mask_type=mask)


def plainer(case: Case, capabilities: Capabilities) -> Iterator[Case]:
    """The case, and what says the same of an implementation that has less: no max_logit, no lse, no float64."""
    dtypes = _NEAREST.get(case.problem.dtype, (case.problem.dtype,))
    for dtype in [d for d in dtypes if capabilities.has("dtype", d)] or dtypes[:1]:
        same = replace(case, problem=replace(case.problem, dtype=dtype))
        yield same
        if case.return_max_logit:
            yield replace(same, return_max_logit=False)
        if case.return_lse:
            yield replace(same, return_max_logit=False, return_lse=False, loss="out")


def judged_plainly(case: Case, capabilities: Capabilities, judge: Callable[[Case], Found]) -> tuple[Case, Found]:
    """The first case of `plainer` that is not refused, and what `judge` says of it.

    Raises:
        UnsupportedCase: all of them are refused; with the reason of the case as it is.
    """
    reason: UnsupportedCase | None = None
    for attempt in plainer(case, capabilities):
        try:
            return attempt, judge(attempt)
        except UnsupportedCase as refusal:
            reason = reason or refusal
    assert reason is not None
    raise reason


def first_of(capabilities: Capabilities, axis: str, preferred: Any) -> str:
    """The preferred choice on an axis, or the first that is there."""
    return preferred if capabilities.has(axis, preferred) else (*capabilities.choices[axis], preferred)[0]
