"""The quick profile sees every mutant, in the tier that the mutant names; and what the tiers see that judge how results
come about.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cp_ref
from conformance.case import Case
from conformance.checks.calls import check_determinism
from conformance.checks.hygiene import check_hygiene, poisoned_memory
from conformance.checks.metamorphic import RELATIONS, _up_to_underflow, check_metamorphic
from conformance.checks.probes import check_probes
from conformance.checks.reference import UnsupportedCase
from conformance.implementation import Implementation, load
from conformance.problems.capabilities import EVERYTHING
from conformance.problems.strategies import cases
from conformance.problems.torch_uses import TorchUse
from conformance.runner.tiers import TIERS
from conformance.tensors import build
from cp_ref.reference.executor.tile_attention import visible_pairs
from cp_ref.schedules.problem import Problem, Sequence
from tests.meta.mutants import MUTANTS, Mutant
from tests.meta.mutants.hunt import drawn_problems, hunt, tier_names

thorough = pytest.mark.thorough

# what Python says of code that is called, or uses values, in another way than it was written for
BROKEN = re.compile(
    r"takes (from )?\d+ |positional argument|unexpected keyword|has no attribute|is not defined|dataclass instances|"
    r"not subscriptable|not iterable|unsupported operand|ImportError|local variable"
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_every_row_changes_what_is_there() -> None:
    for mutant in MUTANTS.values():
        mutant.check()


@thorough
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name: str) -> None:
    mutant = MUTANTS[name]
    found = hunt(name, mutant, mutant.tier)
    assert found.killed, f"the tier {mutant.tier} does not see the mutant {name} in {found.played} problems"
    assert not BROKEN.search(str(found.findings)), f"the mutant itself is broken: {found.findings}"


def test_the_documents_name_mutants_of_every_tier() -> None:
    page = Path(__file__).parents[3] / "docs" / "conformance" / "detection.md"
    text = page.read_text().partition("## Detection rates")[0]
    rows = dict(re.findall(r"^\| ([a-z-]+) \|.*\| (`.*`) \|$", text, re.MULTILINE))
    assert set(rows) == {mutant.tier for mutant in MUTANTS.values()}
    for tier, names in rows.items():
        assert {MUTANTS[name].tier for name in re.findall("`(.*?)`", names)} == {tier}


@thorough
@pytest.mark.parametrize("tier", [name for name, tier in TIERS.items() if tier.kind is Case and name != "pairs"])
def test_what_is_not_spoiled_passes(tier: str) -> None:
    nothing = Mutant("nothing", "cp_ref", tier, "", "nothing is wrong", ())
    found = hunt("nothing", nothing, tier, most=3)  # tests/conformance plays more
    assert not found.killed, (found.text, found.findings)
    assert found.played == 3


def test_mutants_are_of_every_kind() -> None:
    kinds = Counter((mutant.package, mutant.level) for mutant in MUTANTS.values())
    packages = Counter(mutant.package for mutant in MUTANTS.values())
    assert packages["cp_fast"] >= packages["cp_ref"]
    for package in ("cp_ref", "cp_fast"):
        assert kinds[package, "schedule"] >= 40
        assert kinds[package, "helpers"] >= 8
    assert kinds["cp_fast", "kernel"] >= 5
    assert kinds["cp_fast", "merge"] >= 3
    assert {mutant.tier for mutant in MUTANTS.values()} >= {
        name for name, tier in TIERS.items() if tier.level == "schedule"
    }
    for name, mutant in MUTANTS.items():
        assert mutant.tier in tier_names(mutant), name
        assert mutant.text
        assert mutant.tier in TIERS


def test_a_planted_bug_is_gone_afterwards() -> None:
    before = visible_pairs.__code__
    with MUTANTS["window-off-by-one"].planted():
        assert visible_pairs.__code__ is not before
    assert visible_pairs.__code__ is before


# ---- tiers that judge how results come about: what the newer ones see, each with a bug of its own


_TWO = (Sequence(8, 8, 8, 8), Sequence(3, 3, 4, 4))
PACKED = Case(
    Problem(2, _TWO, qkv_format="thd", attn_mask_type="padding_causal", heads_q=4, heads_kv=2),
    return_lse=True,
    loss="out+lse",
    deterministic=True,
)


def _like_the_reference(**changed: Any) -> Any:
    members = {name: getattr(cp_ref, name) for name in cp_ref.__all__}
    return Implementation(SimpleNamespace(**(members | changed)), "sample")


@pytest.mark.thorough
def test_the_reference_is_batch_invariant_to_the_last_bit() -> None:
    invariant = _like_the_reference(batch_invariant=True)
    drawn = drawn_problems("metamorphic", cases(EVERYTHING, dtypes=TIERS["metamorphic"].dtypes), 25)
    for case in drawn:
        assert check_metamorphic(invariant, case) == [], str(case)
    assert sum(case.deterministic and len(case.problem.sequences) > 1 for case in drawn) > 2


def test_a_batch_that_matters_in_the_last_bit_is_seen_where_it_is_promised_not_to() -> None:
    def attention(q: torch.Tensor, *rest: torch.Tensor, **arguments: Any) -> Any:
        results = cp_ref.attention(q, *rest, **arguments)
        return (results[0] * (1.0 + 4e-7 * (q.shape[0] % 4)), *results[1:])

    assert check_metamorphic(_like_the_reference(attention=attention), PACKED) == []
    found = check_metamorphic(_like_the_reference(attention=attention, batch_invariant=True), PACKED)
    assert any("with the last sequence left out" in finding for finding in found)


def test_bits_that_are_claimed_are_compared() -> None:
    a2a = replace(PACKED, problem=replace(PACKED.problem, cp_comm_type="a2a", a2a_size=2, attn_mask_type="padding"))
    fast = load("conformance.adapters.cp_fast:cpu").offered

    def attention(q: torch.Tensor, *rest: torch.Tensor, cp: Any, **arguments: Any) -> Any:
        out, *more = fast.attention(q, *rest, cp=cp, **arguments)
        return (out * (1.0 + 2.4e-7 * ((cp.size > 1) + (cp.layout == "contiguous"))), *more)

    def claiming(claims: Any, **changed: Any) -> Implementation:
        names = ("ContextParallel", "Unsupported", "attention", "make_plan", "shard", "supports", "unshard")
        members = {name: getattr(fast, name) for name in names} | {"same_bits": claims}
        return Implementation(SimpleNamespace(**(members | changed)), "sample")

    def everything(case: Case) -> tuple[str, ...]:
        return ("out", "lse", "dq", "dk", "dv")

    assert check_metamorphic(claiming(everything), a2a) == []
    assert check_metamorphic(claiming((), attention=attention), a2a) == []
    found = check_metamorphic(claiming(everything, attention=attention), a2a)
    assert any(finding.startswith("out with one rank (cp_size 1) in place of all differs") for finding in found)
    assert any(finding.startswith("out with another layout differs") for finding in found)
    for layout, same in (("dual_chunk", frozenset({"out"})), ("contiguous", frozenset())):
        table = [({"layout": layout, "cp_size": {"low": 2}}, ["out"])]
        assert claiming(table).same_bits(a2a) == same
    with pytest.raises(ValueError, match="same_bits of 'sample' names max_logit; it must name some of out, lse"):
        claiming([({}, ["max_logit"])]).same_bits(a2a)


def test_twice_a_value_is_exact_but_where_numbers_underflow() -> None:
    """Keys that are seen with weights of 1e-310 have gradients that are rounded to the smallest numbers there are."""
    problem = Problem(2, (Sequence(64, 64, 64, 64),), qkv_format="thd", d_qk=16, dtype="float64", softmax_scale=0.5)
    case = Case(problem, seed=6, magnitude=12.0, deterministic=True)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
        return cp_ref.attention(q, k, v * 1.5 if v.abs().max() > 4 else v, **arguments)

    assert check_metamorphic(_like_the_reference(), case) == []
    assert any("v times 2" in finding for finding in check_metamorphic(_like_the_reference(attention=attention), case))
    tiny = torch.tensor([3e-310, 1e-290], dtype=torch.float64)
    assert not torch.equal(_up_to_underflow(tiny, tiny * (1 + 1e-15)), tiny * (1 + 1e-15))


@pytest.mark.parametrize("name", RELATIONS)
def test_every_relation_relates_something(name: str) -> None:
    case = Case(Problem(2, (*_TWO, _TWO[0]), qkv_format="thd", attn_mask_type="padding_causal"))
    related = list(RELATIONS[name](case, build(case)))
    assert related
    for other, tensors, _ in related:
        assert other.problem != case.problem or not torch.equal(tensors.v.nan_to_num(), build(case).v.nan_to_num())


def test_fresh_memory_is_poisoned() -> None:
    with poisoned_memory():
        assert torch.empty(5).isnan().all()
        assert torch.empty_like(torch.ones(3)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_result_in_the_memory_of_another_is_seen() -> None:
    def attention(*tensors: torch.Tensor, **arguments: Any) -> Any:
        out, lse = cp_ref.attention(*tensors, **arguments)
        both = torch.cat([out.flatten(), lse.flatten()])
        return both[: out.numel()].view(out.shape), both[-lse.numel() - shared :][: lse.numel()].view(lse.shape)

    plain = replace(PACKED, grads="", loss="out")
    shared = 0
    assert check_hygiene(_like_the_reference(attention=attention), plain) == []  # side by side in one buffer
    shared = 1
    found = check_hygiene(_like_the_reference(attention=attention), plain)
    assert found[:2] == [f"rank {rank}: lse lies in the memory of out" for rank in (0, 1)]
    assert any(finding.startswith("lse") for finding in found[2:])  # its numbers are judged all the same


def test_another_number_of_ranks_is_named() -> None:
    def attention(q: torch.Tensor, *tensors: torch.Tensor, cp: Any, **arguments: Any) -> Any:
        out, *more = cp_ref.attention(q, *tensors, cp=cp, **arguments)
        return (out * (1.0 if cp.size == 1 else 1.5), *more)

    found = check_metamorphic(_like_the_reference(attention=attention), PACKED)
    assert any(f.startswith("out with one rank (cp_size 1) in place of all differs by up to") for f in found), found


def test_reading_what_nobody_wrote_is_seen() -> None:
    def attention(*tensors: torch.Tensor, **arguments: Any) -> Any:
        results = cp_ref.attention(*tensors, **arguments)
        return (results[0] + 0.0 * torch.empty_like(results[0]).detach(), *results[1:])

    assert check_hygiene(_like_the_reference(attention=attention), PACKED)


def test_noise_is_seen_by_determinism_alone() -> None:
    def attention(*tensors: torch.Tensor, **arguments: Any) -> Any:
        results = cp_ref.attention(*tensors, **arguments)
        return (results[0] * (1.0 + 1e-6 * torch.rand(())), *results[1:])

    noisy = _like_the_reference(attention=attention)
    assert check_determinism(noisy, PACKED)
    assert TIERS["logic"].check(noisy, PACKED, "cpu") == []


@pytest.mark.parametrize(
    "entry", [pytest.param(x, marks=() if x.endswith("a2a") else thorough) for x in TorchUse.names()]
)
@pytest.mark.one_in(2)
def test_the_reference_in_training_loops(entry: str) -> None:
    if entry.startswith(("compile", "opcheck")):
        with pytest.raises(UnsupportedCase):
            TorchUse(entry).check(load("cp_ref"))
    else:
        assert TorchUse(entry).check(load("cp_ref")) == []


@pytest.mark.parametrize(
    ("entry", "spoil"),
    [
        pytest.param("gradcheck p2p", lambda q, k, v: (q, k.detach() + 0.5 * (k - k.detach()), v), marks=thorough),
        ("requires-grad p2p", lambda q, k, v: (q, k.detach() if not v.requires_grad else k, v)),
        ("no-grad p2p", lambda q, k, v: (q * (1.0 if torch.is_grad_enabled() else 1.5), k, v)),
        ("autocast p2p", lambda q, k, v: (q, k, v * (1.0 if not torch.is_autocast_enabled("cpu") else 1.5))),
    ],
)
def test_a_wrong_citizen_is_seen(entry: str, spoil: Any) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
        return cp_ref.attention(*spoil(q, k, v), **arguments)

    assert TorchUse(entry).check(_like_the_reference(attention=attention))


def test_operators_are_checked_where_they_are_named() -> None:
    op = torch.ops.aten.sin.default
    assert TorchUse("opcheck").check(_like_the_reference(ops=[(op, (torch.ones(3),))])) == []


def test_probes_count_exactly_in_long_rows_and_low_precision() -> None:
    long = Sequence(400, 400, 400, 400)
    case = Case(Problem(2, (long,), qkv_format="thd", attn_mask_type="padding_causal", dtype="bfloat16"))
    assert check_probes(load("cp_ref"), case) == []
    with MUTANTS["one-key-lost-in-long-rows"].planted():
        found = check_probes(load("cp_ref"), case)
    assert "counts 199 visible keys" in found[0] or "visible keys by exp(lse)" in found[0]
