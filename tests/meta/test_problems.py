"""Every kind of problem: texts read back, the reference passes, what is missing or refused is called so, and every
planted bug of the levels below whole attention is seen. tests/meta/mutants plants bugs in whole attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import cp_ref
from conformance import replay
from conformance.implementation import Implementation, load
from conformance.problems.capabilities import EVERYTHING
from conformance.problems.helpers import HELPERS, Helper
from conformance.problems.linear import LinearAttention, batch_of
from conformance.record import RunRecord, TierResult
from conformance.report.page import summary
from conformance.runner.play_problem import InProcess, Task, play_task, tasks_of
from conformance.runner.run_tiers import PROFILES, Profile, run_tier
from conformance.runner.suite_run import SuiteRun
from conformance.runner.tiers import TIERS, group_sizes, tiers_of
from cp_ref import thd
from tests.meta.mutants import MUTANTS
from tests.meta.zoo.samples import Lower


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


FEW = Profile(60, derandomize=True)
LOWER = [name for name, tier in TIERS.items() if tier.level != "schedule"]
LINEAR = [name for name in LOWER if TIERS[name].level == "linear"]
SLOW = [name for name in LOWER if "helpers" in name or TIERS[name].level in ("linear", "sparse")]
FEWER = Profile(20, derandomize=True)  # of each function of the helpers, and of what takes long
EVERY_ITEM = [(tier, item) for name, tier in TIERS.items() if name != "pairs" for item in tier.items(EVERYTHING)]


def run(impl: Any, tier: str, shrink: bool = False, profile: Profile = FEW) -> TierResult:
    return run_tier(impl, tier, EVERYTHING, profile if shrink else replace(profile, shrink_s=0.0))


def like_the_reference(**changed: Any) -> Implementation:
    return Implementation(SimpleNamespace(**({name: getattr(cp_ref, name) for name in cp_ref.__all__} | changed)))


# ---- texts


@given(st.data())
def test_texts_read_back(data: st.DataObject) -> None:
    tier, item = data.draw(st.sampled_from(EVERY_ITEM))
    problems = tier.problems(item, EVERYTHING)
    problem = data.draw(problems if isinstance(problems, SearchStrategy) else st.sampled_from(list(problems)))
    assert (tier, problem) in tiers_of(str(problem))
    assert not set(str(problem)) & {"\n", "'"}


@pytest.mark.parametrize(
    "text",
    [
        "Helper()",
        "Helper(name='no_such')",
        "Helper(1)",
        "Merge(parts=0)",
        "Tile(rows=-1)",
        "Tile",
        "error no-such",
        "special one-hand-clapping",
        "known te-0",
        "torch sin",
        "LinearAttention()",
        "LinearAttention(Case(Problem(cp_size=2, sequences=[])), kind='rwkv')",
        "LinearAttention(Case(Problem(cp_size=2, sequences=[])), heads=0)",
        "LinearAttention(Case(Problem(cp_size=2, sequences=[])), spoiled=0)",
        "CausalConv1d(Case(Problem(cp_size=2, sequences=[])), activation='gelu')",
        "CausalConv1d(Case(Problem(cp_size=2, sequences=[])), kernel_size=0)",
        "SparseAttention()",
        "SparseAttention(Case(Problem(cp_size=2, sequences=[])), naming='none')",
        "SelectKeys(Case(Problem(cp_size=2, sequences=[])), values='odd')",
        "IndexLoss(Case(Problem(cp_size=2, sequences=[])), heads=0)",
        "IndexLoss(Case(Problem(cp_size=2, sequences=[])), rate=0)",
        "IndexLoss(Case(Problem(cp_size=2, sequences=[])), scale='1')",
        "SparseAttention(Case(Problem(cp_size=2, sequences=[])), by_head=1)",
        "CausalConv1d(Case(Problem(cp_size=2, sequences=[])), bias=0)",
        "",
        "Case()",
        "Problem(cp_size=2, sequences=[])",
        "Case(Problem(cp_size=2, sequences=[]), tail_q=3)",
        "Case(Problem(cp_size=2, sequences=[]), colour=3)",
        'Case(Problem(cp_size=2, sequences=[]), loss="lse")',
        "Case(Problem(cp_size=2, sequences=[]), seed=print(1))",
        f"Case(Problem(cp_size=2, sequences=[]), seed={'-' * 1000}1)",
        f"Case(Problem(cp_size=2, sequences=[]), seed={'-' * 9000}1)",
        f"Case(Problem(cp_size={'-' * 1000}2, sequences=[]))",
        f"Case({'(' * 300}Problem(cp_size=2, sequences=[]){')' * 300})",
        f"Case(Problem(cp_size=2, sequences={'[' * 150}{']' * 150}))",
    ],
)
def test_a_mistyped_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read a|there is no (helper|error|special|known|torch) |no meaning"):
        tasks_of(text)


# ---- what is right, missing, or refused


@pytest.mark.parametrize("tier", [pytest.param(t, marks=pytest.mark.thorough if t in SLOW else ()) for t in LOWER])
@pytest.mark.one_in(3)
def test_the_reference_is_right(tier: str) -> None:
    profile = FEWER if tier in SLOW and tier not in LINEAR else FEW
    result = run(load("conformance.adapters.cp_ref"), tier, profile=profile)
    assert not result.smallest
    assert result.passed >= profile.max_examples


@pytest.mark.thorough
def test_what_is_not_offered_is_missing() -> None:
    some = SimpleNamespace(pad_v=thd.pad_v, trim_out=thd.trim_out)
    result = run(SimpleNamespace(thd=some), "helpers")
    assert result.count("missing") == len(HELPERS) - 2
    assert result.count("right") == 120
    assert not result.smallest
    forward = SimpleNamespace(tile=Lower().tile)
    assert run(forward, "kernel").passed == 60
    without_autograd = SimpleNamespace(
        tile=lambda q, k, v, **options: tuple(x.detach() for x in Lower().tile(q, k, v, **options))
    )
    result = run(without_autograd, "kernel-backward")
    assert [p.verdict for p in result.played] == ["missing"]


def test_a_tile_may_be_differentiated_by_autograd() -> None:
    def tile(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return Tiled.apply(q, k, v, options)

    class Tiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, options: Any) -> Any:
            out, lse = Lower().tile(q, k, v, **options)
            ctx.saved, ctx.options = (q, k, v, out, lse), options
            return out, lse

        @staticmethod
        def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
            q, k, v, out, lse = ctx.saved
            return (*Lower().tile_backward(q, k, v, out, lse, dout, **ctx.options), None)

    result = run(SimpleNamespace(tile=tile), "kernel-backward")
    assert result.passed == 60


def test_a_library_without_linear_layers_misses_the_level() -> None:
    impl = like_the_reference(linear_attention=None)
    assert "linear" not in impl.levels
    run = SuiteRun(InProcess(impl), FEW, tiers=LINEAR)
    (only,) = run.results()
    assert (only.run, only.count("missing"), only.smallest) == (1, 1, [])
    assert only.note == "the implementation does not offer the level linear"


def test_a_library_without_convolutions_misses_them() -> None:
    result = run(like_the_reference(causal_conv1d=None), "linear-convolution")
    assert (result.run, result.count("missing")) == (1, 1)


def refusing(function: Callable[..., Any], refuses: Callable[..., bool]) -> Callable[..., Any]:
    def called(*tensors: torch.Tensor, **options: Any) -> Any:
        if refuses(*tensors, **options):
            raise NotImplementedError("not this")
        return function(*tensors, **options)

    return called


@pytest.mark.parametrize(
    ("tier", "impl"),
    [
        ("kernel", SimpleNamespace(tile=refusing(Lower().tile, lambda q, k, v, **_: q.shape[1] != k.shape[1]))),
        (
            "linear",
            like_the_reference(
                linear_attention=refusing(cp_ref.linear_attention, lambda *_, kind, **__: kind == "kda")
            ),
        ),
    ],
)
@pytest.mark.one_in(2)
def test_what_is_refused_is_unsupported(tier: str, impl: Any) -> None:
    result = run(impl, tier, profile=Profile(12, derandomize=True))
    assert result.unsupported
    assert result.passed == 12  # others are drawn in place of what is refused
    assert result.run == result.passed + result.unsupported


def test_counts_and_group_sizes() -> None:
    suite_run = SuiteRun(InProcess(load("cp_ref")), PROFILES["quick"], cp_sizes=(3,))
    assert [suite_run.expected(tier) for tier in LINEAR] == [60, 60]
    for tier in LINEAR:
        drawn = run_tier(load("cp_ref"), tier, EVERYTHING, Profile(8, derandomize=True), cp_sizes=(3,)).played
        assert {group_sizes(problem) for played in drawn for _, problem in tiers_of(played.text)} == {(3,)}


# ---- planted bugs: helpers

Spoil = Callable[..., Any]


def spoiled_helper(name: str, spoil: Spoil) -> SimpleNamespace:
    """One wrong helper, beside a right one."""
    functions = {"trim_out": thd.trim_out, name: lambda *a, **k: spoil(getattr(thd, name), *a, **k)}
    return SimpleNamespace(thd=SimpleNamespace(**functions))


def first_rows_swapped(helper: Any, **arguments: Any) -> Any:
    result = helper(**arguments)
    return torch.cat([result[1:2], result[:1], result[2:]])


def wrong_dtype(helper: Any, **arguments: Any) -> Any:
    return helper(**arguments).to(torch.int64)


def tail_touched(helper: Any, out: Any, **rest: Any) -> None:
    helper(out=out, **rest)
    out[-1:] = 0


def beyond_the_buffer(helper: Any, out: Any, **rest: Any) -> None:
    helper(out=out, **rest)
    if len(out):
        torch.as_strided(out, out[:1].shape, out.stride(), out.storage_offset() + out.numel()).zero_()


def input_changed(helper: Any, x: Any, **rest: Any) -> Any:
    result = helper(x=x, **rest)
    x.zero_()
    return result


def nan_for_two_empties(helper: Any, lse: Any, lse_step: Any, **rest: Any) -> None:
    before = lse.clone()
    helper(lse=lse, lse_step=lse_step, **rest)
    lse[(lse == -torch.inf) & (before == -torch.inf)] = torch.nan


def low_precision(helper: Any, out: Any, out_step: Any, **rest: Any) -> None:
    helper(out=out, out_step=out_step.bfloat16(), **rest)


def adds_instead(helper: Any, first_half: str, second_half: str, **rest: Any) -> None:
    helper(first_half="add" if first_half == "copy" else first_half, second_half=second_half, **rest)


def labels_as_ids(helper: Any, padding_label_id: int, **rest: Any) -> Any:
    return helper(padding_label_id=rest["padding_token_id"], **rest)


def whole_batch(helper: Any, batch: Any, **rest: Any) -> Any:
    return helper(batch=batch, **rest) | {"labels": batch["labels"]}


def other_half(helper: Any, first_half: bool, second_half: bool, **rest: Any) -> Any:
    return helper(first_half=second_half, second_half=first_half, **rest)


HELPER_BUGS: dict[str, Spoil] = {
    "thd_get_partitioned_indices": wrong_dtype,
    "thd_sequence_order_to_cp_rank_order": first_rows_swapped,
    "thd_cp_rank_order_to_sequence_order": input_changed,
    "thd_copy_valid_tokens_from_per_split_to_rank_local": beyond_the_buffer,
    "thd_read_half_tensor": first_rows_swapped,
    "thd_read_second_half_lse": lambda helper, **rest: helper(**rest) + 1e-3,
    "thd_second_half_lse_correction": nan_for_two_empties,
    "thd_out_correction": low_precision,
    "thd_grad_correction": adds_instead,
    "pad_thd_sequences_for_cp": labels_as_ids,
    "get_batch_on_this_cp_rank": whole_batch,
    "get_cu_seqlens_on_cp_rank": other_half,
    "pad_v": lambda helper, **rest: helper(**rest).contiguous().fill_(0),
    "trim_out": lambda helper, **rest: helper(**rest)[..., :-1],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if n % 3 else ()) for n, name in enumerate(HELPERS)]
)
@pytest.mark.one_in(2)
def test_a_wrong_helper_is_seen(name: str) -> None:
    result = run(spoiled_helper(name, HELPER_BUGS[name]), "helpers", profile=Profile(20, derandomize=True))
    assert result.smallest
    assert {Helper.parse(f.text).name for f in result.smallest} == {name}
    assert {p.verdict for p in result.played} <= {"right", "wrong", "missing"}


def test_a_touched_tail_is_seen() -> None:
    name = "thd_out_correction"
    assert run(spoiled_helper(name, tail_touched), "helpers").smallest


def test_a_call_without_an_answer_must_raise() -> None:
    def anything(helper: Any, **arguments: Any) -> Any:
        try:
            return helper(**arguments)
        except ValueError:
            return arguments["x"]

    result = run(spoiled_helper("thd_sequence_order_to_cp_rank_order", anything), "helpers-malformed", shrink=True)
    (failure,) = result.smallest
    assert "should have raised a ValueError" in failure.findings[0]
    task = Task("helpers", "helpers-malformed", failure.text)
    assert play_task(Implementation(Lower()), task).verdict == "right"


# ---- planted bugs: merges and tiles


def base_two(parts: Any) -> Any:
    out, lse = Lower().merge(parts)
    return out, lse * 1.4427


def without_shift(parts: Any) -> Any:
    weights = torch.stack([lse.exp() for _, lse in parts])
    total = weights.sum(0)
    outs = torch.stack([out.to(weights.dtype) for out, _ in parts])
    return (outs * (weights / total).transpose(1, 2)[..., None]).sum(0), total.log()


def first_is_zero(parts: Any) -> Any:
    return Lower().merge([(out.float() * 1.001 if n else out, lse) for n, (out, lse) in enumerate(parts)])


def running_in_low_precision(parts: Any) -> Any:
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = Lower().merge([(out, lse), part])
        out = out.to(part[0].dtype)
    return out, lse


def in_place(parts: Any) -> Any:
    out, lse = Lower().merge(parts)
    parts[0][1].copy_(lse)
    return out, lse


def with_sides(change: Callable[..., dict[str, Any]]) -> Any:
    return lambda q, k, v, **options: Lower().tile(q, k, v, **(options | change(q, k, **options)))


def minus_one_is_unbounded(q: Any, k: Any, **options: Any) -> dict[str, Any]:
    return {side: None if options[side] == -1 else options[side] for side in ("left", "right")}


def aligned_to_the_first_key(q: Any, k: Any, **options: Any) -> dict[str, Any]:
    shift, (left, right) = len(k) - len(q), (options["left"], options["right"])
    return {"left": None if left is None else left + shift, "right": None if right is None else right - shift}


def one_more(q: Any, k: Any, **options: Any) -> dict[str, Any]:
    return {"left": None if options["left"] is None else options["left"] + 1}


def beyond_the_keys_is_unbounded(q: Any, k: Any, **options: Any) -> dict[str, Any]:
    return {"right": None if (options["right"] or 0) >= len(k) else options["right"]}


def lse_transposed(q: Any, k: Any, v: Any, **options: Any) -> Any:
    out, lse = Lower().tile(q, k, v, **options)
    return out, lse.t().contiguous()


def mean_for_empty_rows(q: Any, k: Any, v: Any, **options: Any) -> Any:
    out, lse = Lower().tile(q, k, v, **options)
    empty = (lse == -torch.inf).t()[..., None]
    return torch.where(empty, torch.ones_like(out), out), lse


def lse_in_low_precision(q: Any, k: Any, v: Any, **options: Any) -> Any:
    out, lse = Lower().tile(q, k, v, **options)
    return out, lse.to(torch.bfloat16).to(lse.dtype)


def in_float32(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return tuple(
        x.to(torch.promote_types(x.dtype, q.dtype)) for x in Lower().tile(q.float(), k.float(), v.float(), **options)
    )


def by_matrix_units(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Operands with the eleven bits of TF32."""
    return Lower().tile(
        *((x.view(torch.int32) & ~0x1FFF).view(x.dtype) if x.dtype == torch.float32 else x for x in (q, k, v)),
        **options,
    )


