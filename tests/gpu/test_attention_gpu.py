"""cp_fast on one GPU, all ranks over the simulated group: exact counts and errors within budget, for each CUDA backend.

Lengths lie around the kernels' block sizes; head dims are few, since each costs FA4 some compilations.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from conformance.adapters.cp_fast import OneBackend
from conformance.case import Case
from conformance.checks.probes import check_probes
from conformance.checks.reference import UnsupportedCase
from conformance.checks.values import check_budget, check_logic
from cp_fast import masks
from cp_fast.compile.chosen_head_chunks import choose_head_chunks
from cp_fast.kernels.attention.choose_backend import by_name
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.words import CP_COMM_TYPES, Feature
from tests.cp_fast.compile.planned_at import ALWAYS_CHUNKS, ALWAYS_WAIT, planned_at
from tests.spec.problems import problems_of_areas

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def implementation(backend: str) -> Any:
    """cp_fast with one backend by name."""
    reason = None if backend == "auto" else by_name(backend).why_not()
    if reason is not None:
        pytest.skip(f"needs backend {backend}: {reason}")
    return OneBackend(backend)


def dense(cp_size: int, chunk: int, batch: int = 2) -> tuple[Sequence, ...]:
    length = 2 * cp_size * chunk
    return (Sequence(length, length, length, length),) * batch


def packed(cp_size: int) -> tuple[Sequence, ...]:
    """Real lengths that end anywhere in their slots; an empty sequence, one of a single token."""
    unit = 2 * cp_size
    slots = [unit * n for n in (150, 1, 0, 33, 65, 9)]
    lens = [slots[0] - 5, 1, 0, slots[3], slots[4] - unit - 1, slots[5] - 2]
    return tuple(Sequence(n, n, s, s) for n, s in zip(lens, slots, strict=True))


def crossed(cp_size: int) -> tuple[Sequence, ...]:
    unit = 2 * cp_size
    return (
        Sequence(unit * 40 - 3, unit * 70 - 1, unit * 40, unit * 70),
        Sequence(unit * 30, unit * 9, unit * 30, unit * 9),
    )


HEADS = {"heads_q": 4, "heads_kv": 2, "d_qk": 64, "d_v": 64, "dtype": "bfloat16"}
THD = {"qkv_format": "thd", **HEADS}


def cases(cp_size: int) -> dict[str, Case]:
    """Named cases for one group size. Schedules are of no library: other tests play all of them on a CPU."""
    make = partial(Problem, cp_size)
    lens = packed(cp_size)
    return {
        "bshd causal": Case(make(dense(cp_size, 65), qkv_format="bshd", **HEADS)),
        "sbhd no_mask": Case(make(dense(cp_size, 40), qkv_format="sbhd", attn_mask_type="no_mask", **HEADS)),
        "sbhd causal, contiguous": Case(make(dense(cp_size, 64), layout="contiguous", qkv_format="sbhd", **HEADS)),
        "bshd padding": Case(
            make(
                (Sequence(130, 130, 480, 480), Sequence(479, 479, 480, 480)),
                qkv_format="bshd",
                attn_mask_type="padding_causal",
                **HEADS,
            )
        ),
        "thd causal, padding, tail": Case(make(lens, **THD), tail_q=cp_size * 7, tail_kv=cp_size * 3, use_plan=True),
        "thd causal, contiguous": Case(make(lens, layout="contiguous", **THD)),
        "thd window (100, 0)": Case(make(lens, window_size=(100, 0), **THD)),
        "thd window (30, 20)": Case(make(lens, attn_mask_type="padding", window_size=(30, 20), **THD)),
        "thd cross causal": Case(make(crossed(cp_size), **THD)),
        "thd cross bottom-right": Case(make(crossed(cp_size), attn_mask_type="causal_bottom_right", **THD)),
        "thd cross window": Case(
            make(crossed(cp_size), attn_mask_type="padding_causal_bottom_right", window_size=(50, 0), **THD)
        ),
        "thd sink": Case(make(lens, softmax_type="learnable", **THD)),
        "thd deterministic, strided": Case(make(lens, **THD), deterministic=True, strided=True),
        "float16, d 128, 8 over 1": Case(
            make(dense(cp_size, 33, 1), heads_q=8, heads_kv=1, d_qk=128, d_v=128, dtype="float16")
        ),
    }


BACKENDS = ("fa4", "cudnn", "fa2", "torch")


def pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """(backend, name of a case): all but what the library lacks and `test_what_is_lacking_is_named` looks at."""
    return [(b, name) for name in names for b in BACKENDS if not (b == "cudnn" and "deterministic" in name)]


def at_sizes(names: list[str]) -> Iterator[tuple[str, str, int]]:
    """Every pair, and every case at each size: fa4 at 3 ranks and at 1 or 8, the others at one of them."""
    sizes = (1, 3, 8)
    for backend, name in pairs(names):
        turn = BACKENDS.index(backend) + names.index(name)
        chosen = (sizes[1], sizes[2 * (turn % 2)]) if backend == "fa4" else (sizes[turn % 3],)
        yield from ((backend, name, cp_size) for cp_size in chosen)


@pytest.mark.parametrize(("backend", "name", "cp_size"), at_sizes(list(cases(2))))
def test_counts_and_budgets(backend: str, name: str, cp_size: int) -> None:
    impl, case = implementation(backend), cases(cp_size)[name]
    assert check_budget(impl, case, "cuda") == []
    assert check_probes(impl, case, "cuda") == []


def schedule_cases() -> dict[str, Case]:
    """The other schedules, which share the kernels and differ in plan, exchange and merge."""
    heads = {2: (4, 2), 3: (6, 3), 4: (8, 2), 8: (8, 2)}  # fewer kv heads than ranks at 4 and 8
    found = {}
    for cp_size, (h_q, h_kv) in heads.items():
        sizes = {"qkv_format": "thd", **HEADS, "heads_q": h_q, "heads_kv": h_kv}
        for comm, a2a_size in (("all_gather", 1), ("a2a", cp_size), ("a2a+p2p", 2)):
            if cp_size % a2a_size:
                continue
            make = partial(Problem, cp_size, packed(cp_size), comm, a2a_size)
            name = f"{comm}, cp {cp_size}"
            found[f"{name}, causal, tail"] = Case(make(**sizes), tail_q=cp_size, tail_kv=cp_size, use_plan=True)
            found[f"{name}, window, sink"] = Case(make(window_size=(90, 0), softmax_type="learnable", **sizes))
            contiguous = make(layout="contiguous", attn_mask_type="padding", **sizes)
            found[f"{name}, contiguous, deterministic"] = Case(contiguous, deterministic=True)
    return found


SCHEDULES = schedule_cases()


def of_schedules(names: list[str]) -> Iterator[tuple[str, str]]:
    """All of fa4, and a third of each other library: what differs is the exchange, which all of them share."""
    for backend, name in pairs(names):
        if backend == "fa4" or (names.index(name) + names.index(name) // 3) % 3 == BACKENDS.index(backend) - 1:
            yield backend, name


@pytest.mark.parametrize(("backend", "name"), of_schedules(list(SCHEDULES)))
def test_the_other_schedules(backend: str, name: str) -> None:
    impl = implementation(backend)
    assert check_budget(impl, SCHEDULES[name], "cuda") == []
    assert check_probes(impl, SCHEDULES[name], "cuda") == []


MORE = {
    "MLA 192/128": ({"heads_q": 4, "heads_kv": 4, "d_qk": 192, "d_v": 128, "dtype": "bfloat16"}, {}),
    "GQA with MLA dims": ({"heads_q": 8, "heads_kv": 2, "d_qk": 192, "d_v": 128, "dtype": "bfloat16"}, {}),
    "odd head dims": ({"heads_q": 4, "heads_kv": 2, "d_qk": 60, "d_v": 60, "dtype": "bfloat16"}, {}),
    "gradient through lse": (HEADS, {"return_lse": True, "loss": "out+lse"}),
    "max_logit": (HEADS, {"return_max_logit": True}),
}


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_head_dims_and_more_results(backend: str, name: str) -> None:
    heads, call = MORE[name]
    case = Case(Problem(3, packed(3), qkv_format="thd", **heads), **call)
    assert check_budget(implementation(backend), case, "cuda") == []


def test_auto_has_what_no_library_has() -> None:
    """Head dims over 256, float32 and float64 on a GPU; auto takes PyTorch's products there, and nowhere else."""
    for heads in ({"d_qk": 288, "d_v": 288, "dtype": "bfloat16"}, {"d_qk": 64, "d_v": 64, "dtype": "float32"}):
        case = Case(Problem(2, packed(2), qkv_format="thd", heads_q=4, heads_kv=2, **heads))
        assert check_budget(implementation("auto"), case, "cuda") == []


