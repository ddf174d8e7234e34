"""Linear attention on GPUs: errors of every kind against the oracle, and times compared with flash-linear-attention's.

    python -m benchmarks.linear check --kinds kda --out check.json            # all ranks of a simulated group, one GPU
    python -m benchmarks.linear warm --part 0 --parts 8 &                     # of 8 processes: compile for `speed`
    python -m benchmarks.linear speed --out speed.json                        # one rank of two, its messages left out
    python -m benchmarks.linear speed --gpus 2 --no-tuned --out speed.json    # two ranks, in a minute and a half
    python -m benchmarks.linear convolution --out convolution.json            # a causal convolution, by its bytes
    python -m benchmarks.linear scan --out scan.json                          # selective scans, likewise

`check` prints the errors of all results and gradients of each problem, relative to the oracle's, as roots of mean
squares. Next to them it prints those of the same call on one rank: spreading may add a half to them. Random problems
are a kind of `benchmarks.conformance_gpu`.

`speed` measures gated delta rule layers of 16 heads of 128, 16,384 tokens a GPU, in turns in one run. It has times of
calls in a row, which a slow host makes longer; times of the GPU alone, whose launches wait in its queue; the
processor's time for a call, all in one thread; and the launches of a call. Flash-linear-attention refuses its backward
pass on Hopper GPUs with Triton 3.4 to 3.7.0, whose compiler makes a wrong gradient of it. Its time is not affected. So
the refusal is lifted here, and no gradient of it is read.
"""

from __future__ import annotations

import faulthandler
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer

import cp_fast
from benchmarks.parts.linear_layers.tuning import tune_only, use_pieces
from benchmarks.parts.ranks import (
    Commit,
    Device,
    JsonOut,
    Silent,
    connect,
    largest,
    seconds_alone,
    seconds_queued,
    write_json,
)
from conformance.problems.linear import LinearAttention
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.problem import Sequence as Lengths
from tests.linear.problems import relative_errors

app = typer.Typer(add_completion=False)
HEADS, DIM, ROWS = 16, 128, 16_384
STANDS_S = 50.0
DOCUMENTS = (9001, 6200, 4100, 3072, 2501, 2048, 1777, 1300, 1024, 700, 500, 300, 128, 64, 40, 13)  # 32,768
SMALL = {
    "one document, dual_chunk": Problem(2, (Lengths(300, 300, 300, 300),), qkv_format="thd"),
    "four documents, contiguous": Problem(
        4, tuple(Lengths(n, n, n, n) for n in (150, 1, 0, 217)), layout="contiguous", qkv_format="thd"
    ),
    "many documents, dual_chunk": Problem(2, tuple(Lengths(n, n, n, n) for n in range(40, 120, 4)), qkv_format="thd"),
    "padding, bshd": Problem(4, tuple(Lengths(n, n, 160, 160) for n in (160, 33)), attn_mask_type="padding_causal"),
}