def wrong_dk(*arguments: Any, **options: Any) -> Any:
    dq, dk, dv = Lower().tile_backward(*arguments, **options)
    return dq, dk * 1.02, dv


MERGES = [base_two, without_shift, first_is_zero, running_in_low_precision, in_place]
TILES = {
    "-1": with_sides(minus_one_is_unbounded),
    "aligned": with_sides(aligned_to_the_first_key),
    "one-more": with_sides(one_more),
    "beyond": with_sides(beyond_the_keys_is_unbounded),
    "transposed": lse_transposed,
    "empty-rows": mean_for_empty_rows,
    "low-lse": lse_in_low_precision,
    "in-float32": in_float32,
    "by-matrix-units": by_matrix_units,
}


@pytest.mark.parametrize(
    ("tier", "members", "said"),
    [
        *(pytest.param("merge", {"merge": merge}, "", id=merge.__name__) for merge in MERGES),
        *(pytest.param("kernel", {"tile": tile}, "", id=name) for name, tile in TILES.items()),
        pytest.param("kernel-backward", {"tile": Lower().tile, "tile_backward": wrong_dk}, "dk", id="dk"),
    ],
)
def test_a_wrong_merge_or_tile_is_seen(tier: str, members: dict[str, Any], said: str) -> None:
    result = run(SimpleNamespace(**members), tier)
    assert any(said in finding for failure in result.smallest for finding in failure.findings)


