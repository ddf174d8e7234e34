"""Random problems whose scores depend on positions: a case of `conformance`, and ALiBi, a score_mod, dropout."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from hypothesis import strategies as st

from conformance.case import Case
from conformance.checks import reference
from conformance.checks.values import check_logic
from conformance.problems.strategies import cases
from cp_ref import dense_attention
from cp_ref.problems.read_problem import check_one_document
from cp_ref.schedules.problem import Problem, Sequence
from tests.marks import HANGS_S

__all__ = ["KINDS", "SCORE_MODS", "Scores", "check", "scored_cases", "slopes_and_tables"]

KINDS = ("alibi", "score_mod", "dropout", "all")


def biased_by_head(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, by_head: Any) -> Any:
    return 0.5 * score + torch.tanh(score) * by_head[h]


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, by_distance: Any) -> Any:
    return score + by_distance[h, (q_idx - kv_idx).clamp(-8, 8) + 8]


def scaled_by_document(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, by_document: Any) -> Any:
    return score * torch.abs(by_document[b]) + 0.01 * kv_idx


def with_holes(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Hides pairs; some queries see nothing."""
    return torch.where(((q_idx + kv_idx + h) % 3 == 0) | (q_idx % 5 == 2), float("-inf"), score)


def independent(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Has no derivative."""
    return torch.cos(0.1 * (q_idx - 2 * kv_idx + h + b).to(score.dtype)).expand(score.shape)


def capped(cap: float) -> Callable[..., torch.Tensor]:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)

    return score_mod


SCORE_MODS: dict[str, Callable[..., torch.Tensor]] = {
    "capped": capped(3.0),
    "biased_by_head": biased_by_head,
    "relative": relative,
    "scaled_by_document": scaled_by_document,
    "with_holes": with_holes,
    "independent": independent,
}
_TABLES = {"biased_by_head": ["by_head"], "relative": ["by_distance"], "scaled_by_document": ["by_document"]}


class Scores(NamedTuple):
    """What a call's scores depend on besides q and k, as data; `arguments` makes the call's arguments of it."""

    slopes: str = ""  # "h", "bh", or "" for none
    score_mod: str = ""  # one of SCORE_MODS, or "" for none
    dropout_p: float = 0.0
    seed: int = 0
    seed_in_tensor: bool = False

    @property
    def of_plan(self) -> dict[str, Any]:
        """The arguments of `make_plan` and `supports`."""
        named = {"score_mod": SCORE_MODS[self.score_mod]} if self.score_mod else {}
        return {**named, **({"dropout_p": self.dropout_p} if self.dropout_p else {})}

    def of_call(self, problem: Problem, device: str = "cpu") -> dict[str, Any]:
        """The arguments of `attention` beside a plan."""
        slopes, tables = slopes_and_tables(problem, self.seed, device)
        given: dict[str, Any] = {}
        if self.slopes:
            given["alibi_slopes"] = slopes[0] if self.slopes == "h" else slopes
        if names := _TABLES.get(self.score_mod):
            given["aux_tensors"] = {name: tables[name] for name in names}
        if self.dropout_p:
            tensor = torch.tensor(self.seed, device=device)
            given["dropout_seed"] = tensor if self.seed_in_tensor else self.seed
        return given


def slopes_and_tables(
    problem: Problem, seed: int, device: str = "cpu"
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Random slopes [b, h_q] (at least one row), and the tables of SCORE_MODS."""
    generator = torch.Generator().manual_seed(abs(seed) % 1000)
    documents, heads = max(1, len(problem.sequences)), problem.heads_q
    slopes = torch.rand(documents, heads, generator=generator) - 0.2
    wide = getattr(torch, problem.dtype)
    shapes = {"by_head": (heads,), "by_distance": (heads, 17), "by_document": (documents,)}
    tables = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return slopes.to(device), {name: x.to(device, wide) for name, x in tables.items()}


@st.composite
def scored_cases(draw: st.DrawFn, kind: str, **narrowed: Any) -> tuple[Case, Scores]:
    """A case and its scores; `kind` is one of KINDS. Areas that connect documents lie in one document instead."""
    case: Case = draw(cases(dtypes=("float64",), **narrowed))
    documents = len(case.problem.sequences)
    everything = kind == "all"
    scores = Scores(
        draw(st.sampled_from(["h", "bh"] if documents else ["h"])) if everything or kind == "alibi" else "",
        draw(st.sampled_from(sorted(SCORE_MODS))) if everything or kind == "score_mod" else "",
        draw(st.sampled_from([0.1, 0.5, 0.9])) if everything or kind == "dropout" else 0.0,
        draw(st.sampled_from([0, 1, -7, 2**40 + 5])),
        draw(st.booleans()),
    )
    plain = replace(case.problem, score_mod="", dropout_p=0.0)  # a case has scores of its own, which these replace
    return replace(case, problem=in_one_document(plain), alibi=""), scores


def in_one_document(problem: Problem) -> Problem:
    """The problem, its documents joined if areas connect them."""
    try:
        check_one_document(problem, "score_mod")
    except ValueError:
        rows = sum(problem.lengths.slots_q), sum(problem.lengths.slots_kv)
        return replace(problem, sequences=(Sequence(*rows, *rows),))
    return problem


def check(package: Any, case: Case, scores: Scores, schedule: Any = None) -> list[str]:
    """`conformance.checks.values.check` of a package with these scores: what differs from the oracle."""
    of_call = scores.of_call(case.problem)
    of_schedule = {} if schedule is None else {"schedule": schedule}

    @functools.wraps(package.attention)
    def attention(*tensors: Any, plan: Any = None, **arguments: Any) -> Any:
        named = {} if plan is not None else scores.of_plan
        return package.attention(*tensors, plan=plan, **arguments, **of_call, **named)

    implementation = SimpleNamespace(
        ContextParallel=package.ContextParallel,
        Unsupported=package.Unsupported,
        attention=attention,
        make_plan=lambda **arguments: package.make_plan(**arguments, **of_schedule, **scores.of_plan),
        shard=package.shard,
        supports=lambda **arguments: package.supports(**arguments, **scores.of_plan),
    )
    exact = functools.partial(dense_attention, **of_call, **scores.of_plan)
    patient = patch.dict(os.environ, {"CONFORMANCE_LIMIT_S": str(HANGS_S)})
    with patient, patch.object(reference, "dense_attention", exact):
        return check_logic(implementation, case)  # type: ignore[arg-type]
