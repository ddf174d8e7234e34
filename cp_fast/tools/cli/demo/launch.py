"""Ranks as processes: started here, or by torchrun. A failing rank ends all of them and is named."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException, start_processes

from cp_fast.tools.cli.demo.job import Job
from cp_fast.tools.cli.demo.rank import STAGES, Measured, run_rank
from cp_ref.common.cli.terminal import one_line
from cp_ref.spec import Unsupported

__all__ = ["RankFailed", "spawn", "torchrun_group", "under_torchrun"]

_START = "forkserver"
_LIMIT = timedelta(minutes=5)  # For any one message: a rank that hangs is an error.


class RankFailed(RuntimeError):
    """A rank raised: its number and error. `details` is its traceback; `about_arguments`: the message is enough."""

    def __init__(self, rank: int, message: str, details: str = "", about_arguments: bool = False) -> None:
        self.rank, self.details, self.about_arguments = rank, details, about_arguments
        super().__init__(f"rank {rank} failed: {message}")


def under_torchrun() -> bool:
    """Whether this process is one of the ranks already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def torchrun_group(job: Job) -> Iterator[torch.device]:
    """The default process group of the ranks that torchrun started, and this rank's device.

    Raises:
        RankFailed: this rank raised an error in the block. torchrun then ends the others.
    """
    rank = int(os.environ["RANK"])
    try:
        device = _device(job, int(os.environ.get("LOCAL_RANK", "0")))
        _join(job, device)
        yield device
        dist.destroy_process_group()
    except Exception as error:
        raise RankFailed(rank, _words(error), traceback.format_exc(), _is_about_arguments(error)) from error


def spawn(job: Job, on_progress: Callable[[list[int]], None]) -> Measured:
    """Run every rank in a separate process.

    Args:
        on_progress: called from time to time with the stage number of each rank.

    Raises:
        RankFailed: a rank raised or died. The others have been ended.
    """
    with tempfile.TemporaryDirectory(prefix="cp_fast_demo_") as folder:
        context = mp.get_context(_START)
        context.set_forkserver_preload([__name__])  # PyTorch is imported once, not in every rank.
        reached = context.Array("i", job.ranks)
        processes = start_processes(_rank_process, (job, folder, reached), job.ranks, join=False, start_method=_START)
        assert processes is not None  # Only with join=True.
        try:
            while not processes.join(timeout=0.1, grace_period=2):
                on_progress(reached[:])
        except ProcessException as error:
            raise _first_failure(Path(folder), error) from None
        on_progress(reached[:])
        return pickle.loads((Path(folder) / "results").read_bytes())


def _rank_process(rank: int, job: Job, folder: str, reached: Any) -> None:
    """One rank from start to end; an error is written to a file, with its time."""
    try:
        _use_loopback()
        device = _device(job, rank)
        _join(job, device, init_method=Path(folder, "store").as_uri(), rank=rank, world_size=job.ranks)

        def note(stage: str) -> None:
            reached[rank] = STAGES.index(stage)

        measured = run_rank(job, device, note)
        if rank == 0:
            Path(folder, "results").write_bytes(pickle.dumps(measured))
        dist.destroy_process_group()
    except Exception as error:
        report = (time.time(), rank, _words(error), traceback.format_exc(), _is_about_arguments(error))
        Path(folder, f"failed-{rank}").write_bytes(pickle.dumps(report))
        sys.stderr.flush()
        # The parent shows it: no second copy by multiprocessing, and no output of a gloo thread.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        raise


def _first_failure(folder: Path, error: ProcessException) -> RankFailed:
    """The failure that came first: the others are its echo (a lost connection)."""
    reports = sorted(pickle.loads(path.read_bytes()) for path in folder.glob("failed-*"))
    if reports:
        return RankFailed(*reports[0][1:])
    return RankFailed(error.error_index, str(error))


def _join(job: Job, device: torch.device, **how: Any) -> None:
    """Make the default process group."""
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, timeout=_LIMIT, **how)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.ranks))
        dist.init_process_group("gloo", timeout=_LIMIT, **how)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def _is_about_arguments(error: Exception) -> bool:
    """Whether the error is about arguments: then the package's message needs no traceback."""
    return isinstance(error, ValueError | Unsupported)


def _device(job: Job, index: int) -> torch.device:
    if job.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _use_loopback() -> None:
    """All ranks are on this machine: let gloo use the loopback, for any name resolution of the host."""
    for name in ("lo", "lo0"):
        if name in (interface for _, interface in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return