def test_the_gradients_of_one_visible_key_are_as_exact_as_the_sums_that_cancel() -> None:
    """dq is 0, and is p * (dout . v - dout . out) * k: two sums of 128 terms."""
    texts = ["TileGradients(rows=17, columns=17, left=0, right=0, dims=(128, 128), scale=1.0)"]
    texts += ["TileGradients(rows=16, heads=(2, 1), dims=(128, 128), scale=1.0)"]
    for error, verdict in ((0.0, "right"), (1e-4, "wrong")):

        def backward(*arguments: Any, error: float = error, **options: Any) -> Any:
            dq, dk, dv = Lower().tile_backward(*arguments, **options)
            return dq + error, dk, dv

        impl = Implementation(SimpleNamespace(tile=Lower().tile, tile_backward=backward))
        assert [play_task(impl, Task("kernel", "kernel-backward", text)).verdict for text in texts] == [verdict] * 2


def test_gradients_of_few_keys_may_have_a_delta_of_a_rounded_output() -> None:
    text = 'TileGradients(rows=4, columns=2, heads=(2, 1), dims=(64, 64), scale=1.0, dtype="float16", seed=97)'
    assert play_task(load("cp_fast"), Task("kernel", "kernel-backward", text)).verdict == "right"


# ---- planted bugs: linear layers


