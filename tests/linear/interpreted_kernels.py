"""A program of `test_triton_kernels.py`: Triton's kernels of linear layers in its interpreter, on a CPU.

    TRITON_INTERPRET=1 python -m tests.linear.interpreted_kernels float32 0 5

prints what is wrong of seeds 0 and 5: of the kernels alone, and, against the oracle, of a scan over the ranks of a
simulated group. The interpreter has no products of bfloat16, and no tuner. A tuner launches a kernel often on the same
tensors, so every second seed launches the kernels twice that have a choice of configurations.
"""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import cp_fast
from benchmarks.parts.linear_layers.tuning import tune_only
from conformance.implementation import Implementation, context
from conformance.problems.linear import LinearAttention, batch_of, build_linear, compare_linear, play_layer
from cp_fast.kernels.linear.scan_kernels import ScanKernels
from cp_fast.layers.linear_attention import choose_kernels, features_of_call
from cp_ref import SimGroup
from cp_ref.schedules.words import Feature
from tests.linear.kernel_checks import draw, mistakes


def main(dtype: str, *seeds: str) -> int:
    """How many problems are wrong."""
    tune_only(0, 1000)
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    from cp_fast.kernels.convolution import triton_convolution
    from cp_fast.kernels.linear import triton_scan
    from cp_fast.kernels.linear.fla.direct_launch import DirectLaunch

    launch = DirectLaunch.__getitem__

    def twice(self: DirectLaunch, grid: Any) -> Any:
        def launches(*given: Any, **named: Any) -> None:
            tuned = self._tuner is not None and self._tuner.keys  # by what it chooses
            for _ in range(2 if tuned else 1):
                launch(self, grid)(*given, **named)

        return launches

    def splat(self: Any, kind: Any, x: Any) -> Any:
        """A number in all places. Triton 3.9 gives the result of a comparison another dtype than its values have."""
        return interpreter.TensorHandle(np.full(kind.shape, x.data), x.dtype.scalar)

    setattr(interpreter.InterpreterBuilder, "create_splat", splat)  # noqa: B010
    triton_convolution.libdevice = SimpleNamespace(fast_dividef=lambda x, y: x / y)  # of the GPU's own library
    triton_scan.CHANNELS = 32  # so that the channels of a problem are several blocks
    setattr(ScanKernels, "features", frozenset(Feature))  # noqa: B010  on tensors of the CPU too
    setattr(ScanKernels, "why_not", lambda _: None)  # noqa: B010
    assert choose_kernels(features_of_call("cpu", dtype, 16, 70), "auto", "mamba").name == "triton"
    wrong = 0
    for seed in map(int, seeds):
        setattr(DirectLaunch, "__getitem__", twice if seed % 2 else launch)  # noqa: B010
        problem = draw(seed, getattr(torch, dtype))
        case = None if seed % 2 else spread_scan(seed, dtype)  # of every second seed, for they take longer
        found = [*mistakes(problem, "cpu"), *(() if case is None else spread_mistakes(case))]
        wrong += bool(found)
        print(problem, case, *found or ["right"], sep="\n  ", flush=True)
    return wrong


def spread_mistakes(case: LinearAttention) -> list[str]:
    """What the suite finds, without its limit of time."""
    impl, tensors = Implementation(cp_fast), build_linear(case, "cpu")
    ranks = SimGroup(case.cp_size).run(
        lambda member: play_layer(impl, case, tensors, context(impl, case.problem, member), member.rank)
    )
    return compare_linear(case, tensors, ranks)


def spread_scan(seed: int, dtype: str) -> LinearAttention:
    """A scan over ranks: documents of any lengths, with padding, in fragments of several tiles or of a row."""
    rng = random.Random(seed)
    slots = [rng.choice([0, 1, 16, 19]) for _ in range(rng.randint(1, 3))] + [rng.choice([37, 70])]
    documents = tuple((n if rng.random() < 0.7 else rng.randint(0, n), n) for n in slots)
    layout, how = rng.choice(["dual_chunk", "contiguous", "balanced"]), {"dtype": dtype, "seed": seed}
    return LinearAttention(
        batch_of(documents, rng.choice([1, 2, 3]), layout=layout, tail=rng.choice([0, 2]), **how),
        wide=dtype == "float16" and rng.random() < 0.5,
        kind="mamba", heads=rng.choice([1, 2]), shared=rng.choice([1, 2]), d_k=(1, 16, 5)[seed // 2 % 3],
        d_v=rng.choice([1, 6, 70]), scale=rng.choice([None, -0.5]), initial_state=rng.random() < 0.5,
        output_final_state=rng.random() < 0.5, spoiled=rng.choice([-1, 0]),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
