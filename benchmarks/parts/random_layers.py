"""Random linear layers in low precision over the simulated group, in processes that share one device."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from queue import Empty
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import cp_fast
from cp_ref.common.linear.linear_calls import KINDS
from cp_ref.spec import Problem
from tests.linear.errors import relative_errors
from tests.linear.played import Layer
from tests.linear.random_problems import linear_problems

__all__ = ["RandomRun", "play_random", "too_large", "tune_only", "use_pieces"]

GRACE_S = 20.0  # for the problem that a worker is at when the time is up
FEW_ROWS = st.sampled_from([9, 70, 300])  # of a document
LAYERS = st.builds(
    Layer,
    kind=st.sampled_from(KINDS),
    heads=st.just(2),  # all sizes are those of `check`: others cost seconds of compilation each
    shared=st.just(2),
    d_k=st.just(64),
    d_v=st.just(128),
    initial_state=st.booleans(),
    output_final_state=st.booleans(),
)


@dataclass(frozen=True)
class RandomRun:
    """What is played.

    Attributes:
        problems: how many, of all workers together.
        workers: processes.
        seconds: stop drawing after so long.
        seed: of the first worker; the next one has the next.
        device: cuda or cpu.
    """

    problems: int
    workers: int
    seconds: float
    seed: int
    device: str


def too_large(spread: dict[str, float], alone: dict[str, float]) -> list[str]:
    """The results whose error is beyond three times the error of the same call on one rank and a hundredth."""
    return [name for name in spread if not spread[name] <= 3 * alone[name] + 1e-2]


def tune_only(part: int, parts: int) -> None:
    """Triton's tuners look at one of so many parts of their configurations, and at one configuration at least."""
    from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]

    init = Autotuner.__init__

    def first(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **options: Any) -> None:
        some = configs[part::parts] or configs[:1]
        init(self, fn, arg_names, some, *rest, **options)

    Autotuner.__init__ = first


class Enough(KeyboardInterrupt):
    """Ends the drawing: Hypothesis takes any other exception for a finding, and would go on."""


def play_random(run: RandomRun) -> dict[str, Any]:
    """Counts by kind, layout, group size and pieces, the failures, and what did not come to an end.

    Half of the problems are played with fragments in pieces of about one chunk, where the library has pieces.
    """
    context, until = get_context("spawn"), time.time() + run.seconds
    results = context.Queue()
    workers = [context.Process(target=_worker, args=(n, run, until, results)) for n in range(run.workers)]
    for process in workers:
        process.daemon = True
        process.start()
    played: list[dict[str, Any]] = []
    ended: list[str] = []
    at_work = set(range(run.workers))
    while at_work:
        try:
            number, found = results.get(timeout=5)
        except Empty:
            dead = {n for n in at_work if workers[n].exitcode not in (None, 0)}
            if time.time() > until + GRACE_S:
                dead = set(at_work)
            ended += [f"worker {n} did not come to an end" for n in sorted(dead)]
            at_work -= dead
            continue
        if isinstance(found, dict):
            played.append(found)
            continue
        at_work.discard(number)
        if found is not None:
            ended.append(f"worker {number}: {found}")
    for process in workers:
        process.kill()
    largest: dict[str, float] = {}
    for one in played:
        for name, error in one.get("spread", {}).items():
            largest[name] = max(largest.get(name, 0.0), error)
    return {
        "asked for": run.problems,
        "played": len(played),
        "right": sum(not one["wrong"] for one in played),
        "counts": {name: dict(Counter(str(one[name]) for one in played)) for name in ("kind", "layout", "cp", "cut")},
        "largest errors": largest,
        "failures": [one for one in played if one["wrong"]],
        "ended early": ended,
    }


def _worker(number: int, run: RandomRun, until: float, results: Any) -> None:
    """Puts (number, what was played) after each problem, at the end (number, None), or a text of what went wrong."""
    torch.set_num_threads(1)
    if run.device == "cuda":
        tune_only(0, 1000)
    wanted, played = -(-run.problems // run.workers), 0

    @hypothesis.seed(run.seed + number)
    @settings(
        max_examples=2 * wanted,  # of which it may repeat some
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    @given(FEW_ROWS.flatmap(lambda most: linear_problems((2, 3, 4, 8), most)), LAYERS, st.booleans(), st.integers(0))
    def one(problem: Problem, layer: Layer, cut: bool, seed: int) -> None:
        nonlocal played
        if played >= wanted or time.time() > until:
            raise Enough
        played += 1
        results.put((number, _play(problem, layer, cut, seed % 2**31, run.device)))

    try:
        with suppress(Enough):
            one()
        results.put((number, None))
    except BaseException as error:
        results.put((number, f"{type(error).__name__}: {error}"))


def _play(problem: Problem, layer: Layer, cut: bool, seed: int, device: str) -> dict[str, Any]:
    cut = use_pieces(small=cut and device == "cuda")
    found: dict[str, Any] = {"kind": layer.kind, "layout": problem.layout_name, "cp": problem.cp_size, "cut": cut}
    try:
        spread, alone = (
            relative_errors(cp_fast, problem, layer, torch.bfloat16, device, cp_size=size, seed=seed)
            for size in (None, 1)
        )
    except Exception as error:
        return found | {"wrong": [f"{type(error).__name__}: {error}"], "case": f"{problem} {layer} seed {seed}"}
    wrong = too_large(spread, alone)
    found |= {"spread": spread, "wrong": wrong}
    return found | ({"alone": alone, "case": f"{problem} {layer} seed {seed}"} if wrong else {})


def use_pieces(*, small: bool) -> bool:
    """Whether flash-linear-attention's fragments are now cut in small pieces; else they are cut as always."""
    try:
        from cp_fast.linear.fla import piecewise
    except ImportError:
        return False
    piecewise.LEAST, piecewise.PROGRAMS = (1, 2**40) if small else (16, 128)
    return small
