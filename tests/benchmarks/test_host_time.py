"""The host's time by parts, tried on the CPU: one rank without peers, and kernels that only allocate."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.planning import host_time


@pytest.mark.parametrize("schedule", ["p2p", "a2a"])
def test_the_parts_of_a_pass_add_up(schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass has all of its parts, and their times are the time of the pass."""
    took: list[float] = []
    end = host_time.Clock.end
    monkeypatch.setattr(host_time.Clock, "end", lambda *given: took.append(1e6 * given[2]) or end(*given))
    layout, lengths = host_time.CASES["sixteen documents"]
    spent = host_time.measured(host_time._on_cpu(schedule, layout, lengths), rounds=1)
    for n, direction in enumerate(("forward", "backward")):
        parts = {part: times for (of, part), times in spent.items() if of == direction}
        assert {"whole", "edge", "format", "loop", "post", "messages", "launch", "wait"} <= set(parts)
        nested = ("whole", "engine", *host_time._NESTED)
        sums = sum(times[0][1] for part, times in parts.items() if part not in nested)
        assert sums == pytest.approx(took[n * host_time._IN_A_ROW])
