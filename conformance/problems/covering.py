"""Cases that together have every possible pair of features, and every triple of schedule, format and mask.

Random problems leave out a fifth of the pairs, and many bugs need two features at once. So each case here is made for
a missing pair. The generator makes some random cases with the pair, and keeps the one that adds most missing pairs. It
reads the features off the finished case (`conformance.problems.features`), because not every assignment is possible.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product

from conformance.case import Case
from conformance.problems.capabilities import Capabilities, narrowed
from conformance.problems.features import CHOICES, FEATURE_AXES, SCORE_AXES, Choice, choices_of, why_impossible
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.problem import Sequence as Lengths

__all__ = ["covering", "goals_of"]

_CANDIDATES = 24  # assignments tried for each goal
_TRIPLE = ("schedule", "format", "mask")

Assignment = dict[str, str]  # axis -> choice
Goal = frozenset[Choice]

# axis of the features -> axis of the capabilities
_ASKED = {
    "schedule": "cp_comm_type",
    "layout": "layout",
    "format": "qkv_format",
    "mask": "attn_mask_type",
    "dtype": "dtype",
    "window": "window",
    **{axis.name: axis.option for axis in SCORE_AXES},
}
_WINDOWS = {"none": (-1, -1), "left": (3, -1), "right": (-1, 2), "both": (3, 2)}
_DIMS = {"equal": (8, 8), "d_v smaller": (16, 8), "d_v larger": (8, 16), "odd of 8": (24, 24), "not of 8": (5, 5),
         "over 128": (136, 136)}  # fmt: skip
_GRADS = {"q, k, v": "qkvo", "q alone": "q", "k alone": "k", "v alone": "v", "k, v": "kv", "offset alone": "o"}


def covering(capabilities: Capabilities, cp_sizes: Sequence[int]) -> Iterator[Case]:
    """The cases, the same ones every time; of what the implementation has, on groups of these sizes."""
    choices = _choices(capabilities, cp_sizes)
    missing, rng = goals_of(choices), random.Random(0)
    for goal in sorted(missing, key=lambda goal: (-len(goal), sorted(goal))):
        if goal not in missing:
            continue
        best, brings = None, frozenset[Goal]()
        for _ in range(_CANDIDATES):
            case = _case(_fill(goal, choices, rng), capabilities)
            if case is None:
                continue
            found = missing & _goals_in(choices_of(case))
            if goal in found and len(found) > len(brings):
                best, brings = case, found
        if best is not None:
            missing -= brings
            yield best


def goals_of(choices: dict[str, list[str]]) -> set[Goal]:
    """All pairs of choices on two axes that are not impossible, and the triples of schedule, format and mask."""
    every = [choice for choice in CHOICES if choice.name in choices[choice.axis]]
    pairs = {frozenset((a, b)) for a, b in combinations(every, 2) if a.axis != b.axis and not why_impossible(a, b)}
    triples = product(*([Choice(axis, name) for name in choices[axis]] for axis in _TRIPLE))
    possible = (t for t in triples if not any(why_impossible(a, b) for a, b in combinations(t, 2)))
    return pairs | {frozenset(triple) for triple in possible}


def _goals_in(found: tuple[Choice, ...]) -> set[Goal]:
    pairs = {frozenset(pair) for pair in combinations(found, 2)}
    return pairs | {frozenset(choice for choice in found if choice.axis in _TRIPLE)}


def _choices(capabilities: Capabilities, cp_sizes: Sequence[int]) -> dict[str, list[str]]:
    """The choices on every axis that are worth asking for."""
    has, wishes = capabilities.has, capabilities.wishes
    wished = {axis: list(names) for axis, (names, _) in FEATURE_AXES.items()}
    for axis, asked in _ASKED.items():
        wished[axis] = [name for name in wished[axis] if name in ("none", "areas") or has(asked, name)]
    without = {
        "mask": set() if has("areas", "areas") else {"areas"},
        "lengths": {name for name in ("cross", "uneven") if not has("lengths", name)},
        "heads": set() if has("heads", "grouped") else {"GQA", "MQA", "kv < a2a size"},
        "dims": {name for name, needs in (("d_v smaller", "d_v smaller"), ("192/128", "d_v smaller"),
                 ("d_v larger", "d_v larger"), ("128/192", "d_v larger"), ("not of 8", "odd"))
                 if not has("dims", needs)},
        "results": {name for name in ("lse", "max_logit") if f"return_{name}" not in wishes},
        "loss": set() if "lse gradient" in wishes else {"lse", "out+lse"},
        "ALiBi": set() if "alibi" in wishes else {"per head", "per document"},
        "plan": set() if "use_plan" in wishes else {"with"},
        "deterministic": set() if "deterministic" in wishes else {"yes"},
        "cp_size": {name for name in wished["cp_size"] if int(name) not in cp_sizes},
    }  # fmt: skip
    return {axis: [name for name in names if name not in without.get(axis, ())] for axis, names in wished.items()}


def _fill(goal: Goal, choices: dict[str, list[str]], rng: random.Random) -> Assignment:
    """The goal, and a choice on every other axis that is not known to be impossible with those taken."""
    taken = list(goal)
    for axis in rng.sample(list(choices), len(choices)):
        if axis not in {choice.axis for choice in taken}:
            possible = [Choice(axis, name) for name in choices[axis]]
            possible = [c for c in possible if not any(why_impossible(c, other) for other in taken)]
            taken += [rng.choice(possible)] if possible else []
    return {choice.axis: choice.name for choice in taken}


def _case(a: Assignment, capabilities: Capabilities) -> Case | None:
    """The case of an assignment. None if it has no case, or if the implementation is not asked for it."""
    with_areas = a["mask"] == "areas"  # areas bring their windows
    if a.keys() | ({"window"} if with_areas else set()) != FEATURE_AXES.keys():
        return None
    cp_size = int(a["cp_size"])
    inner = {"not split": cp_size if a["schedule"] == "a2a" else 1, "all ring": 1, "all a2a": cp_size}.get(
        a["a2a split"]
    )
    inner = inner or max((n for n in range(2, cp_size) if cp_size % n == 0), default=0)
    heads = {"MHA": (inner, inner), "GQA": (4 * inner, 2 * inner), "MQA": (2 * inner, 1), "kv < a2a size": (inner, 1)}
    d_qk, _, d_v = a["dims"].partition("/")
    loss, packed = a["loss"], a["format"] == "thd"
    real = packed or a["mask"].startswith("padding")
    if a["layout"] == "balanced" and not real:
        return None
    sequences = _LENGTHS[a["lengths"]](2 * cp_size, real)
    try:
        problem = Problem(
            cp_size,
            sequences,
            cp_comm_type=a["schedule"],
            a2a_size=inner,
            layout=a["layout"],
            qkv_format=a["format"],
            attn_mask_type="causal" if with_areas else a["mask"],
            window_size=(-1, -1) if with_areas else _WINDOWS[a["window"]],
            areas=_causal_areas(sequences) if with_areas else None,
            heads_q=heads[a["heads"]][0],
            heads_kv=heads[a["heads"]][1],
            d_qk=int(d_qk) if d_v else _DIMS[a["dims"]][0],
            d_v=int(d_v) if d_v else _DIMS[a["dims"]][1],
            dtype=a["dtype"],
            **{axis.option: axis.choices[a[axis.name]] for axis in SCORE_AXES},
        )
        case = Case(
            problem,
            tail_q=cp_size if a["lengths"] == "tail" else 0,
            tail_kv=2 * cp_size if a["lengths"] == "tail" else 0,
            return_lse=a["results"] == "lse" or "lse" in loss,
            return_max_logit=a["results"] == "max_logit",
            loss=loss,
            grads=_GRADS.get(a["gradients"], ""),
            strided=a["strides"] == "odd",
            use_plan=a["plan"] == "with",
            deterministic=a["deterministic"] == "yes",
            alibi={"per head": "head", "per document": "document"}.get(a["ALiBi"], ""),
        )
    except ValueError:
        return None
    return case if narrowed(case, capabilities) == case else None


def _causal_areas(sequences: tuple[Lengths, ...]) -> tuple[tuple[int, int, int, int, int, int], ...]:
    """One for each sequence, padding included: (q start, q stop, k start, k stop, left, right)."""
    found, row, key = [], 0, 0
    for s in sequences:
        if s.slots_q and s.slots_kv:
            found.append((row, row + s.slots_q, key, key + s.slots_kv, -1, 0))
        row, key = row + s.slots_q, key + s.slots_kv
    return tuple(found)


def _same(slots: int, slots_kv: int | None = None, times: int = 2) -> tuple[Lengths, ...]:
    """Sequences without padding."""
    kv = slots if slots_kv is None else slots_kv
    return (Lengths(slots, kv, slots, kv),) * times


def _real(slots: int, real: bool, *lengths: int) -> tuple[Lengths, ...]:
    """Sequences of these lengths. Without padding, the length is the number of slots."""
    return tuple(Lengths(n, n, slots, slots) if real else Lengths(slots, slots, slots, slots) for n in lengths)


# (slots of one unit that every layout can cut, whether padding is allowed) -> the sequences
_LENGTHS: dict[str, Callable[[int, bool], tuple[Lengths, ...]]] = {
    "plain": lambda unit, real: _same(2 * unit),
    "no sequences": lambda unit, real: (),
    "0 tokens": lambda unit, real: _real(unit, real, 0, unit) if real else _same(0),
    "1 token": lambda unit, real: _real(unit, real, 1, unit),
    "chunk edge": lambda unit, real: _real(3 * unit, real, 5, 3 * unit),
    "many tiny": lambda unit, real: _real(unit, real, *[3, unit] * 16) if real else _same(unit, times=32),
    "one huge": lambda unit, real: _same(-(-256 // unit) * unit, times=1),
    "cross": lambda unit, real: _same(unit, 2 * unit),
    "different": lambda unit, real: _real(2 * unit, real, unit, 2 * unit),
    "uneven": lambda unit, real: _same(2 * unit + 1),
    "padding": lambda unit, real: _real(2 * unit, real, unit + 1, unit + 1),
    "tail": lambda unit, real: _same(unit),
}