@pytest.mark.parametrize(
    "name", [pytest.param("maps-in-reverse", marks=pytest.mark.thorough), "convolution-halo-one-short"]
)
def test_a_failure_replays_and_is_in_the_report(name: str) -> None:
    mutant, impl = MUTANTS[name], load("cp_ref")
    with mutant.planted():
        result = run_tier(impl, mutant.tier, EVERYTHING, Profile(60, derandomize=True, shrink_s=2.0))
        (smallest,) = result.smallest
        assert tasks_of(smallest.text) == [Task("linear", mutant.tier, smallest.text)]
        (again,) = replay(impl, smallest.text)
        assert again.count("wrong") == 1
    assert replay(impl, smallest.text)[0].passed == 1
    found = summary(RunRecord({"impl": "cp_ref"}, tuple(result.played)))
    assert smallest.text in [failure.text for failure in found.failures]
    assert found.by("level")["linear"][0]["wrong"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda out: out * 1.001, "should be"),
        (lambda out: out.float(), "dtype"),
        (lambda out: out[..., :1], "shape"),
        (lambda out: torch.where(out == 0, 1.0, out), "not zero where there is no token"),
    ],
)
def test_wrong_results_are_named(spoil: Any, words: str) -> None:
    def layer(*tensors: torch.Tensor, **arguments: Any) -> Any:
        return spoil(cp_ref.linear_attention(*tensors, **arguments))

    text = str(LinearAttention(batch_of([(5, 8), (8, 8)], tail=2 if "zero" in words else 0)))
    played = play_task(like_the_reference(linear_attention=layer), Task("linear", "linear", text))
    assert played.verdict == "wrong"
    assert words in " ".join(played.findings)
