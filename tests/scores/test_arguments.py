"""alibi_slopes, score_mod, aux_tensors, dropout_p and dropout_seed: what is wrong with them is named, on every rank."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from conformance.case import Case
from cp_ref import SimGroup
from cp_ref.calls.score_mod import digest_of, frozen
from cp_ref.schedules.problem import Problem

Q = torch.zeros(2, 4, 2, 8)  # one rank's slice: b 2, s 8/2, h 2, d 8
SIZES: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}
DENSE: dict[str, Any] = {"batch_size": 2, "seqlen_q": 8}
TABLE = torch.ones(2)
EDGE = 0
PACKAGES: dict[str, Any] = {"cp_ref": cp_ref, "cp_fast": cp_fast}


def plain(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 1


def with_table(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    return score * table[h]


P: dict[str, Any] = {"dropout_p": 0.5}


def raised(call: Any, *tensors: torch.Tensor, **arguments: Any) -> Exception:
    with pytest.raises((ValueError, TypeError, cp_ref.Unsupported)) as caught:
        call(*tensors, **arguments)
    return caught.value


def doubled(factor: float) -> Callable[..., Any]:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return factor * score

    return score_mod


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("planned", [False, True])
def test_the_ranks_agree(planned: bool, package: str) -> None:
    side = PACKAGES[package]

    def one(member: Any) -> list[str]:
        cp, found = side.ContextParallel(member), []
        for change in ({"score_mod": doubled(1.0 + member.rank)}, {"dropout_p": 0.1 * (1 + member.rank)}):
            if planned:
                found.append(str(raised(side.make_plan, cp=cp, **DENSE, **change, **SIZES)))
            else:
                seed = {"dropout_seed": 3} if "dropout_p" in change else {}
                found.append(str(raised(side.attention, Q, Q, Q, cp=cp, **change, **seed)))
        return found

    functions, probabilities = SimGroup(2).run(one)[0]
    assert re.search(r"score_mod='doubled.<locals>.score_mod:\w{16}' where rank 1 has score_mod='doubled", functions)
    assert "rank 0 has dropout_p=0.1 where rank 1 has dropout_p=0.2" in probabilities


@pytest.mark.parametrize("package", PACKAGES)
def test_the_ranks_agree_on_what_a_call_gives(package: str) -> None:
    """`cp_fast` compares values of tensors and seeds only under `checked`, where it agrees on every call."""
    side = PACKAGES[package]

    def one(member: Any) -> list[str]:
        cp, odd = side.ContextParallel(member), member.rank == 1
        changes: list[dict[str, Any]] = [
            {"alibi_slopes": torch.ones(2) if odd else None},
            {"score_mod": with_table, "aux_tensors": {"table": torch.ones(3 if odd else 2)}},
            {**P, "dropout_seed": 3 + odd},
            {**P, "dropout_seed": 2**63 if odd else 0},
        ]
        return [str(raised(side.attention, Q, Q, Q, cp=cp, **change)) for change in changes]

    with cp_fast.checked():
        slopes, tables, seeds, refused = SimGroup(2).run(one)[0]
    assert "rank 0 has nothing where rank 1 has alibi_slopes=float32[2]" in slopes
    assert "rank 0 has aux_tensors.table=float32[2] where rank 1 has aux_tensors.table=float32[3]" in tables
    assert "rank 0 has dropout_seed=3 where rank 1 has dropout_seed=4" in seeds
    assert "rank 1 refused its arguments" in refused


@pytest.mark.parametrize("package", PACKAGES)
def test_a_plan_has_its_function_and_its_probability(package: str) -> None:
    side = PACKAGES[package]

    def one(member: Any) -> list[str]:
        cp = side.ContextParallel(member)
        plan = side.make_plan(cp=cp, **DENSE, score_mod=doubled(2.0), dropout_p=0.5, **SIZES)
        given = {"plan": plan, "dropout_seed": 1}
        out = side.attention(Q, Q, Q, cp=cp, **given)
        assert torch.equal(out, side.attention(Q, Q, Q, cp=cp, score_mod=doubled(2.0), dropout_p=0.5, **given))
        others = ({"score_mod": doubled(3.0)}, {"dropout_p": 0.25})
        return [str(raised(side.attention, Q, Q, Q, cp=cp, **given, **other)) for other in others]

    for function, probability in SimGroup(2).run(one):
        assert re.match(r"score_mod is 'doubled.*, but the plan was made for 'doubled", function)
        assert probability.startswith("dropout_p is 0.25, but the plan was made for 0.5")


def test_areas_that_connect_documents() -> None:
    given: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": torch.tensor([0, 8, 12]),
        "areas": torch.tensor([[0, 8, 0, 8, -1, 0], [8, 12, 4, 12, -1, -1]]),
    }
    q = torch.zeros(12, 2, 8)
    changes: list[dict[str, Any]] = [{"alibi_slopes": torch.ones(2)}, {"score_mod": plain}, {**P, "dropout_seed": 1}]
    for change in changes:
        error = raised(cp_ref.dense_attention, q, q, q, **given, **change)
        words = (
            r"is given, and areas connect documents 0 and 1: area q\[8:12\] k\[4:12\] .* of one document, \[0, total\]"
        )
        assert re.search(words, str(error)), error
        one = {**given, "cu_seqlens_q": torch.tensor([0, 12])}
        assert cp_ref.dense_attention(q, q, q, **one, **change)[0].shape == (12, 2, 8)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_plan_keeps_the_captured_values_of_its_day(package: str) -> None:
    global EDGE
    side, factor, others, EDGE = PACKAGES[package], 2.0, (1.0, 5), 0

    def helper(score: Any) -> Any:
        return factor * score

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, power: int = 2) -> Any:
        if score.dim() == 0:
            return score_mod(score, b, h, q_idx, kv_idx)
        return helper(score) ** power + others[1] + max(EDGE, 1)

    digest, q = digest_of(score_mod), torch.rand(2, 4, 2, 8, generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {"score_mod": score_mod}

    def one(member: Any) -> torch.Tensor:
        cp, leaf = side.ContextParallel(member), q.clone().requires_grad_()
        plan = side.make_plan(cp=cp, batch_size=2, seqlen_q=4, **given, **SIZES)
        assert plan.score_mod is not None
        change(plan.score_mod)
        out = side.attention(leaf, q, q, cp=cp, plan=plan)
        out.backward(q)
        assert leaf.grad is not None
        return leaf.grad

    def change(copy: Callable[..., Any]) -> None:
        nonlocal factor, others
        global EDGE
        assert digest_of(copy) == digest_of(score_mod)
        factor, others, EDGE = 3.0, (1.0, 6), 7
        assert digest_of(copy) == digest != digest_of(score_mod)

    found = SimGroup(1).run(one)[0]
    leaf, q = q.double().requires_grad_(), q.double()
    out, _, _ = cp_ref.dense_attention(leaf, q, q, score_mod=lambda score, b, h, i, j: (2.0 * score) ** 2 + 5 + 1)
    out.backward(q)
    assert leaf.grad is not None
    assert (found - leaf.grad).abs().max() < 1e-5


def test_texts_of_before_still_read() -> None:
    """Replays have neither field; a case does not take them yet, rather than play something else."""
    text = 'Case(Problem(cp_size=2, sequences=[(8, 8, 8, 8)], qkv_format="thd"), tail_q=4, seed=3)'
    problem = Case.parse(text).problem
    assert (str(Case.parse(text)), problem.score_mod, problem.dropout_p) == (text, "", 0.0)
    changed = replace(problem, score_mod=digest_of(doubled(2.0)), dropout_p=0.5)
    assert Problem.parse(str(changed)) == changed
    with pytest.raises(ValueError, match="score_mod is 'doubled"):
        Case(changed)


def test_digests() -> None:
    def adds(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return plain(score, b, h, q_idx, kv_idx) + torch.nn.functional.relu(score) + max(1, 2)

    def again(text: str) -> Callable[..., Any]:
        found: dict[str, Any] = {"torch": torch}
        exec(f"def f(score, b, h, q_idx, kv_idx):\n    return {text}", found)
        return found["f"]

    def itself(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score if score.dim() else itself(score, b, h, q_idx, kv_idx)

    same = [digest_of(again("score + torch.where(kv_idx > 3, 1.0, 2.0)")) for _ in range(2)]
    assert same[0] == same[1] != digest_of(again("score + torch.where(kv_idx > 4, 1.0, 2.0)"))
    assert digest_of(again("score in {1, 2, 3}")) == digest_of(again("score in {3, 2, 1}"))
    assert digest_of(again("torch.exp(score)")) != digest_of(again("torch.log(score)"))
    assert digest_of(adds).startswith("test_digests.<locals>.adds:")
    assert digest_of(itself).startswith("test_digests.<locals>.itself:")


def attribute_of_its_own(factor: float) -> Any:
    def function(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * own.factor

    own: Any = function
    own.factor = factor
    return own


def attribute_of_another(factor: float) -> Any:
    def function(score: Any) -> Any:
        return score * helper.how[1]

    helper: Any = function

    def calls(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return helper(score)

    helper.how = ("factor", factor)
    return calls


def named_like_a_librarys(factor: float) -> Any:
    def relu(score: Any) -> Any:
        return torch.relu(score) * factor

    named = functools.wraps(torch.nn.functional.relu)(relu)  # its __wrapped__ is torch's own
    return lambda score, b, h, q_idx, kv_idx: named(score)


def named_like_a_built_in(factor: float) -> Any:
    named = functools.wraps(torch.exp, updated=())(lambda score: score * factor)
    del named.__wrapped__
    return lambda score, b, h, q_idx, kv_idx: named(score)


def one_inside_another(factor: float) -> Any:
    def scaled(inner: Any, by: float) -> Any:
        return lambda score, b, h, q_idx, kv_idx: inner(score, b, h, q_idx, kv_idx) * by

    return scaled(scaled(plain, factor), 2.0)


def in_the_body_of_a_class(factor: float) -> Any:
    names: dict[str, Any] = {"FACTOR": factor}
    text = "def f(score, b, h, q_idx, kv_idx):\n    class A:\n        factor = FACTOR\n    return score * A.factor"
    exec(text, names)
    return names["f"]


MAKERS = [
    attribute_of_its_own,
    attribute_of_another,
    named_like_a_librarys,
    named_like_a_built_in,
    one_inside_another,
    in_the_body_of_a_class,
]


@pytest.mark.parametrize("maker", MAKERS)
def test_digests_see_all_that_a_function_reads(maker: Callable[[float], Any]) -> None:
    two, again, three = (digest_of(maker(factor)) for factor in (2.0, 2.0, 3.0))
    assert two == again != three
    assert digest_of(frozen(maker(2.0))) == two


@pytest.mark.parametrize("package", PACKAGES)
def test_a_changed_attribute_is_a_new_function(package: str) -> None:
    side, q = PACKAGES[package], torch.rand(2, 4, 2, 8, generator=torch.Generator().manual_seed(0))
    score_mod = attribute_of_its_own(1.0)

    def one(member: Any) -> list[torch.Tensor]:
        cp, found = side.ContextParallel(member), []
        for factor in (1.0, 8.0):
            score_mod.factor = factor
            found.append(side.attention(q, q, q, cp=cp, score_mod=score_mod))
        return found

    for factor, out in zip((1.0, 8.0), SimGroup(1).run(one)[0], strict=True):
        want = cp_ref.dense_attention(q, q, q, score_mod=attribute_of_its_own(factor))[0]
        torch.testing.assert_close(out, want.to(out), atol=1e-5, rtol=0)

    def apart(member: Any) -> str:
        odd = attribute_of_its_own(1.0 + member.rank)
        return str(raised(side.attention, q, q, q, cp=side.ContextParallel(member), score_mod=odd))

    assert all("the ranks have different problems" in said for said in SimGroup(2).run(apart))


def imports(what: str) -> Any:
    names: dict[str, Any] = {}
    exec(f"def f(score, b, h, q_idx, kv_idx):\n    {what}\n    return score", names)
    return names["f"]


def test_what_cannot_be_read_is_refused() -> None:
    table, looked_up = torch.ones(2), {"factor": 2.0}
    mul, get, count = table.mul, looked_up.get, 0

    def counts(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        nonlocal count
        count += 1
        return score * count

    def reads_torch_os(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * float(torch.os.environ["FACTOR"])

    def looks_up(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * globals()["TABLE"][0]

    own = attribute_of_its_own(2.0)
    own.table = table
    refused: dict[str, Any] = {
        "captures mul": lambda score, b, h, q_idx, kv_idx: mul(score),
        "captures get": lambda score, b, h, q_idx, kv_idx: score * get("factor"),
        "captures .table": own,
        "changes count": counts,
        "reads torch.os": reads_torch_os,
        "captures globals": looks_up,
        "imports 'os'": imports("import os"),
        "imports 'tests.scores'": imports("from tests.scores import test_arguments"),
    }
    for words, score_mod in refused.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            digest_of(score_mod)
    for what in ("import math", "import torch.nn.functional as F", "from torch import exp"):
        assert digest_of(imports(what))
