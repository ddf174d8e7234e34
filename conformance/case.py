"""A case: one attention call as data. Its text is what a failure prints, and what `--repro` plays again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, get_args, get_type_hints

import torch

from cp_ref.problems.arguments import OF_PLACES, SCORE_OPTIONS
from cp_ref.problems.call_checks import local_lengths
from cp_ref.problems.read_problem import DTYPES, check_one_document
from cp_ref.schedules.problem import Problem, slice_rows
from cp_ref.schedules.values import MOST_RANKS, check_choice, parse_call
from cp_ref.schedules.words import CP_COMM_TYPES, LAYOUTS, MASKS, QKV_FORMATS, SOFTMAX_TYPES

__all__ = [
    "ALIBI",
    "BY_DOCUMENT",
    "GRADS",
    "LOSSES",
    "PRECISE_FIRST",
    "SCORE_MODS",
    "Case",
    "aux_tensors",
    "check_counts",
    "check_types",
    "dtype_of",
    "score_features",
    "score_mod_of",
    "text_of",
    "wide_dtype",
]


PRECISE_FIRST = DTYPES[::-1]


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of this name."""
    return getattr(torch, name)


def text_of(record: Any, *first: object) -> str:
    """A record as one line: words for its first fields, then every other field that is not its default.

    >>> text_of(Case(Problem(2, ()), seed=3), "problem")
    'Case(problem, seed=3)'
    """
    rest = fields(record)[len(first) :]
    words = [*map(str, first), *(f"{f.name}={v!r}" for f in rest if (v := getattr(record, f.name)) != f.default)]
    return f"{type(record).__name__}({', '.join(words)})".replace("'", '"')  # A shell's '...' holds it.


def check_types(record: Any) -> None:
    """Raise ValueError for a field that is not of its type, so that a mistyped text does not replay something else. A
    float may be an integer.
    """
    for name, kind in _types(type(record)).items():
        value = getattr(record, name)
        if not isinstance(value, kind) and not (type(value) is int and float in (kind, *get_args(kind))):
            words = getattr(kind, "__name__", str(kind))
            raise ValueError(f"{name} is {value!r}; it must be of type {words}")


@cache
def _types(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def check_counts(record: Any, names: Iterable[str]) -> None:
    """Raise ValueError for a field that is no positive integer."""
    for name in names:
        if type(value := getattr(record, name)) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a positive integer")


def wide_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype of sums and LSEs: float64 for float64, and float32 for all others."""
    return torch.float64 if dtype in ("float64", torch.float64) else torch.float32


# ---- score_mods by name
#
# A fixed list of score_mods by name, so that a case is text. Each is one way in which scores may depend on places.
#
# near          on the distance of query and key, with another slope beyond it
# by_key        on a captured vector, by the key's position
# capped        on the score alone
# by_document   on the number of the document
# by_head       on the head
# hidden        hides pairs by all four places: a mask that counting inputs can see exactly


Tensor = torch.Tensor


def near(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Keys 4 and more positions away have half the score, less 1."""
    return torch.where(torch.abs(q_idx - kv_idx) < 4, score, score * 0.5 - 1.0)


def by_key(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, bias: Tensor) -> Tensor:
    """bias [positions] of the key is added."""
    return score + bias[kv_idx]


def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """3 tanh(s / 3)."""
    return 3.0 * torch.tanh(score / 3.0)


def by_document(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, factor: Tensor) -> Tensor:
    """Scores times factor [documents]."""
    return score * factor[b]


def by_head(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, factor: Tensor) -> Tensor:
    """Scores times factor [heads]."""
    return score * factor[h]


def hidden(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, rows: Tensor, keys: Tensor, heads: Tensor,
    documents: Tensor,
) -> Tensor:  # fmt: skip
    """Pairs for which the numbers of their four places add up to 0 or more are hidden."""
    total = rows[q_idx] + keys[kv_idx] + heads[h] + documents[b]
    return torch.where(total < 0.0, score, float("-inf"))


SCORE_MODS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function for function in (near, by_key, capped, by_document, by_head, hidden)
}
BY_DOCUMENT = ("by_document", "hidden")  # Their result depends on the document's number.


def score_mod_of(problem: Problem) -> Callable[..., Tensor] | None:
    """The function that the problem of a case names; None for none."""
    return SCORE_MODS[problem.score_mod] if problem.score_mod else None


def score_features(problem: Problem, alibi: str = "") -> tuple[str, ...]:
    """The parameters of `attention` that a problem needs for its scores.

    >>> score_features(Problem(1, (), dropout_p=0.5), "head")
    ('alibi_slopes', 'dropout_p')
    """
    return *(["alibi_slopes"] if alibi else []), *(n for n, none in OF_PLACES.items() if getattr(problem, n) != none)


