"""Times of a causal convolution on one GPU, one rank of two whose messages are left out, as shares of a copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import cp_fast
from benchmarks.parts.ranks import Silent, seconds_alone, seconds_queued

__all__ = ["convolution_times"]

Call = Callable[..., torch.Tensor]


def convolution_times(rows: int, channels: int, turns: int) -> dict[str, Any]:
    """Milliseconds of the forward pass and of both, on the GPU alone and of calls in a row, the best of all turns. A
    forward pass has to read and write the bytes of one copy. Both passes read x twice and dout once, and write two
    results: the bytes of 2.5 copies.
    """
    x, dout = (torch.randn(rows, channels, device="cuda").bfloat16() for _ in range(2))
    weight, target = torch.randn(channels, 4, device="cuda").bfloat16(), torch.empty_like(x)
    x.requires_grad_()
    weight.requires_grad_()
    calls = _calls(rows)
    times: dict[str, list[list[float]]] = {}
    for turn in range(turns + 1):
        copied = seconds_queued(lambda: target.copy_(x.detach()), 6)
        if turn:
            times.setdefault("copy", []).append([copied, 2.5 * copied, copied, 2.5 * copied])
        for name, call in calls.items():
            forward = partial(call, x.detach(), weight.detach())

            def both(call: Call = call) -> None:
                torch.autograd.grad(call(x, weight), (x, weight), dout)

            found = [measure(one, 6) for measure in (seconds_queued, seconds_alone) for one in (forward, both)]
            if turn:
                times.setdefault(name, []).append(found)
    if not turns:  # everything is compiled now
        return {}
    best = {name: [min(column) * 1e3 for column in zip(*found, strict=True)] for name, found in times.items()}
    print("ms of forward, both on the GPU alone; of calls in a row; each as a share of the bytes' time")
    for name, found in best.items():
        shares = " ".join(f"{bound / x:.3f}" for bound, x in zip(best["copy"], found, strict=True))
        print(f"{name:44} {' '.join(f'{x:.3f}' for x in found)}   {shares}", flush=True)
    return {"rows": rows, "channels": channels, "ms": best}


def _calls(rows: int) -> dict[str, Call]:
    found: dict[str, Call] = {}
    sizes = {"heads_q": 2, "heads_kv": 2, "d_qk": 64, "d_v": 64, "dtype": torch.bfloat16, "device": "cuda"}
    cu = torch.tensor([0, 2 * rows])
    for layout, backend in (("contiguous", "torch"), ("contiguous", "auto"), ("dual_chunk", "auto")):
        cp = cp_fast.ContextParallel(Silent(0, 2), layout=layout, backend=backend)  # type: ignore[arg-type]
        plan = cp_fast.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=cu, linear=True, **sizes)  # type: ignore[arg-type]
        name = f"cp_fast, {layout}" if backend == "auto" else f"cp_fast, {layout}, {backend}"
        found[name] = partial(cp_fast.causal_conv1d, cp=cp, plan=plan, activation="silu")
    try:
        from fla.modules.causal_conv1d import causal_conv1d  # pyright: ignore[reportMissingImports]
    except ImportError:
        return found

    def fla(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return causal_conv1d(x[None], weight, activation="silu")[0][0]

    return found | {"flash-linear-attention": fla}
