"""Ranks as processes: started here, or by torchrun. A failing rank ends all of them and is named."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException, start_processes

from cp_fast.tools.cli.demo.job import Job
from cp_fast.tools.cli.demo.rank import Measured, run_rank
from cp_ref.common.cli.terminal import one_line
from cp_ref.spec import Unsupported

__all__ = ["RankFailed", "join_and_run", "spawn"]

_LIMIT = timedelta(minutes=5)  # For any one message: a rank that hangs is an error.


class RankFailed(RuntimeError):
    """A rank raised: its number and error. `details` is its traceback; `about_arguments`: the message is enough."""

    def __init__(self, message: str, details: str = "", about_arguments: bool = False) -> None:
        self.details, self.about_arguments = details, about_arguments
        super().__init__(message)


def join_and_run(job: Job, me: int, local_rank: int, **how: Any) -> Measured:
    """Make the default process group, and run this rank. RankFailed: this rank raised an error."""
    try:
        world, kind, _ = job.where
        device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", local_rank)
        if kind == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device, timeout=_LIMIT, **how)
        else:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
            dist.init_process_group("gloo", timeout=_LIMIT, **how)
        measured = run_rank(job, device)
        dist.destroy_process_group()
        return measured
    except Exception as error:
        message = f"rank {me} failed: {type(error).__name__}: {one_line(error)}"
        raise RankFailed(message, traceback.format_exc(), isinstance(error, ValueError | Unsupported)) from error


def spawn(job: Job) -> Measured:
    """Run every rank in a separate process. RankFailed: a rank raised or died; the others have been ended."""
    with tempfile.TemporaryDirectory(prefix="cp_fast_demo_") as name:
        folder = Path(name)
        mp.get_context("forkserver").set_forkserver_preload([__name__])  # PyTorch is imported once, not in every rank.
        try:
            processes = start_processes(
                _rank_process, (job, folder), job.where[0], join=False, start_method="forkserver"
            )
            while processes is not None and not processes.join(grace_period=2):
                pass
        except ProcessException as error:
            failures = sorted(pickle.loads(path.read_bytes()) for path in folder.glob("failed-*"))
            if failures:  # those after the first are its echo: lost connections
                raise RankFailed(*failures[0][1:]) from None
            raise RankFailed(f"rank {error.error_index} failed: {error}") from None
        return pickle.loads((folder / "results").read_bytes())


def _rank_process(rank: int, job: Job, folder: Path) -> None:
    """One rank from start to end; an error is written to a file, with its time."""
    loopback = {"lo", "lo0"} & {interface for _, interface in socket.if_nameindex()}
    if loopback:  # all ranks are on this machine: gloo needs no name resolution
        os.environ.setdefault("GLOO_SOCKET_IFNAME", min(loopback))
    try:
        measured = join_and_run(
            job, rank, rank, init_method=(folder / "store").as_uri(), rank=rank, world_size=job.where[0]
        )
        if rank == 0:
            (folder / "results").write_bytes(pickle.dumps(measured))
    except RankFailed as failed:
        report = (time.time(), str(failed), failed.details, failed.about_arguments)
        (folder / f"failed-{rank}").write_bytes(pickle.dumps(report))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the parent shows it: no second copy by multiprocessing
        raise