# score_mod -> its captured tensors: the meaning of their one axis, and the smallest and largest value.
_AUX: dict[str, dict[str, tuple[str, float, float]]] = {
    "by_key": {"bias": ("position", -1.0, 0.75)},
    "by_document": {"factor": ("document", 0.5, 1.375)},
    "by_head": {"factor": ("head", 0.5, 1.375)},
    "hidden": {
        "rows": ("position", -1.0, 0.75),
        "keys": ("position", -1.0, 0.75),
        "heads": ("head", -0.5, 0.375),
        "documents": ("document", -0.5, 0.375),
    },
}


def aux_tensors(problem: Problem, device: str | torch.device = "cpu") -> dict[str, Tensor] | None:
    """The tensors that the problem's score_mod takes by name: float32, multiples of 1/8; None without any.

    >>> from cp_ref.schedules.problem import Sequence
    >>> aux_tensors(Problem(1, (Sequence(3, 3, 3, 3),), heads_q=4, score_mod="by_head"))
    {'factor': tensor([1.0000, 0.6250, 1.2500, 0.8750])}
    """
    if problem.score_mod not in _AUX:
        return None
    positions = max((max(s.slots_q, s.slots_kv) for s in problem.sequences), default=0)
    counts = {"position": positions, "document": len(problem.sequences), "head": problem.heads_q}
    made = enumerate(_AUX[problem.score_mod].items())
    return {name: _values(counts[axis], low, high, n).to(device) for n, (name, (axis, low, high)) in made}


def _values(count: int, low: float, high: float, salt: int) -> Tensor:
    """[count], at least one: eight values from low to high, in an order that looks random."""
    n = torch.arange(1, max(1, count) + 1, dtype=torch.int64) + 1000 * salt
    return low + (n * 2654435761 % 2**32 >> 29) * ((high - low) / 7)


# ---- cases


_CHOICES = {
    "cp_comm_type": (*CP_COMM_TYPES, "auto"),  # A context that chooses: no tier draws it.
    "layout": LAYOUTS,
    "qkv_format": QKV_FORMATS,
    "attn_mask_type": MASKS,
    "softmax_type": SOFTMAX_TYPES,
    "dtype": PRECISE_FIRST,
}

LOSSES = ("out", "lse", "out+lse")
ALIBI = ("", "head", "document")
GRADS = ("qkvo", "q", "k", "v", "kv", "qo", "o", "")


