"""A rank that is killed, stopped or raises in the middle of `attention` over NCCL: how the other one ends, and when.

    python -m tests.gpu.lost_peer_nccl > lost_peer_nccl.json      # two GPUs

Not collected by pytest: over NCCL the time-out's watchdog ends the process, so each case is two processes of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import cp_fast

LIMIT = 10.0  # seconds of the group's time-out
PATIENCE = 90.0  # for a process to end by itself
CASES = [(fault, phase) for fault in ("SIGKILL", "SIGSTOP", "exception") for phase in ("forward", "backward")]


def fail(fault: str) -> None:
    if fault == "exception":
        raise RuntimeError("in the middle")
    os.kill(os.getpid(), getattr(signal, fault))


def one_rank(rank: int, store: str, fault: str, phase: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT)
    )
    cp = cp_fast.ContextParallel(dist.group.WORLD)
    sizes: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 64, "d_v": 64}
    plan = cp_fast.make_plan(cp=cp, batch_size=1, seqlen_q=512, dtype=torch.bfloat16, device="cuda", **sizes)
    x = torch.randn(1, 256, 2, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    cp_fast.attention(x, x, x, cp=cp, plan=plan).sum().backward()  # kernels are compiled, connections are made
    torch.cuda.synchronize()
    if rank == 1 and phase == "forward":
        fail(fault)
    out = cp_fast.attention(x, x, x, cp=cp, plan=plan)
    torch.cuda.synchronize()
    if rank == 1 and phase == "backward":
        fail(fault)
    out.sum().backward()
    torch.cuda.synchronize()
    print("finished")


def play(fault: str, phase: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "tests.gpu.lost_peer_nccl", "rank"]
        ranks = [
            subprocess.Popen(
                [*words, str(rank), f"{folder}/store", fault, phase], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            for rank in range(2)
        ]
        began = time.monotonic()
        try:
            said = ranks[0].communicate(timeout=PATIENCE)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            said = "did not end"
        seconds = time.monotonic() - began
        for process in ranks:
            process.kill()
            process.wait()
    lines = [line for line in said.splitlines() if line.strip()]
    ended = "did not end" not in said and ranks[0].returncode != 0
    return {"fault": fault, "phase": phase, "seconds": round(seconds, 1), "ended": ended, "last words": lines[-3:]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        one_rank(int(sys.argv[2]), *sys.argv[3:6])
    else:
        json.dump([play(*case) for case in CASES], sys.stdout, indent=1)