@pytest.mark.parametrize("comm", ["p2p", "a2a"])
def test_fa2_has_softcap_with_the_package(comm: str) -> None:
    case = Case(Problem(2, packed(2), comm, 2 if comm == "a2a" else 1, softcap=2.0, qkv_format="thd", **HEADS))
    if Feature.SOFTCAP not in by_name("fa2").features:
        with pytest.raises(UnsupportedCase, match=r"fa2'? lacks softcap"):
            check_budget(implementation("fa2"), case, "cuda")
        pytest.skip("needs the flash-attn package")
    assert check_budget(implementation("fa2"), case, "cuda") == []


@pytest.mark.parametrize(
    ("backend", "problem", "call", "what"),
    [
        ("cudnn", {}, {"deterministic": True}, "deterministic"),
        ("cudnn", {"softcap": 30.0}, {}, "softcap"),
        ("fa2", {"d_qk": 288, "d_v": 288}, {}, "head dim > 256"),
        ("fa4", {"d_qk": 288, "d_v": 288}, {}, "head dim > 256"),
    ],
)
def test_what_is_lacking_is_named(backend: str, problem: dict[str, Any], call: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedCase, match=f"{backend}'? lacks .*{what}"):
        check_budget(implementation(backend), Case(Problem(2, dense(2, 8), **(HEADS | problem)), **call), "cuda")


