"""A seeded fuzzer of the helpers for packed batches: well-formed calls, and calls with some arguments spoiled.

    python -m tests.faults.fuzz_helpers SECONDS SEED

A spoiled call may raise ValueError, TypeError or PyTorch's own exception for memory; nothing else, and it must not end
the process. Run under a sanitizer (tests/faults/test_sanitizers.py), a read or write out of bounds does.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from conformance.problems.helpers import HELPERS, Helper
from cp_fast import thd
from cp_fast.movers import select_movers as kernels

__all__ = ["fuzz"]

EXTREMES = (0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, -(2**31), 2**32, 2**62, -(2**62), 2**63 - 1, -(2**63))
_WITHOUT_GROUP = [name for name in HELPERS if name != "get_batch_on_this_cp_rank"]


def fuzz(seconds: float, seed: int) -> Counter[str]:
    """Call helpers for some seconds; how many calls returned, and how many raised what.

    Raises:
        AssertionError: a call raised what it must not; with the call.
    """
    rng, counts, until = np.random.default_rng(seed), Counter[str](), time.monotonic() + seconds
    while time.monotonic() < until:
        name = str(rng.choice(_WITHOUT_GROUP))
        arguments = dict(HELPERS[name].build(_drawn(name, rng), "cpu").arguments)
        spoiled = rng.random() < 0.8
        for which in rng.choice(list(arguments), rng.integers(1, 3), replace=False) if spoiled else ():
            arguments[str(which)] = _spoiled(arguments[str(which)], rng)
        try:
            getattr(thd, name)(**arguments)
            counts["returned"] += 1
        except (ValueError, TypeError, MemoryError, torch.OutOfMemoryError) as error:
            if not spoiled:
                raise AssertionError(f"{name}({arguments})") from error
            counts[type(error).__name__] += 1
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise AssertionError(f"{name}({arguments})") from error
            counts["no memory"] += 1
    return counts


def _drawn(name: str, rng: np.random.Generator) -> Helper:
    count, cp_size = int(rng.integers(0, 5)), int(rng.integers(1, 6))
    return Helper(
        name=name,
        slots=tuple(map(int, rng.integers(0, 6, count))),
        real=tuple(map(int, rng.integers(0, 9, count))),
        repeat=int(rng.choice([1, 1, 1, 40])),
        tail=int(rng.integers(0, 4)),
        cp_size=cp_size,
        rank=int(rng.integers(0, cp_size)),
        index_dtype=str(rng.choice(["int32", "int64"])),
        dtype=str(rng.choice(["float32", "bfloat16", "float16", "float64"])),
        wide=bool(rng.integers(0, 2)),
        dims=((3,), (2, 4), (5, 7), (8, 16))[int(rng.integers(0, 4))],
        packed=bool(rng.integers(0, 2)),
        choices=(int(rng.integers(0, 3)), int(rng.integers(0, 3))),
        spare=int(rng.integers(0, 3)),
        seed=int(rng.integers(0, 100)),
    )


def _spoiled(value: Any, rng: np.random.Generator) -> Any:
    if isinstance(value, torch.Tensor):
        changes = _OF_LENGTHS if value.dtype in (torch.int32, torch.int64) and value.dim() == 1 else _OF_TENSORS
        return changes[int(rng.integers(0, len(changes)))](value, rng)
    if isinstance(value, bool | int):
        return EXTREMES[int(rng.integers(0, len(EXTREMES)))]
    return None


def _one_extreme(x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    y = x.to(torch.int64).clone()
    if len(y):
        y[int(rng.integers(0, len(y)))] = EXTREMES[int(rng.integers(0, len(EXTREMES)))]
    return y


Change = Callable[[torch.Tensor, np.random.Generator], Any]
_OF_TENSORS: tuple[Change, ...] = (
    lambda x, rng: x[: int(rng.integers(0, len(x) + 1))] if x.dim() else x,
    lambda x, rng: x.transpose(0, -1) if x.dim() else x,
    lambda x, rng: x[:1].expand(2**12, *x.shape[1:]) if x.dim() and len(x) else x,
    lambda x, rng: x.new_empty(0),
    lambda x, rng: x.to(torch.float64 if x.dtype != torch.float64 else torch.int8),
    lambda x, rng: x.repeat_interleave(2, dim=-1)[..., ::2] if x.dim() else x,
    lambda x, rng: x.flip(0)[None] if x.dim() else x,
)
_OF_LENGTHS: tuple[Change, ...] = (
    _one_extreme,
    _one_extreme,
    _one_extreme,
    lambda x, rng: x.flip(0),
    lambda x, rng: torch.stack([x, x + 1], dim=1)[:, 0],
    lambda x, rng: x[:1],
    lambda x, rng: x.double(),
    lambda x, rng: torch.cat([x, x[-1:] + int(rng.integers(1, 1000))]),
)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    with kernels.use("native"):
        found = fuzz(float(sys.argv[1]), int(sys.argv[2]))
    print(f"{sum(found.values())} calls, seed {sys.argv[2]}: {dict(found)}")
