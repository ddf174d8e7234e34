"""What `cp_comm_type="auto"` chooses against what was measured.

    python -m benchmarks.cost_model.choices                     # every case of the records, and what was lost
    python -m benchmarks.cost_model.choices --records speed_peers_2x_h100
    python -m benchmarks.cost_model.choices --fit               # the fitted prices that lose least, and how clearly

A case is one problem of one record, at one commit and transport, with rows of all schedules that auto chooses from. Its
loss is the chosen schedule's time over the fastest one's, forward and backward, less one. Repeated rows of a schedule
count by their least time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Annotated, NamedTuple

import typer

from benchmarks.cost_model.records import read_records
from cp_ref.schedules.planners.choose_schedule import PRICES, Prices, choose_schedule, estimates
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.words import AUTO

__all__ = ["FILES", "LOSES_MORE", "WITHIN", "Case", "cases"]

FILES = (  # of the executor as it is; older records are of slower ones
    "speed_2x_h200",
    "speed_4x_h200",
    "speed_turns_2x_h200",
    "speed_graphs_2x_h200",
    "speed_peers_2x_h100",
    "speed_peers_4x_h100",
    "a2a_home_2x_h100",
    "a2a_home_4x_h100",
)
WITHIN = 0.02
LOSES_MORE = {  # (record, case): why
    ("speed_4x_h200", "4 x dual_chunk: 32,768 tokens, 64 heads over 8 of 128"): "measured while own keys "
    "attended first in all_gather's forward pass",
}


class Case(NamedTuple):
    """A problem that was measured by all schedules.

    Attributes:
        problem: by all_gather.
        times: milliseconds, forward and backward, by schedule.
    """

    record: str
    problem: Problem
    times: dict[str, float]

    @property
    def name(self) -> str:
        """In few words."""
        lengths, (left, _) = self.problem.lengths.len_q, self.problem.window_size
        heads = f", {self.problem.heads_q} heads over {self.problem.heads_kv} of {self.problem.d_qk}"
        return (
            f"{self.problem.cp_size} x {self.problem.layout}: {sum(lengths):,} tokens"
            + (f" in {len(lengths)} documents" if len(lengths) > 1 else "")
            + (f", window {left:,}" if left >= 0 else "")
            + (heads if heads != ", 32 heads over 8 of 128" else "")
        )

    def chosen(self, at: Prices = PRICES) -> str:
        """The schedule that auto takes."""
        return choose_schedule(self.problem, AUTO, at).cp_comm_type

    def loss(self, name: str) -> float:
        """Of a schedule."""
        return self.times[name] / min(self.times.values()) - 1


def cases(names: Iterable[str] = FILES) -> Iterator[Case]:
    """The cases of these records."""
    for name in names:
        found: dict[tuple[str, str, Problem], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in read_records(name):
            if row.library == "cp_fast" and row.messages != "graph":
                problem = replace(row.problem, cp_comm_type="all_gather", a2a_size=1)
                found[row.commit, row.messages, problem][row.problem.cp_comm_type].append(row.both_ms)
        for (_, _, problem), times in found.items():
            if set(AUTO) <= set(times):
                yield Case(name, problem, {schedule: min(times[schedule]) for schedule in AUTO})


def _margin(case: Case, at: Prices) -> float:
    """By how much the price of the best schedule that loses more than `WITHIN` is above that of the others."""
    found = estimates(case.problem, AUTO, at)
    least = min(one.size for one in found)
    prices = {one.name: one.price(least, at) for one in found}
    good = min(price for name, price in prices.items() if case.loss(name) <= WITHIN)
    return min((price / good - 1 for name, price in prices.items() if case.loss(name) > 1.5 * WITHIN), default=1.0)


def fitted(found: list[Case]) -> list[tuple[float, float, Prices]]:
    """Fitted prices on a grid, the best first: the sum of what is lost above `WITHIN`, and the least margin."""
    tried: list[tuple[float, float, Prices]] = []
    for copies, split in product((2, 3, 4, 5, 7), (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.07)):
        at = PRICES._replace(grad_copies=copies, split=split)
        lost = sum(max(0.0, one.loss(one.chosen(at)) - WITHIN) for one in found)
        tried.append((lost, min(_margin(one, at) for one in found), at))
    return sorted(tried, key=lambda one: (round(one[0], 4), -one[1]))


def main(
    records: Annotated[str, typer.Option(help="Files of benchmarks/results, without .csv, with commas.")] = ",".join(
        FILES
    ),
    fit: Annotated[bool, typer.Option(help="Try other prices.")] = False,
) -> None:
    """Print every case, or the best prices."""
    found = list(cases(records.split(",")))
    if fit:
        for lost, margin, at in fitted(found)[:8]:
            print(f"lost {lost:.4f}, margin {margin:+.4f}: grad_copies {at.grad_copies}, split {at.split}")
        return
    for one in found:
        chosen, said = one.chosen(), {it.name: it.us / 1000 for it in estimates(one.problem, AUTO)}
        rows = ", ".join(f"{name} {one.times[name]:.2f} ({said[name]:.2f})" for name in AUTO)
        mark = "  <--" if one.loss(chosen) > WITHIN else ""
        print(f"{one.record:22} {one.name:62} {chosen:10} {one.loss(chosen):+.3f}   {rows}{mark}")
    losses = [one.loss(one.chosen()) for one in found]
    within = sum(loss <= WITHIN for loss in losses)
    print(
        f"{within} of {len(found)} cases within {WITHIN:.0%} of the fastest; the most that is lost: {max(losses):.1%}"
    )


if __name__ == "__main__":
    typer.run(main)
