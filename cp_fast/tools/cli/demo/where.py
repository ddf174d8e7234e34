"""Where the ranks run: one process a GPU where there are enough GPUs, else processes on the CPU. Said, never silent."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from cp_fast.tools.cli.demo.launch import under_torchrun

__all__ = ["Where", "choose_where"]

_DEFAULT_RANKS = 4


@dataclass(frozen=True, slots=True)
class Where:
    """How many ranks, on what, in which words; `speaks` is true on the one process that prints."""

    ranks: int
    device: str
    words: str
    speaks: bool = True


def choose_where(ranks: int | None, device: str) -> Where:
    """Decide.

    Args:
        ranks: how many were asked for, or None.
        device: "auto", "cpu" or "cuda".

    Raises:
        ValueError: there are not as many GPUs as were asked for, or torchrun has started another number of ranks.
    """
    here, started_by = ranks or _DEFAULT_RANKS, ""
    speaks = True
    if under_torchrun():
        world = int(os.environ["WORLD_SIZE"])
        if ranks not in (None, world):
            raise ValueError(f"--ranks is {ranks}, but torchrun has started {world}; leave it out")
        ranks, here, started_by = world, int(os.environ.get("LOCAL_WORLD_SIZE", world)), " started by torchrun"
        speaks = os.environ["RANK"] == "0"
    ranks = ranks or _DEFAULT_RANKS
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and torch.distributed.is_nccl_available() else 0
    if device == "cuda" and gpus < here:
        raise ValueError(f"--device cuda needs one GPU a rank: {here} ranks, {gpus} GPUs that NCCL can use")
    if device != "cpu" and gpus >= here:
        return Where(ranks, "cuda", f"{ranks} processes{started_by} over NCCL, one GPU each", speaks)
    words = f"{ranks} processes{started_by} over gloo on the CPU"
    if device == "auto" and gpus:
        words += f": there are fewer GPUs ({gpus}) than ranks; --ranks {gpus} uses them"
    elif device == "auto":
        words += " (no GPU that NCCL can use)"
    return Where(ranks, "cpu", words, speaks)
