"""Records for the tests of report, known failures and coverage: real drawn cases with made-up verdicts."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from random import Random

from hypothesis import HealthCheck, Phase, given, settings

from conformance.case import Case
from conformance.problems.strategies import cases
from conformance.record import Played, RunRecord, Verdict
from conformance.report.failures import MOST, visible

__all__ = ["META", "drawn_cases", "made_up"]

META = {
    "impl": "acme.attention:ring",
    "versions": {"python": "3.11.9", "torch": "2.11.0", "cp-attention": "0.1.0"},
    "device": "cuda (NVIDIA H200)",
    "date": "2026-01-31 12:00 UTC",
    "profile": "ci",
    "seed": 0,
    "command": "python -m conformance --impl acme.attention:ring --device cuda --profile ci --report report",
    "notes": ["known_failures.toml: entry 3 (softcap = 2.0) no longer fails: remove it; all 12 problems passed"],
}
_TIERS = ("plan", "logic", "probes", "budget")


@lru_cache(maxsize=4)
def drawn_cases(count: int) -> tuple[Case, ...]:
    """The same cases every time."""
    found: list[Case] = []

    @settings(
        max_examples=count,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    @given(cases(dtypes=("float64", "float32", "bfloat16", "float16")))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return tuple(found)


def made_up(count: int) -> RunRecord:
    """A run of an implementation with some bugs: `count` problems, then a few of other levels and tiers."""
    drawn, random = drawn_cases(min(count, 300)), Random(0)
    short = [case for case in drawn if len(case.problem.sequences) < 20]
    played = []
    for n in range(count):
        case = drawn[n] if n < len(drawn) else replace(short[n % len(short)], seed=1000 + n)  # as other problems
        played.append(_judged(case, _TIERS[n % len(_TIERS)], random))
    return RunRecord(META, (*played, *_others()))


def _judged(case: Case, tier: str, random: Random) -> Played:
    verdict, findings = _verdict(case, tier)
    ratios = {}
    if tier == "budget" and verdict in ("right", "wrong"):
        for result, scale in (("out", 0.3), ("lse", 0.1), ("dq", 0.45), ("dk", 0.5), ("dv", 0.4)):
            ratios[f"{result} max"] = random.lognormvariate(0, 0.25) * scale
            ratios[f"{result} mean"] = random.lognormvariate(0, 0.15) * scale * 1.3
        if verdict == "wrong":
            ratios["dk max"] = 1.25 + random.random()
    pairs = None
    shape = case.problem.starts_q[-1] + case.tail_q, case.problem.starts_kv[-1] + case.tail_kv
    if verdict == "wrong" and tier == "probes" and max(shape) <= MOST:
        pairs = tuple(sorted((q, k - 1) for q, k in visible(case) if k))  # the mask is one key to the left
    return Played("schedule", tier, str(case), verdict, findings, ratios, random.random() / 10, pairs=pairs)


def _verdict(case: Case, tier: str) -> tuple[Verdict, tuple[str, ...]]:
    p = case.problem
    right_window = p.window_size[1] >= 0 and not p.causal
    if p.softmax_type == "learnable" and p.cp_comm_type == "a2a+p2p":
        return "unsupported", (
            "a2a+p2p with softmax_type learnable is not supported:\n  ring lacks softmax_type learnable",
        )
    if p.d_qk != p.d_v and p.heads_q != p.heads_kv:
        return "unsupported", ("this problem is not supported:\n  fa2 lacks GQA with d_qk != d_v",)
    if right_window and p.cp_comm_type == "all_gather":
        return "wrong", (
            "sequence 0 query 3 (rank 1), head 0 counts 5 visible keys, but there are 4",
            "dv is wrong too",
        )
    if not p.sequences and p.cp_comm_type == "p2p":
        return "crashed", ("rank 1 died with signal 11 (SIGSEGV)",)
    if p.bottom_right and p.layout == "contiguous" and case.use_plan and p.cp_comm_type == "p2p":
        return "hung", ("rank 0 and rank 2 did not finish within 20 s",)
    if case.strided and p.softcap > 0 and p.cp_comm_type == "a2a":
        return "known", ("known: softcap with odd strides (https://example.org/issues/3)", "out is wrong")
    return "right", ()


def _others() -> list[Played]:
    return [
        Played("helpers", "helpers", "helper thd_read_half_tensor 3", "right", seconds=0.01),
        Played("helpers", "helpers", "helper pad_thd_sequences_for_cp 1", "wrong", ("labels are padded with 0",)),
        Played("merge", "merge", "merge", "missing", ("the implementation does not export merge",)),
        Played("kernel", "kernel", "kernel", "missing", ("the implementation does not export band_tile",)),
        Played("schedule", "errors", "error lengths-decrease", "wrong", ("rank 1 raised nothing; ValueError was due",)),
        Played("schedule", "errors", "error offset-missing", "right"),
        Played("schedule", "budget", "special huge", "out of memory", ("rank 3: CUDA out of memory",), seconds=2.5),
    ]
