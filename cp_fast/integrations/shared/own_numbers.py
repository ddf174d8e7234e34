"""Each rank draws its own random numbers: no two tokens share a dropout mask, as in one long sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["own_numbers"]


@contextmanager
def own_numbers(device: torch.device, *key: int) -> Iterator[None]:
    """Random numbers from a seed of this rank's. Afterwards those of all ranks go on, as if none had been drawn: orders
    of rows are those without context parallelism.

    Args:
        device: whose numbers, in addition to those of the CPU.
        key: what tells this rank and step from others; the seed is made of it and of PyTorch's own.

    >>> drawn = []
    >>> for rank in (0, 1, 0):
    ...     with own_numbers(torch.device("cpu"), 7, rank):
    ...         drawn.append(torch.rand(()).item())
    >>> drawn[0] == drawn[2] != drawn[1]
    True
    """
    seed = hash((torch.initial_seed(), *key)) % 2**63
    how: dict[str, Any] = {"devices": []} if device.type == "cpu" else {"devices": [device]}
    with torch.random.fork_rng(**how, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(seed)
        yield
