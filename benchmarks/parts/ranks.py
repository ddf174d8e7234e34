"""The common part of the scripts: their options, how a rank that is a process begins, and times of GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from conformance.runner.processes import own_gpu
from cp_fast.passes import PASSES, switched_off

__all__ = [
    "Commit",
    "Device",
    "JsonOut",
    "Schedules",
    "Silent",
    "connect",
    "largest",
    "passes_of",
    "seconds",
    "seconds_alone",
    "seconds_queued",
    "switched",
    "version",
    "write_json",
]

Commit = Annotated[str, typer.Option(help="The commit that is run.")]
Device = Annotated[str, typer.Option(help="cuda; cpu to try it.")]
JsonOut = Annotated[Path | None, typer.Option("--out", help="JSON file to write.")]
Schedules = Annotated[str, typer.Option(help="cp_comm_type, several with commas.")]
_PASSES = tuple(one.name for one in PASSES)


def passes_of(words: str) -> tuple[str, ...]:
    """Compiler passes of an option `--without`: words with commas; "each" means "-", every pass, and "all"."""
    return ("-", *_PASSES, "all") if words == "each" else tuple(words.split(","))


def switched(word: str) -> Callable[[], AbstractContextManager[None]]:
    """Plans are made, and called, inside this: "-" for all passes, "all" for none of them, or without one."""
    return partial(switched_off, *{"-": (), "all": _PASSES}.get(word, (word,)))


def write_json(out: Path | None, found: Any) -> None:
    """Write a record, if there is a file for it; its folder is made."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=2) + "\n")


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def connect(
    rank: int, size: int, folder: str | Path, device: str = "cuda", seconds: float | None = None
) -> torch.device:
    """Join the group of all ranks, over NCCL or gloo, which meet in a folder. With fewer GPUs than ranks, ranks share a
    GPU (`own_gpu`).

    Args:
        device: "cuda" or "cpu".
        seconds: the group's time-out; None for PyTorch's own.

    Returns:
        The rank's device; a GPU is the process's current one.
    """
    on_gpu = device == "cuda"
    place = own_gpu(rank, size) if on_gpu else torch.device("cpu")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{Path(folder) / 'store'}",
        rank=rank,
        world_size=size,
        timeout=None if seconds is None else timedelta(seconds=seconds),
        device_id=place if on_gpu else None,
    )
    return place


def largest(number: float) -> float:
    """The largest of all ranks' numbers; each has a GPU."""
    found = torch.tensor(number, device="cuda", dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


class Silent:
    """A rank of a group whose messages bring nothing: for the time of what one rank computes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def exchange(self, sends: Sequence[Any], recvs: Sequence[Any]) -> Silent:
        for parcel in recvs:
            parcel.tensor.zero_()
        return self

    def wait(self) -> None:
        """Nothing is on its way."""

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size


def seconds_alone(fn: Callable[[], Any], calls: int) -> float:
    """One of several calls in a row on this GPU, which waits for no other, by CUDA events."""
    torch.cuda.synchronize()
    return _seconds_from_here(fn, calls)


def seconds_queued(fn: Callable[[], Any], calls: int) -> float:
    """One call's time on the GPU, whose launches wait in its queue: those of a model, whose host runs ahead, do too."""
    torch.cuda.synchronize()
    calls = min(calls, 6)  # the queue has room for about a thousand launches
    torch.cuda._sleep(12_000_000 * calls)  # pyright: ignore[reportPrivateUsage]  # 6 ms a call
    return _seconds_from_here(fn, calls)


def _seconds_from_here(fn: Callable[[], Any], calls: int) -> float:
    """One of several calls in a row, from this place in the GPU's queue on."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        fn()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def seconds(fn: Callable[[], Any], calls: int) -> float:
    """The same on all GPUs at once; the slowest rank's time."""
    dist.barrier()
    return largest(seconds_alone(fn, calls))
