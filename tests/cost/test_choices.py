"""What "auto" chooses against the records, and its prices against the machine of the cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cost_model.choices import FILES, LOSES_MORE, WITHIN, Case, cases
from cp_fast.compile.machine import costs, read_machine
from cp_fast.tools.cost.predict import predict
from cp_ref.schedules.planners.choose_schedule import PRICES, estimates
from cp_ref.schedules.words import AUTO

CASES = list(cases())


def test_the_choice_is_about_as_fast_as_the_fastest_measured() -> None:
    """In every case of the records, but for those that are said to lose more, with their reasons."""
    assert {one.record for one in CASES} == set(FILES)
    assert len(CASES) > 40
    assert {(one.record, one.name) for one in CASES if one.loss(one.chosen()) > WITHIN} == set(LOSES_MORE)
    assert max(one.loss(one.chosen()) for one in CASES) < 0.025


@pytest.mark.parametrize("name", AUTO)
def test_no_schedule_is_always_chosen_well(name: str) -> None:
    """So there is something to choose."""
    assert max(one.loss(name) for one in CASES) > 0.1


@pytest.mark.parametrize("one", [one for one in CASES if one.problem.d_qk == 128][::4], ids=lambda one: one.name)
def test_estimates_are_near_those_of_the_cost_model(one: Case) -> None:
    """Which compiles every schedule."""
    for found in estimates(one.problem, AUTO):
        size = one.problem.cp_size if found.name == "a2a" else 1
        said = predict(replace(one.problem, cp_comm_type=found.name, a2a_size=size), read_machine("h200-nvlink"))
        assert found.us == pytest.approx(1e6 * said.seconds, rel=0.13)


def test_prices_are_those_of_the_machine() -> None:
    machine, at = read_machine("h200-nvlink"), costs()
    first = machine.kernels[0]
    edge = (first.forward.edge + 2.5 * first.backward.edge) / 3.5
    assert PRICES.domain == machine.domain
    assert PRICES._replace(domain=0, grad_copies=0, split=0, of_a_gib=0) == pytest.approx(
        (
            at.flops_per_us,
            edge,
            at.bytes_per_us,
            1e3 * machine.network.gbytes_s,
            0,
            machine.peer_memory.latency_us + machine.step_us,
            at.launch_us,
            machine.host.step_us,
            1e3 * machine.copy_gbytes_s,
            at.idle_rows,
            0,
            0,
            0,
        ),
        rel=0.02,
    )
