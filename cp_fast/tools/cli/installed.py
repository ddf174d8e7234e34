"""The first table of `doctor`: programs, packages and devices of this machine, and what they are for."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

import torch
from torch.cuda import nccl

from cp_fast import build
from cp_fast.backends.fa4 import fa4_cache
from cp_fast.build import recipe
from cp_fast.movers.numba_cuda.memory_sim import SIMULATED
from cp_fast.movers.select_movers import why_not
from cp_fast.transport import VARIABLE as MESSAGES
from cp_fast.transport import carried_by
from cp_fast.transport import why_not as why_not_peer_memory

__all__ = ["installed_rows"]

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

    add("cp-attention", _version("cp-attention"), "" if _version("cp-attention") else "run from a checkout")
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
    fa4_cache.keep_on_disk()
    kept = fa4_cache.kept_where()
    add("fa4's kernels", "on disk" if kept.startswith(os.sep) else None, kept)
    add("messages", *_messages())
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


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _compiler() -> tuple[str | None, str]:
    try:
        program, _ = recipe.host_compiler(recipe.cxx())
    except (build.Unavailable, ValueError) as error:
        return None, str(error)
    return _tool(program)


def _tool(*names: str) -> tuple[str | None, str]:
    """The first of these programs that is installed: its version line and its path."""
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
    return None, "not found; builds native kernels"


def _nccl_version() -> str:
    try:
        return f"NCCL {'.'.join(map(str, nccl.version()))}" if torch.cuda.is_available() else ""
    except Exception:  # no NCCL in this build
        return ""
