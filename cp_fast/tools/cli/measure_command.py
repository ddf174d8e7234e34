"""`doctor --measure`: the machine that this runs on, as a file for `plan --predict --machine`."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import typer

from cp_fast.api.fast_context import ContextParallel
from cp_fast.tools.cost import read_machine
from cp_fast.tools.cost.measure_machine import measure
from cp_ref.contract.cli.options import lengths
from cp_ref.contract.group import PaperGroup

__all__ = ["measure_machine"]


def measure_machine(dims: str, start: str, out: Path | None) -> None:
    """Measure by one process, or by all that torchrun started; the first one prints the machine, and writes it.

    Raises:
        ValueError, OSError, Unsupported: naming what is wrong.
    """
    sizes = lengths("--dims", dims)
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(f"--dims is {dims!r}; it must be two head dims from 1, d_qk,d_v, such as 128,128")
    known = read_machine(start)
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out is {str(out)!r}; its folder does not exist")
    on_gpu = torch.cuda.is_available()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if several:
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        cp = ContextParallel(dist.group.WORLD if several else PaperGroup(1))
        machine = measure(cp, known, d_qk=sizes[0], d_v=sizes[1], device=device)
    finally:
        if several:
            dist.destroy_process_group()
    if cp.rank == 0:
        typer.echo(str(machine), nl=False)
        if out is not None:
            out.write_text(str(machine), encoding="utf-8")
