"""Random mutations of valid schedules: each is refused, or accepted and right on both packages.

    python -m tests.refusals.attacks.attack_schedules --mutations 20000 --commit COMMIT --out attack_schedules.json

A text may be refused by `Schedule.parse` with ValueError, a schedule by `verify` with InvalidSchedule, and then
`make_plan` refuses it too; any other error is a finding. Both packages play each accepted one over the simulated group,
and some over gloo. The results are the oracle's: out, lse, max_logit, dq, dk and dv in float64.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar
from unittest.mock import patch

import torch.distributed as dist
import typer
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import cp_fast
import cp_ref
from conformance.case import Case
from conformance.checks.play import Gathered, _collect, _one_rank  # pyright: ignore[reportPrivateUsage]
from conformance.checks.reference import exact_results
from conformance.checks.values import check_logic, compare_result
from conformance.implementation import as_implementation
from conformance.tensors import build
from cp_ref.groups.process_groups import ProcessMember
from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import Schedule, Step, Tiles
from cp_ref.schedules.verify.proof import InvalidSchedule, verify
from tests.dist.workers import Processes
from tests.refusals.attacks.mutations import changed_objects, changed_text
from tests.spec.random_schedules import backward_ring, ring_of_rings, scheduled_problems

__all__ = ["Attack", "bases"]

PACKAGES = {"cp_ref": cp_ref, "cp_fast": cp_fast}
GLOO = 4  # ranks
Base = tuple[Problem, Schedule]


def bases(random: int = 30) -> list[Base]:
    """Valid schedules: of every planner, of none, and so many random ones."""
    two = Sequence(6, 6, 8, 8), Sequence(8, 8, 8, 8)
    some = Problem(4, two, qkv_format="thd", heads_q=4, heads_kv=2, d_qk=3, d_v=2, dtype="float64")
    cross = replace(some, cp_size=3, qkv_format="bshd", sequences=(Sequence(6, 12, 6, 12),) * 2)
    problems = [
        some,
        replace(some, cp_size=2, layout="contiguous", window_size=(3, 0), softmax_type="learnable"),
        replace(some, cp_size=3, cp_comm_type="all_gather", attn_mask_type="padding"),
        replace(cross, attn_mask_type="causal_bottom_right"),
        replace(some, cp_size=2, cp_comm_type="a2a", a2a_size=2, softmax_type="off-by-one"),
        replace(some, cp_comm_type="a2a", a2a_size=4, window_size=(4, 0)),
        replace(some, cp_comm_type="a2a+p2p", a2a_size=2),
    ]
    found = [(problem, make_schedule(problem)) for problem in problems]
    found += [(some, backward_ring(some.workload)), (some, ring_of_rings(some.workload, 2))]
    found += [(problem, _messages_first(schedule)) for problem, schedule in found[:3]]
    return found + _random(random)


def _messages_first(schedule: Schedule) -> Schedule:
    def program(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return *(step._replace(tiles=Tiles.of_rows([])) for step in steps), Step(
            tiles=Tiles.concat([s.tiles for s in steps])
        )

    return replace(schedule, forward=tuple(map(program, schedule.forward)))


def _random(number: int) -> list[Base]:
    found: list[Base] = []

    @settings(max_examples=max(1, number), derandomize=True, deadline=None, database=None, phases=[Phase.generate])
    @given(scheduled_problems((2, 3, 4)), st.sampled_from([0.0, 2.0]))
    def draw(drawn: Base, softcap: float) -> None:
        problem, schedule = drawn
        if any(step.sends for program in schedule.forward for step in program):
            found.append((replace(problem, softcap=softcap, d_qk=3, d_v=2, dtype="float64"), schedule))

    draw()
    return found[:number]


@dataclass
class Attack:
    """The outcome. `findings`: the mutation, what was seen, and the schedule as a text."""

    counts: Counter[str] = field(default_factory=Counter[str])
    findings: list[tuple[str, str, str]] = field(default_factory=list)
    accepted: list[Base] = field(default_factory=list)  # those that gloo's ranks can play

    def mutations(self, seed: int, known: list[Base], number: int, seconds: float) -> Iterator[tuple[str, Base]]:
        """Mutations that were accepted, and their names."""
        rng, until = Random(seed), time.monotonic() + seconds
        for _ in range(number):
            if time.monotonic() > until:
                return
            problem, schedule = rng.choice(known)
            self.counts["mutations"] += 1
            if rng.random() < 0.4:
                how, text = changed_text(rng, str(schedule))
                how, mutated = f"text: {how}", self._parsed(how, text)
            else:
                how, mutated = changed_objects(rng, schedule)
            if mutated is None:
                continue
            if mutated == schedule:
                self.counts["as it was"] += 1
            elif self._verified(how, problem, mutated):
                yield how, (problem, mutated)

    def _parsed(self, how: str, text: str) -> Schedule | None:
        try:
            return Schedule.parse(text)
        except ValueError:
            self.counts["refused by parse"] += 1
        except Exception as error:
            self.findings.append((how, f"parse: {error!r}", text))
        return None

    def _verified(self, how: str, problem: Problem, schedule: Schedule) -> bool:
        try:
            verify(problem, schedule)
        except InvalidSchedule:
            self.counts["refused by verify"] += 1
        except Exception as error:
            self.findings.append((how, f"verify: {error!r}", repr(schedule)))
        else:
            self.counts["accepted"] += 1
            return True
        return False

    def play(self, how: str, base: Base) -> None:
        """On both packages, over the simulated group."""
        problem, schedule = base
        with patch(
            "cp_ref.calls.plan_arguments.verify"
        ):  # `make_plan` calls it on every rank: most of the time, and it is known
            for package in PACKAGES:
                if wrong := check_logic(_with(package, schedule), case_of(problem)):  # type: ignore[arg-type]
                    self.findings.append((how, f"{package}: {wrong}", f"{problem}\n{schedule}"))
        self.counts["played over the simulated group"] += 1
        if problem.cp_size == GLOO:
            self.accepted.append(base)

    def over_gloo(self, processes: Processes, most: int) -> None:
        """Some of what was accepted, evenly chosen, on both packages."""
        for problem, schedule in self.accepted[:: max(1, len(self.accepted) // most)][:most]:
            case = case_of(problem)
            tensors = build(case)
            exact = exact_results(case, tensors)
            for package in PACKAGES:
                ranks = processes.run(_of_rank, package, problem, str(schedule))
                wrong = [f"rank {rank}: {x!r}" for rank, x in enumerate(ranks) if isinstance(x, Exception)]
                if not wrong:
                    gathered = Gathered()
                    _collect(case, tensors, ranks, gathered, "share")
                    wrong = gathered.findings
                    for name, got in gathered.results.items():
                        wrong += compare_result(case, tensors, name, got, exact[name])
                if wrong:
                    self.findings.append(("over gloo", f"{package}: {wrong}", f"{problem}\n{schedule}"))
            self.counts["played over gloo"] += 1


def case_of(problem: Problem) -> Case:
    """All results, through a plan."""
    return Case(problem, use_plan=True, return_lse=True, return_max_logit=True, loss="out+lse")


def _with(package: str, schedule: Schedule) -> Any:
    """A package whose plans have this schedule."""
    played = PACKAGES[package]
    names = ("ContextParallel", "Unsupported", "attention", "shard", "supports")

    def make_plan(**arguments: Any) -> Any:
        return played.make_plan(**arguments, schedule=schedule)

    return SimpleNamespace(**{name: getattr(played, name) for name in names}, make_plan=make_plan)


class _Member(ProcessMember):
    """This process's place in the group of all, which splits as a simulated group's member does."""

    groups: ClassVar[dict[tuple[int, ...], Any]] = {}

    def split(self, a2a_size: int) -> tuple[ProcessMember, ProcessMember]:
        rows = [tuple(range(first, first + a2a_size)) for first in range(0, self.size, a2a_size)]
        mine = (rows, list(zip(*rows, strict=True)))
        for ranks in (*mine[0], *mine[1]):
            if ranks not in self.groups:
                self.groups[ranks] = dist.new_group(list(ranks))
        row, column = (next(ranks for ranks in some if self.rank in ranks) for some in mine)
        return ProcessMember(self.groups[row]), ProcessMember(self.groups[column])


def _of_rank(package: str, problem: Problem, text: str) -> dict[str, Any]:
    """One rank's results, in a process of its own."""
    case, member = case_of(problem), _Member(dist.group.WORLD)  # type: ignore[arg-type]
    return _one_rank(as_implementation(_with(package, Schedule.parse(text))), case, build(case), member)


def main(
    mutations: Annotated[int, typer.Option(help="How many, at most.")] = 20_000,
    seconds: Annotated[float, typer.Option(help="When the drawing ends.")] = 3600.0,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 1,
    gloo: Annotated[int, typer.Option(help="How many of those accepted are also played over gloo.")] = 200,
    commit: Annotated[str, typer.Option(help="The commit that is run.")] = "",
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Attack, and print the outcome. Exit code 1 if there are findings."""
    attack, began = Attack(), time.monotonic()
    for how, base in attack.mutations(seed, bases(), mutations, seconds):
        attack.play(how, base)
    processes = Processes(GLOO)
    attack.over_gloo(processes, gloo)
    processes.close()
    record = {"commit": commit, "seed": seed, "seconds": round(time.monotonic() - began), "bases": len(bases())}
    record |= {"counts": dict(attack.counts), "findings": attack.findings}
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    raise typer.Exit(bool(attack.findings))


if __name__ == "__main__":
    typer.run(main)
