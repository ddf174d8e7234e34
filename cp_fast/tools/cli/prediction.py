"""`plan --sections prediction`: time and memory in each layout and schedule on a machine, and which to take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cp_fast.compile.machine import Machine
from cp_fast.tools.cost.predict import (
    SAVED,
    Candidate,
    ModelShape,
    Prediction,
    candidates,
    predict,
    recommended,
    step_memory,
)
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.values import check_choice
from cp_ref.schedules.words import LAYOUTS
from cp_ref.show.cli.options import ProblemOptions
from cp_ref.show.cli.terminal import table

__all__ = ["TrainingStep", "show_prediction"]

Request = TypeVar("Request", bound=ProblemOptions)

_BALANCED_UP_TO = 256  # Ranks: with more, deciding the layout takes longer than everything else.

_COLUMNS = (
    "forward, both, host: ms of the forward pass, of both passes, and of the host. efficiency: the time of the "
    "attention kernel alone on one GPU, over the ranks and over both. peak: memory above the inputs. a2a+p2p: ranks "
    "that exchange heads x ranks of the ring. Taken: of what is within 1 % of the fastest, the one of the least memory"
)


@dataclass(frozen=True)
class TrainingStep:
    """The sizes of a training step besides attention; see `step_memory`."""

    model: ModelShape
    saved: str
    sharded_over: int

    @staticmethod
    def read(model: str, saved: str, sharded_over: int) -> TrainingStep:
        """From options; a ValueError says which one is wrong."""
        check_choice("--saved", saved, SAVED)
        return TrainingStep(ModelShape.read(model), saved, sharded_over)


def show_prediction(
    console: Console,
    request: Request,
    problem_of: Callable[[Request], Problem],
    machine: Machine,
    messages: str,
    step: TrainingStep | None,
) -> None:
    """Print the best layout and schedule, a line for each, and of the best one the memory of a whole step. Layout of
    the request: "" for all; its schedule is ignored. problem_of: the checked problem of a request.

    Raises:
        ValueError, TypeError: naming what is wrong. Unsupported: naming what is missing.
    """
    layouts = [request.layout] if request.layout else list(LAYOUTS)
    if not request.layout and request.cp_size > _BALANCED_UP_TO:
        layouts.remove("balanced")
        console.print(f"above {_BALANCED_UP_TO} ranks balanced is predicted only if --layout asks for it")
    # checked on one rank, because the rules depend on layout and schedule; then for all ranks
    alone = replace(request, cp_size=1, cp_comm_type="p2p", a2a_size=None, layout=layouts[0])
    problem = replace(problem_of(alone), cp_size=request.cp_size)
    rates = machine.rates(problem)  # Raises before anything is counted.
    with console.status("counting what ranks do"):
        tried = candidates(problem, machine.domain, layouts)
        predictions = [None if one.refused else predict(one.problem, machine, messages) for one in tried]
    best = recommended(found) if (found := [one for one in predictions if one is not None]) else None
    if best is not None:
        console.print(
            f"[green]take[/] {best.problem.cp_comm_type}, {best.problem.layout_name}: "
            f"{1e3 * best.seconds:.2f} ms, {best.peak_bytes / 2**30:.2f} GiB"
        )
    console.print(_table(problem, machine, tried, predictions))
    if best is None:
        raise ValueError("no layout and schedule takes this problem; the table says why")
    if step is not None:
        _show_step(console, best, step)
    if (rates.d_qk, rates.d_v) != (problem.d_qk, problem.d_v):
        console.print(f"kernels of {rates.d_qk}/{rates.d_v} stand in for {problem.d_qk}/{problem.d_v}, not measured")
    console.print(f"[dim]{escape(machine.source)}[/]")


def _table(
    problem: Problem, machine: Machine, tried: Sequence[Candidate], predictions: Sequence[Prediction | None]
) -> Table:
    """A line for each layout and schedule."""
    count = len(problem.sequences)
    shown = table(
        f"{count:,} sequence{'s' * (count != 1)}, {sum(problem.lengths.len_q):,} tokens on {problem.cp_size} ranks of "
        f"{escape(machine.name)}, predicted",
        *("layout", "schedule", ">forward", ">both", ">efficiency", ">host", ">peak GiB"),
    )
    for (one, _), said in zip(tried, predictions, strict=True):
        name = one.cp_comm_type
        if said is None:
            shown.add_row(one.layout_name, name, "refused")
            continue
        inner = f" {one.a2a_size} x {problem.cp_size // one.a2a_size}" if name == "a2a+p2p" else ""
        times = 1e3 * said.forward_s, 1e3 * said.seconds, said.efficiency, 1e3 * said.host_s
        shown.add_row(one.layout_name, name + inner, *map(_cell, (*times, said.peak_bytes / 2**30)))
    refused = dict.fromkeys(f"refused: {escape(one.refused)}" for one in tried if one.refused)
    shown.caption = "\n".join((_COLUMNS, *refused))
    return shown


def _show_step(console: Console, best: Prediction, step: TrainingStep) -> None:
    memory = step_memory(best.problem, best.peak_bytes, step.model, saved=step.saved, sharded_over=step.sharded_over)
    name = f"{best.problem.cp_comm_type}, {best.problem.layout_name}"
    shown = table(f"GiB of a rank where a step of {step.model.layers} layers is fullest, with {name}", "", ">GiB")
    for part, size in (*memory.parts.items(), ("all", memory.total)):
        shown.add_row(part, f"{size / 2**30:.2f}")
    console.print(shown)


def _cell(number: float) -> str:
    return f"{number:.3f}" if number < 10 else f"{number:.1f}"
