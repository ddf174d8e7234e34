"""`doctor`: what is installed here, what works, and why the rest does not."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.cuda import nccl

from cp_fast.api.fast_context import ContextParallel
from cp_fast.build import builder, recipe
from cp_fast.compile.machine import read_machine
from cp_fast.kernels.attention.backend_probe import probe
from cp_fast.kernels.attention.backend_protocol import Backend
from cp_fast.kernels.attention.choose_backend import BACKENDS, installed, remark_on
from cp_fast.kernels.attention.fa4 import fa4_recorded
from cp_fast.kernels.sparse.sparse_kernels import choose_sparse
from cp_fast.movers.numba_cuda.memory_sim import SIMULATED
from cp_fast.movers.select_movers import chosen, why_not
from cp_fast.tools.cost.measure_machine import measure
from cp_fast.transport.memory_group import VARIABLE as MESSAGES
from cp_fast.transport.memory_group import carried_by
from cp_fast.transport.memory_group import why_not as why_not_peer_memory
from cp_ref.groups.group import PaperGroup
from cp_ref.schedules.words import Feature
from cp_ref.show.cli.options import lengths
from cp_ref.show.cli.terminal import BAD_INPUT, CHECK_FAILED, complain, readable_errors, table
from cp_ref.show.version import __version__

__all__ = [
    "doctor",
    "installed_rows",
    "measure_machine",
]

Row = dict[str, Any]
_TITLES = {
    "installed": "installed",
    "attention backends": "attention backends, in the order that 'auto' prefers",
    "kernels": "kernels that move and merge",
}
_CELLS = {None: "-", True: "[green]yes[/]", False: "[red]no[/]"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, for bug reports.")] = False,
    measured: Annotated[
        bool,
        typer.Option("--measure", help="Measure this machine instead, for plan --machine; links under torchrun."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="--measure: write the machine to this TOML file.")] = None,
    dims: Annotated[str, typer.Option(help="--measure: head dims d_qk,d_v of the kernels.")] = "128,128",
    start: Annotated[str, typer.Option(help="--measure: the machine that the rest is taken from.")] = "h200-nvlink",
) -> None:
    """Say what is installed, and which attention backends and kernels work here; of the others say why not.

    Exit code: 0 when attention runs here on at least one backend, else 1.
    """
    if measured:
        with readable_errors():
            measure_machine(dims, start, out)
        return
    if out is not None:
        complain(f"--out is {str(out)!r}, but --measure is not given; only a measured machine is written")
        raise typer.Exit(BAD_INPUT)
    console = Console(stderr=as_json)
    with console.status("trying the attention backends"):
        found = {"installed": installed_rows(), "attention backends": _backends(), "kernels": _kernels()}
    working = [row for row in found["attention backends"] if row["works"]]
    served = {row["device"] for row in found["kernels"] if row["in use"]}
    ready = [f"{row['backend']} ({row['device']})" for row in working if row["device"] in served]
    if as_json:
        typer.echo(json.dumps({**found, "ready": ready, "variables": _variables()}, indent=2))
    else:
        for part, rows in found.items():
            console.print(_table(_TITLES[part], rows))
        lacking = "no kernels move and merge for the backends that work" if working else "no attention backend works"
        console.print(
            f"[green]ready[/]: attention runs here on {', '.join(ready)}"
            if ready
            else f"[red]{lacking} here[/]; the table says why"
        )
    if not ready:
        raise typer.Exit(CHECK_FAILED)


def _table(title: str, rows: list[Row]) -> Table:
    made = table(title, *rows[0])
    for row in rows:
        made.add_row(*(_CELLS.get(cell, escape(str(cell))) for cell in row.values()))
    return made


def _backends() -> list[Row]:
    """Every backend on every device that it supports, tried on small problems with known answers."""
    made: list[Row] = []
    for backend in map(installed, BACKENDS):
        for device in _devices(backend):
            reason = _try(backend, device)
            remark = reason or remark_on(backend)
            made.append({"backend": backend.name, "device": device, "works": reason is None, "remark": remark})
    return made


def _devices(backend: Backend) -> list[str]:
    return [name for feature, name in ((Feature.CUDA, "cuda"), (Feature.CPU, "cpu")) if feature in backend.features]


def _try(backend: Backend, device: str) -> str | None:
    reason = backend.why_not()
    if reason is None:
        try:
            reason = probe(backend, device)
        except Exception as error:  # Any error of a foreign library is the answer.
            reason = f"{type(error).__name__}: {error}"
    return None if reason is None else " ".join(reason.split())


def _kernels() -> list[Row]:
    """For every device, the kernels that move and merge there, the reason, and the state of the native ones."""
    made: list[Row] = []
    for device in recipe.DEVICES:
        try:
            built, why_not_built = builder.status(device)
        except ValueError as error:
            built, why_not_built = None, str(error)
        in_use: str | None = None
        if device == "cuda" and not torch.cuda.is_available():
            why = "PyTorch sees no GPU"
        else:
            try:
                in_use, why = chosen(device)
            except (RuntimeError, ValueError) as error:
                why = str(error)
        remark = why if why_not_built in (None, why) or why_not_built in why else f"{why}; {why_not_built}"
        state = "no" if why_not_built else "yes" if built else "on first use"
        made.append({"device": device, "in use": in_use, "native build": state, "remark": remark})
    return made


def _variables() -> dict[str, str]:
    """The environment variables of this package, PyTorch and the other libraries."""
    prefixes = ("CP_", "CUDA_", "CXX", "NCCL_", "NUMBA_", "PYTORCH_", "TORCH_")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


# ---- what is installed
#
# The first table of `doctor`: programs, packages and devices of this machine, and what they are for.


_PACKAGES = {
    "numpy": "",
    "numba-cuda": "kernels for GPUs without nvcc",
    "flash-attn": "backend fa2 has softcap with it; this package's extra 'fa2' has it",
    "flash-attn-4": "backend fa4; this package's extra 'fa4' has it",
    "nvidia-cudnn-frontend": "backend cudnn; this package's extra 'cudnn' has it",
    "ninja": "builds the native kernels",
}


def installed_rows() -> list[dict[str, Any]]:
    """A row for each program, package and device: its version or name, None without one, and a remark."""
    made: list[dict[str, Any]] = []

    def add(what: str, here: str | None, remark: str = "") -> None:
        made.append({"what": what, "here": here, "remark": remark})

    add("cp-attention", __version__, "" if __version__ else "run from a checkout")
    add("Python", platform.python_version(), platform.platform())
    add("PyTorch", torch.__version__, f"{torch.get_num_threads()} CPU threads, {os.cpu_count()} CPUs")
    cuda = torch.version.cuda
    add("CUDA", cuda, "what PyTorch was built for" if cuda else "PyTorch was built without it")
    gpus = range(torch.cuda.device_count())
    for gpu in gpus:
        p = torch.cuda.get_device_properties(gpu)
        add(f"GPU {gpu}", p.name, f"compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB")
    if not gpus:
        add("GPU", None, "none that PyTorch sees")
    for package, remark in _PACKAGES.items():
        version = _version(package)
        add(package, version, _numba_remark() if version and package == "numba-cuda" else "" if version else remark)
    fa4_recorded.keep_on_disk()
    kept = fa4_recorded.kept_where()
    add("fa4's kernels", "on disk" if kept.startswith(os.sep) else None, kept)
    add("messages", *_messages())
    add("sparse attention", *_sparse_attention())
    add("nvcc", *_tool("nvcc"))
    add("C++ compiler", *_compiler())
    dist = torch.distributed
    if dist.is_available():
        transports = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
        add("torch.distributed", ", ".join(n for n, there in transports.items() if there) or None, _nccl_version())
    else:
        add("torch.distributed", None, "PyTorch was built without it")
    return made


def _numba_remark() -> str:
    """Whether the kernels in Numba load and compute, if there is a GPU (or Numba simulates one)."""
    device = "cpu" if SIMULATED else "cuda"
    return why_not("numba", device) or f"its kernels work on {device!r}"


def _messages() -> tuple[str | None, str]:
    """The transport between this machine's GPUs, and the reason if it is not peer memory."""
    try:
        choice = carried_by()
    except ValueError as error:
        return None, str(error)
    reason = why_not_peer_memory() or ("PyTorch sees one GPU" if torch.cuda.device_count() == 1 else None)
    by_group = f"{MESSAGES}=group" if choice == "group" else reason
    remark = "copy engines read the peers' memory; a group tries it before its first plan"
    return ("the group's", by_group) if by_group else ("peer memory", remark)


