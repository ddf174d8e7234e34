"""The host's time of a linear layer on a machine without a GPU. Kernels are compiled for an H200, and launched nowhere.

    python -m benchmarks.parts.linear_layers.host --out host.json

It needs Triton with its compiler, and flash-linear-attention. Operators of PyTorch compute on the CPU, on tensors so
small that their time is that of calling them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import typer

from benchmarks.parts.linear_layers.tuning import tune_only, use_pieces
from benchmarks.parts.ranks import Commit, JsonOut

HEADS, DIM, ROWS = 2, 64, 1024


class NoLauncher:
    """Launches nothing, and counts."""

    launches = 0

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        NoLauncher.launches += 1


class NoGpu:
    """A driver that answers Triton's questions."""

    launcher_cls = NoLauncher
    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 1, 32, 0, 1024), get_device_properties=lambda _: {"max_shared_mem": 232_448}
    )

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

        self.get_current_target: Callable[[], Any] = lambda: GPUTarget("cuda", 90, 32)
        self.get_current_device: Callable[[], int] = lambda: 0
        self.get_current_stream: Callable[[int], int] = lambda _: 0
        self.get_active_torch_device = partial(torch.device, "cpu")


def stand_in() -> None:
    """From now on Triton and PyTorch answer as on a machine with an H200. Call it before a library of kernels is
    imported.
    """
    from triton.runtime import driver  # pyright: ignore[reportMissingImports]

    driver.set_active(NoGpu())  # pyright: ignore[reportArgumentType]
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, major=9, minor=0)
    for name, value in {
        "is_available": True,
        "current_device": 0,
        "get_device_name": properties.name,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
    }.items():
        setattr(torch.cuda, name, lambda *_, found=value: found)
    tune_only(0, 1000)


def least_us(fn: Callable[[], Any]) -> float:
    """The least time of this thread for one of 200 calls, in microseconds."""
    found: list[float] = []
    for _ in range(200):
        began = time.thread_time()
        fn()
        found.append(time.thread_time() - began)
    return 1e6 * min(found)


def main(commit: Commit = "", out: JsonOut = None) -> None:
    """Print the host's time and the launches of Triton's kernels for each case of `benchmarks.linear speed`."""
    stand_in()
    import json

    from benchmarks import linear
    from cp_fast.kernels.linear.fla.fla_kernels import FlaKernels
    from cp_ref.schedules.words import Feature

    FlaKernels.features = frozenset(Feature)  # on tensors of the CPU too
    linear.HEADS, linear.DIM = HEADS, DIM
    use_pieces(small=True)
    cpu, found = torch.device("cpu"), dict[str, Any]()
    options = linear.Speed(1, 1, 1, ROWS, False, commit, out)
    with linear.lifted(), torch.autograd.set_multithreading_enabled(False):
        for name, (call, rows) in linear.compared_calls(linear.Silent(0, 2), options, cpu).items():
            layer = linear.layer_of(rows, cpu)
            forward, dout = partial(call, **layer), torch.randn_like(layer["v"])

            def both(forward: Any = forward, layer: Any = layer, dout: Any = dout) -> None:
                torch.autograd.grad(forward(), list(layer.values()), dout)

            found[name] = {}
            for what, fn in (("forward", forward), ("both", both)):
                fn()
                NoLauncher.launches = 0
                fn()
                found[name][what] = {"launches of Triton": NoLauncher.launches, "us": round(least_us(fn))}
            print(name, found[name], flush=True)
    if out is not None:
        out.write_text(json.dumps({"commit": commit, "torch": torch.__version__, "us": found}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