@app.command()
def check(
    kinds: Annotated[str, typer.Option(help="Some of the kinds, with commas.")] = "gated_delta_rule,kda,mamba2",
    dtypes: Annotated[str, typer.Option(help="With commas.")] = "bfloat16,float16,float32",
    tuned: Annotated[bool, typer.Option(help="Let Triton tune the kernels.")] = False,
    device: Device = "cuda",
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """Errors of each kind, forward and backward, over a simulated group."""
    if not tuned and device == "cuda":
        tune_only(0, 1000)
    found: dict[str, Any] = {"commit": commit, "torch": torch.__version__}
    wrong = 0
    for kind in kinds.split(","):
        for dtype in dtypes.split(","):
            for name, problem in SMALL.items():
                layer = LinearAttention(
                    kind=kind, heads=2, shared=2, d_k=64, d_v=128, initial_state=True, output_final_state=True
                )
                case = f"{kind}, {dtype}, {name}"
                try:
                    spread, alone = (
                        relative_errors(cp_fast, problem, layer, getattr(torch, dtype), device, cp_size=size)
                        for size in (problem.cp_size, 1)
                    )
                except Exception as error:
                    wrong += 1
                    found[case] = f"{type(error).__name__}: {error}"
                    print(f"FAILED {case}: {found[case]}", flush=True)
                    continue
                limit = {"float32": 1e-4, "float64": 1e-9}.get(dtype, 2e-2)
                bad = [x for x in spread if not spread[x] <= min(1.5 * alone[x] + limit / 100, limit)]
                wrong += bool(bad)
                found[case] = {"spread": spread, "alone": alone, "wrong": bad}
                text = " ".join(f"{x} {spread[x]:.1e}/{alone[x]:.1e}" for x in spread)
                print(f"{'WRONG ' + ','.join(bad) if bad else 'right'} {case}: {text}", flush=True)
                write_json(out, found)
    print(f"{wrong} wrong")
    raise typer.Exit(1 if wrong else 0)


@app.command()
def speed(
    gpus: Annotated[int, typer.Option(help="1: one rank of two without its messages; 2: over NCCL.")] = 1,
    turns: Annotated[int, typer.Option(help="How often each is measured.")] = 3,
    calls: Annotated[int, typer.Option(help="Calls in a row.")] = 10,
    rows: Annotated[int, typer.Option(help="Tokens a GPU.")] = ROWS,
    profile: Annotated[bool, typer.Option(help="Print the kernels of each.")] = True,
    tuned: Annotated[
        bool, typer.Option(help="Let Triton tune the kernels; else each takes its first configuration.")
    ] = True,
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """Times of a layer, forward and both passes."""
    options = Speed(gpus, turns, calls, rows, profile, commit, out, tuned)
    if gpus == 1:
        torch.cuda.set_device(0)
        _speed(Silent(0, 2), options)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (options, folder), nprocs=gpus)  # pyright: ignore[reportPrivateImportUsage]


@app.command()
def convolution(
    rows: Annotated[int, typer.Option(help="Tokens a GPU.")] = ROWS,
    channels: Annotated[int, typer.Option(help="Of Qwen3-Next.")] = 8192,
    turns: Annotated[int, typer.Option(help="How often each is measured.")] = 3,
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """Times of a causal convolution with SiLU, of a copy of its input, and of flash-linear-attention's."""
    torch.cuda.set_device(0)
    found = convolution_times(rows, channels, turns)
    write_json(out, {"commit": commit, "torch": torch.__version__, "gpu": torch.cuda.get_device_name()} | found)


@app.command()
def scan(
    rows: Annotated[int, typer.Option(help="Tokens a GPU.")] = ROWS,
    turns: Annotated[int, typer.Option(help="How often each is measured.")] = 3,
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """Times of the selective scans of Mamba-2.8B (5,120 channels of 16 numbers) and of RecurrentGemma-2B (2,560 of one)
    by Triton and by PyTorch, and of copies of as many bytes as they must read and write.
    """
    torch.cuda.set_device(0)
    found = {name: scan_times(rows, *sizes, turns) for name, sizes in SCANS.items()}
    write_json(out, {"commit": commit, "torch": torch.__version__, "gpu": torch.cuda.get_device_name()} | found)


@app.command()
def warm(
    part: Annotated[int, typer.Option(help="Which part of all configurations, from 0.")] = 0,
    parts: Annotated[int, typer.Option(help="Into how many parts they are divided.")] = 8,
) -> None:
    """Compile a part of what `speed` tunes, into Triton's cache on the disk."""
    tune_only(part, parts)
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    options = Speed(1, 1, 1, 2048, False, "", None)
    with lifted():
        for small in (True, False):  # kernels of states are others where fragments are not cut
            use_pieces(small=small)
            for name, (call, rows) in compared_calls(Silent(0, 2), options, device).items():
                if not small or "one document" in name:
                    layer = layer_of(rows, device)
                    torch.autograd.grad(call(**layer), list(layer.values()), torch.randn_like(layer["v"]))
    torch.cuda.synchronize()


@dataclass(frozen=True)
class Speed:
    """The options of a measurement."""

    gpus: int
    turns: int
    calls: int
    rows: int
    profile: bool
    commit: str
    out: Path | None
    tuned: bool = True


def _rank(rank: int, options: Speed, folder: str) -> None:
    faulthandler.dump_traceback_later(STANDS_S, repeat=True)  # a rank that waits for the other says where
    connect(rank, options.gpus, folder)
    _speed(dist.group.WORLD, options)
    dist.destroy_process_group()


Call = Callable[..., torch.Tensor]


def host_seconds(fn: Callable[[], Any], calls: int) -> float:
    """The processor's time for one call, whose backward pass runs in this thread too."""
    best = float("inf")
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(calls):
            torch.cuda.synchronize()
            began = time.thread_time()
            fn()
            best = min(best, time.thread_time() - began)
    return best


def launches(fn: Callable[[], Any]) -> int:
    """How many kernels and copies one call gives the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        fn()
        torch.cuda.synchronize()
    return sum(getattr(event.device_type, "name", "") == "CUDA" for event in seen.events() or ())


def _speed(group: Any, options: Speed) -> None:
    """Tuners try each of hundreds of configurations for some tenths of a second, in every process: minutes, in which a
    run may be cut. Without them both sides have the same kernels. flash-linear-attention's own context parallelism
    comes last, beside the kernel alone again: the record has the others if it stands still.
    """
    if not options.tuned:
        tune_only(0, 1000)
    device = torch.device("cuda", torch.cuda.current_device())
    versions = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "gpus": options.gpus}
    versions |= {"tuned": options.tuned}
    with lifted():
        found = compared_calls(group, options, device)
        others = {name: found.pop(name) for name in list(found) if name.startswith("flash-linear")}
        record = versions | {"commit": options.commit} | _in_turns(found, options, device)
        first = options.gpus == 1 or dist.get_rank() == 0
        if first:
            write_json(options.out, record)
        if others:
            alone = {"kernel alone": found["kernel alone"]}
            record["flash-linear-attention's"] = _in_turns(alone | others, options, device)
            if first:
                write_json(options.out, record)


def _in_turns(some: dict[str, tuple[Call, int]], options: Speed, device: torch.device) -> dict[str, Any]:
    """Times of these in turns, the launches of each, and the kernels of each if asked for."""
    found = {name: (call, layer_of(rows, device)) for name, (call, rows) in some.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in found}
    counts: dict[str, list[int]] = {}
    for turn in range(options.turns + 1):
        for name, (call, layer) in found.items():
            dout, forward = torch.randn_like(layer["v"]), partial(call, **layer)

            def both(call: Call = call, layer: dict[str, torch.Tensor] = layer, dout: torch.Tensor = dout) -> None:
                torch.autograd.grad(call(**layer), list(layer.values()), dout)

            began = time.monotonic()
            if turn == 0:
                both()
                counts[name] = [launches(forward), launches(both)]
                print(f"compiled in {time.monotonic() - began:.1f} s: {name}", flush=True)
                continue
            found_now = [
                measure(one, options.calls)
                for measure in (seconds_alone, seconds_queued, host_seconds)
                for one in (forward, both)
            ]
            times[name].append([largest(x) for x in found_now] if options.gpus > 1 else found_now)
    profiled = found.items() if options.profile else ()
    kernels = {name: _kernels(call, layer, torch.randn_like(layer["v"])) for name, (call, layer) in profiled}
    best = {name: [min(x) * 1e3 for x in zip(*turns, strict=True)] for name, turns in times.items()}
    if options.gpus == 1 or dist.get_rank() == 0:
        print("ms of forward, both; of the GPU alone; of the host alone; each as a part of the kernel alone; launches")
        for name, found_now in best.items():
            base = best["kernel alone, documents" if "documents" in name else "kernel alone"]
            ratios = " ".join(f"{b / x:.3f}" for b, x in zip(base, found_now, strict=True))
            print(f"{name:44} {' '.join(f'{x:.3f}' for x in found_now)}   {ratios}   {counts[name]}", flush=True)
        for name, lines in kernels.items():
            print(f"\n{name}", *lines, sep="\n")
    return {"ms": best, "launches": counts, "all": times, "kernels": kernels}


def compared_calls(group: Any, options: Speed, device: torch.device) -> dict[str, tuple[Call, int]]:
    """The calls that are compared, by name, and the rows of each."""
    from fla.ops.cp import build_cp_context  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    total = 2 * options.rows
    documents = [n * total // sum(DOCUMENTS) for n in DOCUMENTS]
    documents[0] += total - sum(documents)
    halves = [n // 2 for n in documents]

    def alone(lengths: Sequence[int]) -> Call:
        cu = torch.tensor([0, *accumulate(lengths)], device=device)

        def call(**layer: torch.Tensor) -> torch.Tensor:
            return chunk_gated_delta_rule(**{n: x[None] for n, x in layer.items()}, cu_seqlens=cu)[0][0]

        return call

    def ours(lengths: Sequence[int], layout: Any) -> tuple[Call, int]:
        cp = cp_fast.ContextParallel(group, layout=layout)
        cu = torch.tensor([0, *accumulate(lengths)], device=device)
        sizes = {"heads_q": 2, "heads_kv": 2, "d_qk": 64, "d_v": 64, "dtype": torch.bfloat16, "device": device}
        plan = cp_fast.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=cu, linear=True, **sizes)

        def call(**layer: torch.Tensor) -> torch.Tensor:
            return cp_fast.linear_attention(**layer, cp=cp, plan=plan)  # type: ignore[arg-type]

        return call, cp_fast.shard(torch.zeros(sum(lengths), device=device), cp=cp, plan=plan).shape[0]

    found: dict[str, tuple[Call, int]] = {
        "kernel alone": (alone([options.rows]), options.rows),
        "kernel alone, documents": (alone(halves), sum(halves)),
        "cp_fast, one document, contiguous": ours([total], "contiguous"),
        "cp_fast, one document, dual_chunk": ours([total], "dual_chunk"),
        "cp_fast, documents, contiguous": ours(documents, "contiguous"),
        "cp_fast, documents, dual_chunk": ours(documents, "dual_chunk"),
        "cp_fast, documents, balanced": ours(documents, "balanced"),
    }
    if options.gpus > 1:
        for layout in ("contiguous", "zigzag"):
            context = build_cp_context(torch.tensor([0, total], device=device), group, layout=layout)

            def call(context: Any = context, **layer: torch.Tensor) -> torch.Tensor:
                return chunk_gated_delta_rule(**{n: x[None] for n, x in layer.items()}, cp_context=context)[0][0]

            found[f"flash-linear-attention, one document, {layout}"] = call, options.rows
    return found


@contextmanager
def lifted() -> Iterator[None]:
    """Let flash-linear-attention run the backward pass that it refuses here, for its time."""
    import fla.ops.common.chunk_o as kernels  # pyright: ignore[reportMissingImports]

    before, kernels.IS_NVIDIA_HOPPER = kernels.IS_NVIDIA_HOPPER, False
    try:
        yield
    finally:
        kernels.IS_NVIDIA_HOPPER = before


def _kernels(call: Call, layer: dict[str, torch.Tensor], dout: torch.Tensor) -> list[str]:
    """The kernels of both passes, the longest first: ms, launches, name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(2):
            torch.autograd.grad(call(**layer), list(layer.values()), dout)
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    return [f"  {row.self_device_time_total / 2e3:8.3f} {row.count // 2:4d}  {row.key[:90]}" for row in rows[:22]]


def layer_of(rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of one rank."""
    draw = torch.Generator(device=device).manual_seed(1)

    def some(*last: int) -> torch.Tensor:
        return torch.randn(rows, *last, generator=draw, device=device)

    found = {
        "q": torch.nn.functional.normalize(some(HEADS, DIM), dim=-1).bfloat16(),
        "k": torch.nn.functional.normalize(some(HEADS, DIM), dim=-1).bfloat16(),
        "v": some(HEADS, DIM).bfloat16(),
        "g": -0.1 * some(HEADS).abs(),
        "beta": some(HEADS).sigmoid().bfloat16(),
    }
    return {name: x.requires_grad_() for name, x in found.items()}


# ---- causal convolutions and selective scans: one rank of two whose messages are left out, as shares of a copy


SCANS = {"mamba": (5120, 16), "rg-lru": (2560, 1)}  # channels, and numbers of a state


def convolution_times(rows: int, channels: int, turns: int) -> dict[str, Any]:
    """Milliseconds of the forward pass and of both, on the GPU alone and of calls in a row, the best of all turns. A
    forward pass has to read and write the bytes of one copy. Both passes read x twice and dout once, and write two
    results: the bytes of 2.5 copies.
    """
    x, dout = (torch.randn(rows, channels, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(channels, 4, device="cuda").bfloat16()
    times = _shares_of_a_copy(_convolutions(rows), {"x": x, "weight": weight}, dout, (1, 2.5), turns)
    return {"rows": rows, "channels": channels, **times}


def scan_times(rows: int, channels: int, numbers: int, turns: int) -> dict[str, Any]:
    """The same of a scan. v, out and dout are in bfloat16, and g, the step of time, in float32. A forward pass reads
    v and g and writes out: the bytes of two copies of v. Both read v and g twice and dout once, and write the gradients
    too: 5.5 copies. Those of q and k are few.
    """
    q, k = (torch.randn(rows, 1, numbers, device="cuda").bfloat16() for _ in range(2))
    v, dout = (torch.randn(rows, 1, channels, device="cuda").bfloat16() for _ in range(2))
    g, rates = 0.1 * torch.rand(rows, 1, channels, device="cuda"), -torch.rand(1, numbers, channels, device="cuda")
    layer = {"q": q, "k": k, "v": v, "g": g, "A": rates}
    calls = {
        name: partial(cp_fast.linear_attention, cp=cp, plan=plan, kind="mamba", scale=1.0)
        for name, (cp, plan) in _spread(rows).items()
    }
    times = _shares_of_a_copy(calls, layer, dout, (2, 5.5), turns)
    return {"rows": rows, "channels": channels, "numbers": numbers, **times}


def _shares_of_a_copy(
    calls: dict[str, Call], layer: dict[str, torch.Tensor], dout: torch.Tensor, copies: tuple[float, float], turns: int
) -> dict[str, Any]:
    """copies: of dout, the forward pass and both passes have to move the bytes of so many."""
    target, leaves = torch.empty_like(dout), {name: x.detach().requires_grad_() for name, x in layer.items()}
    times: dict[str, list[list[float]]] = {}
    for turn in range(turns + 1):
        copied = seconds_queued(lambda: target.copy_(dout), 6)
        if turn:
            times.setdefault("copy", []).append([n * copied for n in (*copies, *copies)])
        for name, call in calls.items():
            forward = partial(call, **layer)

            def both(call: Call = call) -> None:
                torch.autograd.grad(call(**leaves), list(leaves.values()), dout)

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
    return {"ms": best, "kernels": {name: _kernels(call, leaves, dout) for name, call in calls.items()}}


def _spread(rows: int) -> dict[str, tuple[Any, Any]]:
    """Contexts of one rank of two, and plans of one document, by name."""
    found: dict[str, tuple[Any, Any]] = {}
    sizes = {"heads_q": 2, "heads_kv": 2, "d_qk": 64, "d_v": 64, "dtype": torch.bfloat16, "device": "cuda"}
    cu = torch.tensor([0, 2 * rows])
    for layout, backend in (("contiguous", "torch"), ("contiguous", "auto"), ("dual_chunk", "auto")):
        cp = cp_fast.ContextParallel(Silent(0, 2), layout=layout, backend=backend)  # type: ignore[arg-type]
        plan = cp_fast.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=cu, linear=True, **sizes)  # type: ignore[arg-type]
        found[f"cp_fast, {layout}" if backend == "auto" else f"cp_fast, {layout}, {backend}"] = cp, plan
    return found


def _convolutions(rows: int) -> dict[str, Call]:
    found: dict[str, Call] = {
        name: partial(cp_fast.causal_conv1d, cp=cp, plan=plan, activation="silu")
        for name, (cp, plan) in _spread(rows).items()
    }
    try:
        from fla.modules.causal_conv1d import causal_conv1d  # pyright: ignore[reportMissingImports]
    except ImportError:
        return found

    def fla(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return causal_conv1d(x[None], weight, activation="silu")[0][0]

    return found | {"flash-linear-attention": fla}


if __name__ == "__main__":
    app()
