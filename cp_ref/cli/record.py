"""`record`: run a problem on random tensors over a simulated group, and save the trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from cp_ref.cli.plan import Request
from cp_ref.cli.record import PLANTS, planted
from cp_ref.contract.cli.options import check_number, with_options

__all__ = ["record"]


@with_options
def record(
    request: Request,
    save: Annotated[Path | None, Option(help="Write the trace to this file, for `compare`.")] = None,
    plant: Annotated[str, Option(help=f"Plant a bug, to practise on: {', '.join(PLANTS)}.")] = "",
    plant_rank: Annotated[int | None, Option(help="The rank that has the bug; 1 unless given.")] = None,
) -> None:
    """Run a problem forward and backward on random tensors, record every intermediate, and print what was recorded.

    Exit code: 0, or 2 for a problem that is refused.
    """
    console = Console(highlight=False, soft_wrap=True)
    if plant_rank is not None and not plant:
        raise ValueError(f"--plant-rank is {plant_rank}, but --plant names no bug; leave it out")
    spoiled = 1 if plant_rank is None else plant_rank
    if plant:
        check_number("--plant-rank", spoiled, request.cp_size)
    with console.status("running all ranks"):
        if plant:
            with planted(plant, spoiled):
                trace = request.run()
        else:
            trace = request.run()
        if save is not None:
            trace.save(save)
    console.print(str(trace), markup=False)
    if save is not None:
        console.print(f"\nsaved to {save}", markup=False)
