"""A program of `test_triton_compiles.py`: Triton's kernels, compiled for an H100 on a machine without a GPU.

    python -m tests.cp_fast.kernels.compiled_kernels linear 0 5
    python -m tests.cp_fast.kernels.compiled_kernels sparse 0 5

compiles what the random problems of seeds 0 and 5 launch, in the first configuration of each tuner, and prints how
many launches there were. A kernel that needs more shared memory than a multiprocessor has is an error, as on a GPU.
Nothing is launched there, so nobody looks at results.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.parts.linear_layers.host import NoLauncher, stand_in


def main(layers: str, *seeds: str) -> None:
    """Compile what the problems of these layers launch, in bfloat16."""
    stand_in()
    for seed in map(int, seeds):
        {"linear": _linear, "sparse": _sparse}[layers](seed)
    print(f"{NoLauncher.launches} launches")


def _linear(seed: int) -> None:
    from tests.linear.kernel_checks import CHECKS, draw

    problem = draw(seed, torch.bfloat16)
    for check in CHECKS:
        for _ in check(problem, "cpu"):
            pass


def _sparse(seed: int) -> None:
    from cp_fast.kernels.sparse.triton_sparse import triton_kernels
    from tests.sparse.kernel_checks import draw

    kernels: Any = triton_kernels
    problem = draw(seed)
    x, visible, indices = problem.numbers("cpu"), problem.visible("cpu"), problem.indices("cpu")
    index = x["q_index"], x["k_index"], x["weights"]
    kernels.select(*index, visible, problem.top_k, 0.5)
    rows = kernels.rows_of(indices, visible)
    sink, dlse = x["sink"] if problem.sink else None, x["dlse"] if problem.with_dlse else None
    out, lse = kernels.forward(x["q"], x["k"], x["v"], rows, 0.5, sink)
    compared = (*index, x["q"], x["k"], lse, rows[:, :1], 0.5, 0.5)
    kernels.loss(*compared)
    for deterministic in (False, True):
        results = out, lse, x["dout"], dlse
        kernels.backward(x["q"], x["k"], x["v"], rows, *results, 0.5, deterministic, one_sum=problem.view)
        kernels.loss_backward(*compared, x["dloss"], deterministic)


if __name__ == "__main__":
    main(*sys.argv[1:])