@dataclass(frozen=True)
class Case:
    """A problem, and everything else that a call of `attention` and its backward pass depend on.

    `seed` and `magnitude` make the tensors (see `conformance.tensors`): standard normal values, q and k times
    `magnitude`. The problem's `score_mod` is a name in `conformance.case.SCORE_MODS`, not a digest.

    A tail that makes each slice as long as all sequences together becomes one row a slice longer, since `attention`
    refuses it: such lengths are nearly always those of one rank's slices, given by mistake.

    >>> from cp_ref.schedules.problem import Sequence
    >>> case = Case(Problem(2, (Sequence(8, 8, 8, 8),), qkv_format="thd"), tail_q=4, seed=3)
    >>> print(case)
    Case(Problem(cp_size=2, sequences=[(8, 8, 8, 8)], qkv_format="thd"), tail_q=4, seed=3)
    >>> Case.parse(str(case)) == case
    True
    """

    begins: ClassVar[str] = "Case("
    problem: Problem
    tail_q: int = 0  # Slots after the last sequence, over all ranks; thd only, a multiple of cp_size.
    tail_kv: int = 0
    seed: int = 0
    magnitude: float = 1.0
    return_lse: bool = False
    return_max_logit: bool = False
    loss: str = "out"  # The results with upstream gradients: one of LOSSES.
    grads: str = "qkvo"  # The inputs that require a gradient, of q, k, v and the softmax offset.
    strided: bool = False  # Make q, k, v and dout views with odd strides into larger, NaN-filled buffers.
    use_plan: bool = False  # First make_plan, then attention(..., plan=plan).
    deterministic: bool = False
    alibi: str = ""  # One of ALIBI: slopes [h_q], or [b, h_q].

    def __post_init__(self) -> None:
        """Refuse what no call can mean, so that a mistyped text does not replay something else."""
        _check_meaning(self.problem)
        check_types(self)
        cp_size = self.problem.cp_size
        for side in ("q", "kv"):
            name, tail = f"tail_{side}", self.tail(side)
            if tail < 0 or tail % cp_size or (tail and self.problem.qkv_format != "thd"):
                raise ValueError(f"{name} is {tail}; it must be a multiple of cp_size = {cp_size}, and 0 outside thd")
            if tail and _looks_local(self.problem, side, self.rows(side)):
                object.__setattr__(self, name, tail + cp_size)
        if self.loss not in LOSSES:
            raise ValueError(f"loss is {self.loss!r}; it must be one of {LOSSES}")
        if "lse" in self.loss and not self.return_lse:
            raise ValueError(f"loss is {self.loss!r}, which needs return_lse=True")
        check_choice("alibi", self.alibi, ALIBI)
        if self.alibi:
            check_one_document(self.problem, "alibi")
        if not set(self.grads) <= set("qkvo"):
            raise ValueError(f"grads is {self.grads!r}; it must be some of the letters q, k, v and o")

    @property
    def cases(self) -> tuple[Case, ...]:
        """Itself: what every kind of problem says (`conformance.problems.problem`)."""
        return (self,)

    @property
    def wanted(self) -> str:
        """The letters of `grads` that this problem has: "o" (softmax_offset) only with softmax_type "learnable"."""
        return self.grads if self.problem.softmax_type == "learnable" else self.grads.replace("o", "")

    @property
    def wishes(self) -> dict[str, bool]:
        """The options beyond the problem: arguments of `attention`, `make_plan` and `supports`."""
        return {name: True for name in ("deterministic", "return_lse", "return_max_logit") if getattr(self, name)}

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results that a call gives."""
        asked = {"out": True, "lse": self.return_lse, "max_logit": self.return_max_logit}
        names = {"q": "dq", "k": "dk", "v": "dv", "o": "d_offset"}
        return tuple(name for name, wanted in asked.items() if wanted) + tuple(names[letter] for letter in self.wanted)

    def tail(self, side: str) -> int:
        """`tail_q` or `tail_kv`; `side` is "q" or "kv"."""
        return self.tail_q if side == "q" else self.tail_kv

    def rows(self, side: str) -> int:
        """How many slots of the packed buffer there are, with the tail."""
        return self.problem.starts(side)[-1] + self.tail(side)

    def __str__(self) -> str:
        """One line that `parse` reads back: the problem, and every other field that differs from its default."""
        return text_of(self, self.problem)

    @staticmethod
    def parse(text: str) -> Case:
        """The case that `str` printed. Raises ValueError on anything else."""
        try:
            _, problems, words = parse_call(text, ["Case"])
            (problem,) = problems
            return Case(Problem.parse(str(problem)), **words)
        except (TypeError, ValueError) as error:
            raise ValueError(f"cannot read a case from {text!r}: {error}") from error


def _looks_local(p: Problem, side: str, rows: int) -> bool:
    """Whether the lengths look like those of one rank's slices, if all slices together have this many rows."""
    return local_lengths(p, side, max(slice_rows(p, side), -(-rows // p.cp_size)))


def _check_meaning(p: Problem) -> None:
    """Raise ValueError for a problem that no call can have; whether an implementation has it is another question."""
    for name, choices in _CHOICES.items():
        if name != "layout" or isinstance(p.layout, str):  # A layout may be a table of ownership.
            check_choice(name, getattr(p, name), choices)
    check_counts(p, ("cp_size", "a2a_size", "heads_q", "heads_kv", "d_qk", "d_v"))
    if p.cp_size > MOST_RANKS:
        raise ValueError(f"cp_size is {p.cp_size}; it must be at most {MOST_RANKS}")
    whole = {"a2a": p.cp_size, "a2a+p2p": p.a2a_size}.get(p.cp_comm_type, 1)
    if p.a2a_size != whole or p.cp_size % p.a2a_size:
        rule = "a divisor of cp_size" if p.cp_comm_type == "a2a+p2p" else f"{whole} for {p.cp_comm_type!r}"
        raise ValueError(f"a2a_size is {p.a2a_size}; it must be {rule}")
    window = p.window_size
    if not isinstance(window, tuple) or len(window) != 2 or any(type(n) is not int or n < -1 for n in window):
        raise ValueError(f"window_size is {window!r}; it must be (left, right), integers of -1 and more")
    check_choice("score_mod", p.score_mod, ("", *SCORE_MODS))
    SCORE_OPTIONS["dropout_p"]("dropout_p", p.dropout_p)
    packed, padded = p.qkv_format == "thd", p.attn_mask_type.startswith("padding")
    for n, s in enumerate(p.sequences):
        numbers = (s.len_q, s.len_kv, s.slots_q, s.slots_kv)
        if any(type(x) is not int or x < 0 for x in numbers) or s.len_q > s.slots_q or s.len_kv > s.slots_kv:
            raise ValueError(f"sequence {n} is {numbers}; it must be (len_q, len_kv, slots_q, slots_kv), len <= slots")
        if not packed and not padded and numbers[:2] != numbers[2:]:
            raise ValueError(f"sequence {n} is {numbers}: it has padding, which {p.qkv_format} has in padding masks")
        if not packed and numbers[2:] != (p.sequences[0].slots_q, p.sequences[0].slots_kv):
            raise ValueError(f"sequence {n} is {numbers}; all of {p.qkv_format} must have as many slots as the first")
    for name in score_features(p):
        check_one_document(p, name)
