"""A program of `test_triton_sparse.py`: kernels over chosen keys in Triton's interpreter, on a CPU.

    TRITON_INTERPRET=1 python -m tests.sparse.interpreted_kernels float32 0 5

prints what is wrong of seeds 0 and 5; without a seed, of the workspace. The interpreter has no products of bfloat16.
"""

from __future__ import annotations

import sys
import warnings

import torch

from cp_fast.kernels.sparse.triton_sparse import triton_kernels
from tests.sparse.kernel_checks import check_workspace, draw, mistakes


def main(dtype: str, *seeds: str) -> int:
    """How many problems are wrong."""
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of logarithms of 0 that are not taken
    if not seeds:
        print(*(bad := check_workspace("cpu")), sep="\n", flush=True)
        return len(bad)
    wrong = 0
    for seed in map(int, seeds):
        problem = draw(seed, getattr(torch, dtype), small=True)
        found = mistakes(triton_kernels, problem, "cpu")
        wrong += bool(found)
        print(problem, *found or ["right"], sep="\n  ", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
