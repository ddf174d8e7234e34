"""The features that a case exercises, each a choice on an axis, read off the case alone.

`CHOICES` lists them all; `IMPOSSIBLE` has the pairs that no case can have, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple

from conformance.case import LOSSES, PRECISE_FIRST, SCORE_MODS, Case
from cp_ref.schedules.ownership import divisor
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.words import CP_COMM_TYPES, LAYOUTS, MASKS, QKV_FORMATS, SOFTMAX_TYPES

__all__ = [
    "CHOICES",
    "FEATURE_AXES",
    "IMPOSSIBLE",
    "SCORE_AXES",
    "Choice",
    "Impossible",
    "choices_of",
    "distinctive_features",
    "why_impossible",
]

MANY, TINY, HUGE = 32, 16, 256  # "many tiny": 32 sequences of at most 16 tokens; "one huge": at least 256 tokens


class Choice(NamedTuple):
    """A feature: one choice on one axis, such as ("window", "left")."""

    axis: str
    name: str

    def __str__(self) -> str:
        return f"{self.axis}: {self.name}"


class ScoreAxis(NamedTuple):
    """One option of scores, a field of `Problem` and an axis of the capabilities."""

    name: str  # the axis of the features
    option: str
    choices: dict[str, Any]  # choice -> the value in a problem that is made for it; the last one is of any other value
    drawn: tuple[Any, ...]  # the values of random problems, simplest first

    def choice_of(self, value: Any) -> str:
        """The choice that a value is.

        >>> SCORE_AXES[0].choice_of(30.0)
        'on'
        """
        return next((choice for choice, made in self.choices.items() if made == value), list(self.choices)[-1])

    def read(self, case: Case) -> str:
        """The choice of a case."""
        return self.choice_of(getattr(case.problem, self.option))


SCORE_AXES = (
    ScoreAxis("softcap", "softcap", {"off": 0.0, "on": 2.5}, (0.0, 0.0, 2.5, 30.0)),
    ScoreAxis("softmax", "softmax_type", {name: name for name in SOFTMAX_TYPES}, SOFTMAX_TYPES),
    ScoreAxis("score_mod", "score_mod", {"none": "", "some": "near"}, ("", *SCORE_MODS)),
    ScoreAxis("dropout", "dropout_p", {"none": 0.0, "some": 0.25}, (0.0, 0.0, 0.5, 0.9)),
)


def _lengths(case: Case) -> Iterator[str]:
    p = case.problem
    lengths = [n for s in p.sequences for n in (s.len_q, s.len_kv)]
    cut = divisor(p.layout, p.cp_size)
    slots = p.lengths.slots_q, p.lengths.slots_kv
    whole = p.layout == "contiguous" and p.qkv_format == "thd"
    kinds = {
        "no sequences": not p.sequences,
        "0 tokens": 0 in lengths,
        "1 token": 1 in lengths,
        "chunk edge": any(_at_an_edge(s, cut) for s in p.sequences),
        "many tiny": len(p.sequences) >= MANY and sorted(lengths)[2 * MANY - 1] <= TINY,
        "one huge": max(lengths, default=0) >= HUGE,
        "cross": any(s.len_q != s.len_kv for s in p.sequences),
        "different": len(set(p.sequences)) > 1,
        "uneven": any(n % cut for side in slots for n in ([sum(side)] if whole else side)),
        "padding": any(s.len_q < s.slots_q or s.len_kv < s.slots_kv for s in p.sequences),
        "tail": bool(case.tail_q or case.tail_kv),
    }
    yield from (name for name, there in kinds.items() if there)
    if not any(kinds.values()):
        yield "plain"


def _at_an_edge(s: Sequence, cut: int) -> bool:
    """Whether a length is a chunk's border, or one token less or more; chunks of at least 3 tokens count."""
    sides = ((s.len_q, s.slots_q // cut), (s.len_kv, s.slots_kv // cut))
    return any(chunk >= 3 and n > 1 and (n + 1) % chunk <= 2 and n != chunk * cut for n, chunk in sides)


def _heads(p: Problem) -> Iterator[str]:
    yield "MHA" if p.heads_q == p.heads_kv else "MQA" if p.heads_kv == 1 else "GQA"
    if p.heads_kv < p.a2a_size:
        yield "kv < a2a size"


def _dims(p: Problem) -> Iterator[str]:
    yield "equal" if p.d_qk == p.d_v else "d_v smaller" if p.d_v < p.d_qk else "d_v larger"
    if (name := f"{p.d_qk}/{p.d_v}") in _OF_MODELS:
        yield name
    if p.d_qk % 8 or p.d_v % 8:
        yield "not of 8"
    elif p.d_qk % 16 or p.d_v % 16:
        yield "odd of 8"
    if max(p.d_qk, p.d_v) > 128:
        yield "over 128"


def _window(p: Problem) -> Iterable[str]:
    if p.areas is not None:
        return ()
    left, right = p.window_size[0] >= 0, p.window_size[1] >= 0 and not p.causal
    return ("both" if left and right else "left" if left else "right" if right else "none",)


def _split(p: Problem) -> str:
    if p.cp_comm_type != "a2a+p2p":
        return "not split"
    return "all ring" if p.a2a_size == 1 else "all a2a" if p.a2a_size == p.cp_size else "both"


def _grads(case: Case) -> tuple[str, ...]:
    letters = case.wanted.replace("o", "")
    alone = "offset alone" if "o" in case.wanted else "none"
    names = {"qkv": "q, k, v", "q": "q alone", "k": "k alone", "v": "v alone", "kv": "k, v", "": alone}
    return (names[letters],) if letters in names else ()


def _results(case: Case) -> Iterator[str]:
    yield from ("lse",) * case.return_lse + ("max_logit",) * case.return_max_logit
    if not (case.return_lse or case.return_max_logit):
        yield "out alone"


_SLOPES = {"": "none", "head": "per head", "document": "per document"}
_SIZES = ("1", "2", "3", "4", "5", "6", "8")
_OF_MODELS = ("64/64", "96/96", "128/128", "256/256", "192/128", "128/192")  # d_qk/d_v
_LENGTHS = (
    *("plain", "no sequences", "0 tokens", "1 token", "chunk edge", "many tiny", "one huge"),
    *("cross", "different", "uneven", "padding", "tail"),
)

# axis -> its choices, and those of a case: one, several, or none (a group size of 16)
FEATURE_AXES: dict[str, tuple[tuple[str, ...], Callable[[Case], str | Iterable[str]]]] = {
    "schedule": (CP_COMM_TYPES, lambda c: c.problem.cp_comm_type),
    "format": (QKV_FORMATS, lambda c: c.problem.qkv_format),
    "mask": ((*MASKS, "areas"), lambda c: "areas" if c.problem.areas is not None else c.problem.attn_mask_type),
    "window": (("none", "left", "right", "both"), lambda c: _window(c.problem)),
    "lengths": (_LENGTHS, _lengths),
    "layout": (LAYOUTS, lambda c: c.problem.layout_name),
    "cp_size": (_SIZES, lambda c: {str(c.problem.cp_size)} & set(_SIZES)),
    "a2a split": (("not split", "all ring", "both", "all a2a"), lambda c: _split(c.problem)),
    "heads": (("MHA", "GQA", "MQA", "kv < a2a size"), lambda c: _heads(c.problem)),
    "dims": (
        ("equal", "d_v smaller", "d_v larger", "odd of 8", "not of 8", "over 128", *_OF_MODELS),
        lambda c: _dims(c.problem),
    ),
    **{axis.name: (tuple(axis.choices), axis.read) for axis in SCORE_AXES},
    "ALiBi": (("none", "per head", "per document"), lambda c: _SLOPES[c.alibi]),
    "dtype": (PRECISE_FIRST, lambda c: c.problem.dtype),
    "strides": (("plain", "odd"), lambda c: "odd" if c.strided else "plain"),
    "results": (("out alone", "lse", "max_logit"), _results),
    "loss": (LOSSES, lambda c: c.loss),
    "gradients": (
        ("q, k, v", "q alone", "k alone", "v alone", "k, v", "offset alone", "none"),
        _grads,
    ),
    "plan": (("without", "with"), lambda c: "with" if c.use_plan else "without"),
    "deterministic": (("no", "yes"), lambda c: "yes" if c.deterministic else "no"),
}

CHOICES: tuple[Choice, ...] = tuple(Choice(axis, name) for axis, (names, _) in FEATURE_AXES.items() for name in names)


class Impossible(NamedTuple):
    """No case has one of `choices` together with one of `other_choices`, because of `reason`."""

    axis: str
    choices: tuple[str, ...]
    other: str
    other_choices: tuple[str, ...]
    reason: str


_CAUSAL = tuple(mask for mask in MASKS if "causal" in mask)
_KV_FEWER = ("kv < a2a size",)

IMPOSSIBLE: tuple[Impossible, ...] = (
    Impossible("mask", ("areas",), "window", ("none", "left", "right", "both"), "areas have windows of their own"),
    Impossible("mask", ("areas",), "format", ("bshd", "sbhd"), "areas are rows of packed buffers"),
    Impossible("mask", ("areas",), "lengths", ("many tiny", "one huge"), "areas are drawn in few rows"),
    Impossible("mask", _CAUSAL, "window", ("right", "both"), "a causal mask sets the window's right side to 0"),
    Impossible("layout", ("balanced",), "lengths", ("cross",), "balanced is for self-attention"),
    Impossible("format", ("bshd", "sbhd"), "lengths", ("tail",), "only a thd buffer is longer than its sequences"),
    Impossible(
        "format", ("bshd", "sbhd"), "lengths", ("no sequences",), "a batch has its length from its first sequence"
    ),
    Impossible(
        "schedule",
        ("p2p", "all_gather", "a2a"),
        "a2a split",
        ("all ring", "both", "all a2a"),
        "only a2a+p2p splits the group",
    ),
    Impossible("schedule", ("a2a+p2p",), "a2a split", ("not split",), "a2a+p2p splits the group"),
    Impossible("cp_size", ("1", "2", "3", "5"), "a2a split", ("both",), "the group size has no divisor to split by"),
    Impossible("cp_size", ("1",), "a2a split", ("all a2a",), "one rank alone counts as all ring"),
    Impossible("cp_size", ("1",), "heads", _KV_FEWER, "there is no a2a"),
    Impossible("schedule", ("p2p", "all_gather"), "heads", _KV_FEWER, "there is no a2a"),
    Impossible("a2a split", ("all ring",), "heads", _KV_FEWER, "there is no a2a"),
    Impossible(
        "softmax", ("vanilla", "off-by-one"), "gradients", ("offset alone",), "only learnable has an offset to learn"
    ),
    Impossible("loss", ("lse", "out+lse"), "results", ("out alone",), "a loss of lse needs lse returned"),
)


@lru_cache(maxsize=1)
def _impossible() -> dict[frozenset[Choice], str]:
    return {
        frozenset((Choice(rule.axis, name), Choice(rule.other, other))): rule.reason
        for rule in IMPOSSIBLE
        for name in rule.choices
        for other in rule.other_choices
    }


def choices_of(case: Case) -> tuple[Choice, ...]:
    """The features that a case exercises, in the order of `CHOICES`.

    >>> case = Case(Problem(2, (Sequence(4, 8, 4, 8),), window_size=(2, -1)))
    >>> [c.name for c in choices_of(case) if c.axis in ("schedule", "window", "lengths")]
    ['p2p', 'left', 'cross']
    """
    found = []
    for axis, (_, read) in FEATURE_AXES.items():
        names = read(case)
        found += [Choice(axis, name) for name in ((names,) if isinstance(names, str) else names)]
    return tuple(found)


def why_impossible(a: Choice, b: Choice) -> str:
    """Why no case can have both features, or "".

    >>> why_impossible(Choice("window", "right"), Choice("mask", "causal"))
    "a causal mask sets the window's right side to 0"
    """
    return _impossible().get(frozenset((a, b)), "")


# ---- what a smallest failing problem is explained on
#
# The features of a problem, as words: what a smallest failing problem is explained on.
#
# When a failure has been shrunk, whatever it still has beyond the plainest problem is taken to be needed for it. Later
# draws skip problems with all these features, so another failure can appear.


_NUMBERS = {"seed", "magnitude", "sequences", "a2a_size", "repeat", "slots", "real", "rank", "dims", "heads", "choices"}


def distinctive_features(problem: Any) -> frozenset[str]:
    """The features of a problem beyond the plainest one of its kind; and its dtype, which each tier chooses.

    >>> from cp_ref.schedules.problem import Sequence
    >>> p = Problem(2, (Sequence(3, 5, 3, 5),), softmax_scale=2.0, window_size=(1, -1))
    >>> sorted(distinctive_features(Case(p, use_plan=True)))
    ['cross', 'dtype float32', 'softmax_scale', 'use_plan', 'window left']
    """
    if isinstance(problem, Case):
        dtype = {f"dtype {problem.problem.dtype}"}
        return frozenset(_of_problem(problem.problem) | _differing(problem, {"problem"}) | dtype)
    return frozenset(_differing(problem, {"name"}))


def _of_problem(p: Problem) -> set[str]:
    found = _differing(p, {"cp_size", "window_size", "heads_q", "heads_kv", "d_qk", "d_v", "dtype"})
    found |= {f"cp_size {p.cp_size}"} if p.cp_size > 2 else set()
    left, right = p.window_size
    found |= {"window left"} if left >= 0 else set()
    found |= {"window right"} if right >= 0 and not p.causal else set()
    found |= {"grouped heads"} if p.heads_q != p.heads_kv else set()
    found |= {"several heads"} if p.heads_kv > 1 else set()
    found |= {"d_qk != d_v"} if p.d_qk != p.d_v else set()
    found |= {"several sequences"} if len(p.sequences) > 1 else set()
    found |= {"cross"} if any(s.len_q != s.len_kv for s in p.sequences) else set()
    found |= {"padding"} if any((s.len_q, s.len_kv) != (s.slots_q, s.slots_kv) for s in p.sequences) else set()
    found |= {"empty sequence"} if any(not s.len_q or not s.len_kv for s in p.sequences) else set()
    return found


def _differing(thing: Any, without: set[str]) -> set[str]:
    """Fields that differ from their defaults: the name of a flag or number, and a choice with its name."""
    found = set()
    for f in fields(thing):
        value = getattr(thing, f.name)
        if f.name not in without | _NUMBERS and value != f.default:
            found.add(f"{f.name} {value}" if isinstance(value, str) else f.name)
    return found
