"""MagiAttention as a contender of `benchmarks/attention.py --peers` and `benchmarks/masks.py --peers`.

On two H200s this was the fastest of the settings that it documents: one remote stage, which is its default, over a
process group of high priority; CatGQA, and the tail of the backward pass's reduction hidden, both of which it calls
experimental. Remote dK and dV travel in bfloat16, as it does by default.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from cp_ref.schedules.areas import Areas

__all__ = ["SETTINGS", "magi_way"]

SETTINGS = {
    "MAGI_ATTENTION_KERNEL_BACKEND": "ffa",
    "MAGI_ATTENTION_CATGQA": "1",
    "MAGI_ATTENTION_BWD_HIDE_TAIL_REDUCE": "1",
}

Slices = Callable[[torch.Tensor], torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def magi_way(areas: Areas, tokens: int, sizes: tuple[int, int, int], scale: float) -> tuple[Slices, Attend]:
    """How it cuts global tensors [t, h, d] into this rank's slices, and out of slices of q, k and v. Collective: over
    all processes. Raises ImportError where it is not installed.

    Args:
        tokens: of the batch.
        sizes: heads_q, heads_kv, head dim.
    """
    api, adapter = (import_module(name) for name in ("magi_attention.api", "conformance.adapters.magi_attention"))
    os.environ |= SETTINGS
    key = adapter.key_of(areas, tokens, *sizes, _urgent_group())

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return api.calc_attn(q, k, v, key, softmax_scale=scale)[0]

    return partial(api.dispatch, key=key), attend


@cache
def _urgent_group() -> Any:
    """All processes, whose messages overtake kernels."""
    return dist.new_group(pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))