# ---- areas: named and random masks, counted exactly and within budget


LENGTHS = (300, 200, 140)  # tokens, each document with some padding behind it
SLOTS = (320, 200, 160)
MASKS = {
    "prefix_lm": [masks.prefix_lm(n // 2, n) for n in LENGTHS],
    "shared_prefix": [masks.shared_prefix(n // 5, [n // 5] * 4) for n in LENGTHS],
    "tree": [masks.tree([n // 4] * 4, [-1, 0, 1, 0]) for n in LENGTHS],
    "block_causal": [masks.block_causal(n, 48) for n in LENGTHS],
    "chunked": [masks.chunked(n, 64) for n in LENGTHS],
    "first_tokens_and_window": [masks.first_tokens_and_window(n, 9, 50) for n in LENGTHS],
    "dilated_blocks": [masks.dilated_blocks(n, 20, 2) for n in LENGTHS],
}
SEQUENCES = tuple(Sequence(n, n, s, s) for n, s in zip(LENGTHS, SLOTS, strict=True))


NAMED = [("fa4", name, comm) for name in MASKS for comm in CP_COMM_TYPES]
NAMED += [("torch", name, CP_COMM_TYPES[n % len(CP_COMM_TYPES)]) for n, name in enumerate(MASKS)]


@pytest.mark.parametrize(("backend", "name", "comm"), NAMED)
def test_named_masks(backend: str, name: str, comm: str) -> None:
    rows = masks.packed(MASKS[name], [0, *accumulate(SLOTS)])
    size = {"a2a": 4, "a2a+p2p": 2}.get(comm, 1)
    areas = tuple(map(tuple, rows.tolist()))
    problem = replace(Problem(4, SEQUENCES, comm, size, **THD), areas=areas)
    impl: Any = implementation(backend)
    case = Case(problem, use_plan=True, return_lse=True, loss="out+lse")
    assert check_probes(impl, case, "cuda") == []
    assert check_budget(impl, case, "cuda") == []


@pytest.mark.parametrize("comm", ["p2p", "all_gather"])
@pytest.mark.parametrize("name", MASKS)
def test_keys_that_wait(name: str, comm: str) -> None:
    """As with many rows, of which these have too few."""
    with planned_at(ALWAYS_WAIT):
        test_named_masks("fa4", name, comm)


@pytest.mark.parametrize("backend", ["fa4", "torch"])
@settings(
    max_examples=int(os.environ.get("CP_AREAS", "10")), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(problem=problems_of_areas())
def test_random_areas(backend: str, problem: Problem) -> None:
    """Every pair is counted; `torch` in float64 meets the oracle besides. `benchmarks.conformance_gpu` draws many."""
    impl: Any = implementation(backend)
    dims = {"d_qk": 64, "d_v": 64, "dtype": "bfloat16"} if backend == "fa4" else {}
    case = Case(replace(problem, **dims), return_lse=True, loss="out+lse")
    try:
        assert check_probes(impl, case, "cuda") == []
        if backend == "torch":
            assert check_logic(impl, case, "cuda") == []
    except UnsupportedCase as refusal:
        pytest.fail(str(refusal))


# ---- head chunks


CHUNKED = {"a2a": (2, 2), "a2a+p2p": (4, 2)}  # cp_size and a2a_size


@pytest.mark.parametrize("window", [-1, 90])
@pytest.mark.parametrize("comm", CHUNKED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_head_chunks(backend: str, comm: str, window: int) -> None:
    """With a plan and a tail, a sink where there is a window."""
    cp_size, a2a_size = CHUNKED[comm]
    sizes: dict[str, Any] = {**THD, "heads_q": 16, "heads_kv": 8}
    problem = Problem(cp_size, packed(cp_size), comm, a2a_size, window_size=(window, 0), **sizes)
    case = Case(
        replace(problem, softmax_type="vanilla" if window < 0 else "learnable"), cp_size, cp_size, use_plan=True
    )
    with planned_at(ALWAYS_CHUNKS):
        assert len(choose_head_chunks(problem)) > 1
        assert check_budget(implementation(backend), case, "cuda") == []
        assert check_probes(implementation(backend), case, "cuda") == []
