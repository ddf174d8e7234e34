"""A program of `test_triton_kernels.py`: Triton's kernels of linear layers in its interpreter, on a CPU.

    TRITON_INTERPRET=1 python -m tests.linear.interpreted_kernels float32 0 5

prints what is wrong of seeds 0 and 5. The interpreter has no products of bfloat16, and no tuner.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.parts.linear_layers.tuning import tune_only
from tests.linear.kernel_checks import draw, mistakes


def main(dtype: str, *seeds: str) -> int:
    """How many problems are wrong."""
    tune_only(0, 1000)
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    from cp_fast.kernels.convolution import triton_convolution

    def splat(self: Any, kind: Any, x: Any) -> Any:
        """A number in all places. Triton 3.9 gives the result of a comparison another dtype than its values have."""
        return interpreter.TensorHandle(np.full(kind.shape, x.data), x.dtype.scalar)

    setattr(interpreter.InterpreterBuilder, "create_splat", splat)  # noqa: B010
    triton_convolution.libdevice = SimpleNamespace(fast_dividef=lambda x, y: x / y)  # of the GPU's own library
    wrong = 0
    for seed in map(int, seeds):
        problem = draw(seed, getattr(torch, dtype))
        found = mistakes(problem, "cpu")
        wrong += bool(found)
        print(problem, *found or ["right"], sep="\n  ", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
