"""`doctor`: what is installed here, what works, and why the rest does not."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.cuda import nccl

from cp_fast import build
from cp_fast.backends import BACKENDS, Backend, fa4_cache, installed, probe, remark_on
from cp_fast.build import tools
from cp_fast.cli.common import CHECK_FAILED, table
from cp_fast.kernels.select import chosen
from cp_fast.peers import VARIABLE as MESSAGES
from cp_fast.peers import carried_by
from cp_fast.peers import why_not as why_not_peers
from cp_ref.spec import Feature

__all__ = ["doctor"]

_PACKAGES = {
    "numpy": "",
    "numba-cuda": "kernels for GPUs without nvcc",
    "flash-attn": "backend fa2 has softcap with it; this package's extra 'fa2' has it",
    "flash-attn-4": "backend fa4; this package's extra 'fa4' has it",
    "nvidia-cudnn-frontend": "backend cudnn; this package's extra 'cudnn' has it",
    "ninja": "builds the native kernels",
}


def doctor() -> None:
    """Say what is installed, which attention backends and kernels work here, and why not where not.

    Exit code: 0 when attention runs here on at least one backend, else 1.
    """
    console = Console()
    console.print(_installed())
    with console.status("trying the attention backends"):
        backends, working = _backends()
    console.print(backends)
    kernels, served = _kernels()
    console.print(kernels)
    if ready := [f"{name} ({device})" for name, device in working if device in served]:
        console.print(f"[green]ready[/]: attention runs here on {', '.join(ready)}")
        return
    lacking = "no kernels move and merge for the backends that work" if working else "no attention backend works"
    console.print(f"[red]{lacking} here[/]; the table says why")
    raise typer.Exit(CHECK_FAILED)


def _installed() -> Table:
    made = table("installed", "what", "here", "remark")
    made.add_row("Python", platform.python_version(), platform.platform())
    made.add_row("PyTorch", torch.__version__, f"{torch.get_num_threads()} CPU threads, {os.cpu_count()} CPUs")
    cuda = torch.version.cuda
    made.add_row("CUDA", cuda or "-", "what PyTorch was built for" if cuda else "PyTorch was built without it")
    gpus = range(torch.cuda.device_count())
    for gpu in gpus:
        p = torch.cuda.get_device_properties(gpu)
        made.add_row(f"GPU {gpu}", p.name, f"compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB")
    if not gpus:
        made.add_row("GPU", "-", "none that PyTorch sees")
    for package, remark in _PACKAGES.items():
        version = _version(package)
        made.add_row(package, version or "-", "" if version else escape(remark) or "optional")
    made.add_row("fa4's kernels", "on disk" if (kept := _kept_where()).startswith(os.sep) else "-", escape(kept))
    made.add_row("messages", *_messages())
    made.add_row("nvcc", *_tool("nvcc"))
    made.add_row("C++ compiler", *_compiler())
    dist = torch.distributed
    if dist.is_available():
        transports = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
        made.add_row(
            "torch.distributed", ", ".join(n for n, there in transports.items() if there) or "-", _nccl_version()
        )
    else:
        made.add_row("torch.distributed", "-", "PyTorch was built without it")
    return made


def _kept_where() -> str:
    fa4_cache.keep_on_disk()
    return fa4_cache.kept_where()


def _messages() -> tuple[str, str]:
    """What carries messages between this machine's GPUs, and why not peers' memory."""
    try:
        choice = carried_by()
    except ValueError as error:
        return "[red]none[/]", escape(str(error))
    reason = why_not_peers() or ("PyTorch sees one GPU" if torch.cuda.device_count() == 1 else None)
    by_group = f"{MESSAGES}=group" if choice == "group" else reason
    remark = "copy engines read the peers' memory; a group tries it before its first plan"
    return ("the group's", escape(by_group)) if by_group else ("peers' memory", remark)


def _backends() -> tuple[Table, list[tuple[str, str]]]:
    """Every backend on every device that it says it runs on, tried on small problems with known answers; and those that
    work.
    """
    made = table("attention backends, in the order that 'auto' prefers", "backend", "device", "works", "remark")
    working = []
    for backend in map(installed, BACKENDS):
        for device in _devices(backend):
            reason = _try(backend, device)
            if reason is None:
                working.append((backend.name, device))
            made.add_row(
                backend.name,
                device,
                "[green]yes[/]" if reason is None else "[red]no[/]",
                escape(reason or remark_on(backend)),
            )
    return made, working


def _devices(backend: Backend) -> list[str]:
    return [name for feature, name in ((Feature.CUDA, "cuda"), (Feature.CPU, "cpu")) if feature in backend.features]


def _try(backend: Backend, device: str) -> str | None:
    reason = backend.why_not()
    if reason is None:
        try:
            reason = probe(backend, device)
        except Exception as error:  # whatever a foreign library throws is the answer
            reason = f"{type(error).__name__}: {error}"
    return None if reason is None else " ".join(reason.split())


def _kernels() -> tuple[Table, set[str]]:
    """For every device, which kernels move and merge there and why, and what there is of the native ones; and the
    devices that have some.
    """
    made = table("kernels that move and merge", "device", "in use", "native build", "remark")
    served = set()
    for device in build.DEVICES:
        try:
            built, why_not = build.status(device)
        except ValueError as error:
            built, why_not = None, str(error)
        if device == "cuda" and not torch.cuda.is_available():
            in_use, why = "-", "PyTorch sees no GPU"
        else:
            try:
                in_use, why = chosen(device)
                served.add(device)
            except (RuntimeError, ValueError) as error:
                in_use, why = "[red]none[/]", str(error)
        state = "no" if why_not else "yes" if built else "on first use"
        made.add_row(
            device, in_use, state, escape(why if why_not in (None, why) or why_not in why else f"{why}; {why_not}")
        )
    return made, served


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _compiler() -> tuple[str, str]:
    try:
        program, _ = tools.host_compiler(tools.cxx())
    except (build.Unavailable, ValueError) as error:
        return "-", str(error)
    return _tool(program)


def _tool(*names: str) -> tuple[str, str]:
    """The first of these programs that is there: its version line and its path."""
    for name in names:
        if name and (path := shutil.which(name)):
            try:
                said = subprocess.run(
                    [path, "--version"], capture_output=True, text=True, timeout=10, check=False
                ).stdout
            except (OSError, subprocess.TimeoutExpired):
                said = ""
            lines = [line for line in said.splitlines() if line.strip()]
            release = [line for line in lines if "release" in line]
            return (release or lines or ["?"])[0].strip(), path
    return "-", "not found; builds native kernels"


def _nccl_version() -> str:
    try:
        return f"NCCL {'.'.join(map(str, nccl.version()))}" if torch.cuda.is_available() else ""
    except Exception:  # no NCCL in this build
        return ""
