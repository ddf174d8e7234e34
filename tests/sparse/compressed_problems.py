"""Random problems of compressed keys for a GPU: of few kinds of kernels, since each has to be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from conformance.problems.compressed import compressed_attentions, compressions

__all__ = ["random_problems"]

_HEADS: dict[str, Any] = {
    "heads_q": 8,
    "heads_kv": 1,
    "d_qk": 64,
    "d_v": 64,
    "cp_comm_type": "all_gather",
    "a2a_size": 1,
}


def random_problems(count: int, part: int = 0, parts: int = 1, dtype: str = "bfloat16") -> Iterator[Any]:
    """A part of `count` problems, half of them of `compress_keys`, the others of `compressed_attention`."""
    for strategy, more in ((compressions, {}), (compressed_attentions, {"top_k": 8})):
        for number, problem in enumerate(_drawn(strategy(dtypes=(dtype,)), count // 2)):
            if number % parts == part:
                case = replace(problem.case, problem=replace(problem.problem, **_HEADS))
                yield replace(problem, case=case, **more)


def _drawn(strategy: SearchStrategy[Any], count: int) -> list[Any]:
    """The same problems every time."""
    found = list[Any]()

    @settings(
        max_examples=count, phases=[Phase.generate], derandomize=True, database=None, deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(strategy)
    def keep(problem: Any) -> None:
        found.append(problem)

    keep()
    return found