def _sparse_attention() -> tuple[str, str]:
    """The kernels of attention to chosen and to compressed keys, in bfloat16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels = choose_sparse(torch.empty(0, dtype=torch.bfloat16, device=device), "auto")
    if "triton" in getattr(kernels, "__name__", ""):
        return "Triton", "plain PyTorch for float64 and on CPUs"
    return "PyTorch", "GPUs from Ampere on take Triton's kernels"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _compiler() -> tuple[str | None, str]:
    try:
        program, _ = recipe.host_compiler(recipe.cxx())
    except (recipe.Unavailable, ValueError) as error:
        return None, str(error)
    return _tool(program)


def _tool(name: str) -> tuple[str | None, str]:
    """An installed program's version line and its path."""
    if not name or (path := shutil.which(name)) is None:
        return None, "not found; builds native kernels"
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    lines = [line for line in said.splitlines() if line.strip()]
    release = [line for line in lines if "release" in line]
    return (release or lines or ["?"])[0].strip(), path


def _nccl_version() -> str:
    try:
        return f"NCCL {'.'.join(map(str, nccl.version()))}" if torch.cuda.is_available() else ""
    except Exception:  # no NCCL in this build
        return ""


# ---- what is measured
#
# `doctor --measure`: the machine that this runs on, as a file for `plan --predict --machine`.


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
