"""`plan`: a problem by the same `make_plan` as a model's calls, in both packages' sections and a prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Option

import cp_fast
from cp_fast.compile.chosen_schedule import choose
from cp_fast.compile.machine import built_in, read_machine
from cp_ref.groups.group import PaperGroup
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import Schedule
from cp_ref.show.cli.description import (
    Description,
    HeadOption,
    RankOption,
    SectionsOption,
    SvgOption,
    TextOption,
    refuse_unread,
)
from cp_ref.show.cli.options import ProblemOptions, with_options

__all__ = ["Request", "plan", "problem_of"]


@dataclass(frozen=True)
class Request(ProblemOptions):
    """The options, with defaults of a model's size."""

    seqlen: Annotated[int | None, Option(help="Length of every sequence of a bshd or sbhd batch; 8192.")] = None
    layout: Annotated[
        str,
        Option(help="dual_chunk (or zigzag, the same), contiguous or balanced; dual_chunk, in a prediction all."),
    ] = ""
    heads_q: Annotated[int, Option(help="Query heads.")] = 32
    heads_kv: Annotated[int, Option(help="Key and value heads.")] = 8
    d_qk: Annotated[int, Option(help="Head dim of queries and keys.")] = 128
    dtype: Annotated[str, Option(help="float16, bfloat16, float32 or float64.")] = "bfloat16"

    def planned(self) -> tuple[Problem, Schedule]:
        plan = cp_fast.make_plan(**_arguments(self))
        return plan.problem, plan.schedule

    def head_chunks(self, problem: Problem) -> tuple[int, ...]:
        return choose(problem).head_chunks

    @property
    def length(self) -> int:
        """The default length of a sequence."""
        return 8192 if self.seqlen is None else self.seqlen


@with_options
def plan(
    request: Request,
    sections: SectionsOption = "",
    rank: RankOption = None,
    head: HeadOption = 0,
    svg: SvgOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="The same as --sections layouts.")] = False,
    predict: Annotated[bool, typer.Option("--predict", help="The same as --sections prediction.")] = False,
    machine: Annotated[
        str,
        typer.Option(help=f"{', '.join(built_in())} (unless given), or a TOML file of doctor --measure --out FILE."),
    ] = "",
    messages: Annotated[
        str,
        typer.Option(help="Transport where all ranks share NVLink: peer_memory (unless given), or group (NCCL)."),
    ] = "",
    model: Annotated[
        str, typer.Option(help="Predict a whole step's memory too: layers,hidden,ffn,vocabulary of a decoder.")
    ] = "",
    saved: Annotated[
        str,
        typer.Option(
            help="With --model, for the backward pass: offload (unless given), attention, layers (inputs), all."
        ),
    ] = "",
    fsdp: Annotated[
        int | None, typer.Option(help="With --model: ranks that share the weights; --cp-size unless given.", min=1)
    ] = None,
    text: TextOption = False,
) -> None:
    """Describe a problem, and verify its schedule. No GPU and no other process is needed.

    Sections: schedule (the picture and the steps), costs (each rank's, and the proof), layouts (what each layout and
    schedule costs), prediction (their time and memory on --machine); and walk, which is shown where it is asked for.

    Exit code: 0, or 2 for a problem that is refused.
    """
    for flag, name in ((compare, "layouts"), (predict, "prediction")):
        if flag:
            sections = f"{sections},{name}".strip(",")
    if not model:
        refuse_unread("--predict without --model", saved=saved or None, fsdp=fsdp)

    def prediction(console: Console) -> None:
        # It imports PyTorch: --help does not.
        from cp_fast.tools.cli.prediction import TrainingStep, show_prediction

        step = TrainingStep.read(model, saved or "offload", fsdp or request.cp_size) if model else None
        used = read_machine(machine or "h200-nvlink")
        show_prediction(console, request, problem_of, used, messages or "peer_memory", step)

    description = Description(request, sections, rank, head, svg, text, {"prediction": prediction})
    if "prediction" not in description.names or text:
        by = "--text" if text else f"--sections {sections}"
        refuse_unread(by, machine=machine or None, messages=messages or None, model=model or None)
    description.show()


def problem_of(request: Request) -> Problem:
    """The problem alone: nothing is planned, and no kernels are built for it.

    Raises:
        ValueError, TypeError: naming what is wrong.
    """
    from cp_ref.calls import plan_arguments as plans
    from cp_ref.calls.declared import bind

    agreement, _ = plans.read_plan_arguments(bind(plans.make_plan, _arguments(request)), cp_fast.ContextParallel)
    return agreement.problem


def _arguments(request: Request) -> dict[str, Any]:
    """The arguments of `make_plan`, for rank 0."""
    size, inner = request.cp_size, request.exchanging
    pair = PaperGroup(inner), PaperGroup(size // inner)
    group = pair if request.cp_comm_type == "a2a+p2p" else PaperGroup(size)
    words: Any = request.cp_comm_type, request.layout or "dual_chunk"  # Any text; the context refuses others.
    cp = cp_fast.ContextParallel(group, words[0], layout=words[1])
    cp.comm = PaperGroup(size)  # A pair asks every rank for its place in the grid; here all are rank 0.
    return {"cp": cp, "device": "cpu", **request.said(), **request.sizes()}
