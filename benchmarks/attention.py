"""Context-parallel attention against one GPU alone, in the same run: time, efficiency, peak memory.

    python -m benchmarks.attention --gpus 4 --tokens 65536 --schedules p2p,all_gather,a2a,a2a+p2p --out results.csv

efficiency = (time of the whole problem on one GPU, kernel alone, no context parallelism) / gpus / (time over the gpus).
A time is that of several calls in a row over their number, as layers follow each other in training. The one GPU makes
`gpus` times fewer calls. So both take equally long, and the host's time for the first call weighs equally. Both are
measured in turns (A B A B), with CUDA events, on all GPUs at once. Of both the slowest GPU counts, and the median of
the rounds is reported. Before that, each schedule's out, dq, dk, dv are compared with the single GPU's. If they differ,
nothing is reported. `host_ms` is the host's time to launch one call, forward and backward.

    --layouts dual_chunk,balanced   each schedule under each layout, in turns too
    --messages peer_memory,group,graph   each schedule with each transport: peer memory, NCCL, NCCL in a CUDA graph
    --without -,free_early,all     each without a compiler pass (`cp_fast.passes`), in turns too; `each`
                             means -, every pass, and all
    --peers                  ring-flash-attention, PyTorch's `context_parallel`, TransformerEngine and MagiAttention
                             (`others.py`), in turns too, each compared with the single GPU; which are left out and why,
                             each row says
    --trace FOLDER           a Chrome trace of every rank and one picture with its kernels, transfers and gaps

With fewer GPUs than ranks, ranks share a GPU: then all are compared with the single GPU, and no time is reported.
"""

from __future__ import annotations

import csv
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

import cp_fast
from benchmarks.parts import timeline
from benchmarks.parts.others import Other, others
from benchmarks.parts.ranks import Commit, Schedules, connect, largest, passes_of, seconds, switched
from cp_fast.kernels.attention.backend_protocol import Backend, BackwardOperands, LaunchOptions
from cp_fast.kernels.attention.choose_backend import by_name
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_ref.calls.declared import replaced
from cp_ref.schedules.problem import Problem, ScoreSpec, Sequence


@dataclass(frozen=True)
class Job:
    """One problem: sequences packed in thd, causal."""

    gpus: int
    lengths: tuple[int, ...]
    heads_q: int
    heads_kv: int
    d_qk: int
    d_v: int
    window: int  # -1 for none
    backend: str
    rounds: int
    calls: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def forward_flops(self) -> float:
        """4 operations per visible pair, head and (mean) head dim, as the field counts them."""
        reach = [min(n, self.window + 1) if self.window >= 0 else n for n in self.lengths]
        pairs = sum(r * (r + 1) / 2 + (n - r) * r for n, r in zip(self.lengths, reach, strict=True))
        return 2.0 * pairs * self.heads_q * (self.d_qk + self.d_v)

    @property
    def problem(self) -> Problem:
        """As other libraries are asked for it: in dual_chunk."""
        return Problem(
            self.gpus,
            tuple(Sequence(n, n, n, n) for n in self.lengths),
            qkv_format="thd",
            attn_mask_type="padding_causal",
            window_size=(self.window, 0 if self.window >= 0 else -1),
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            d_qk=self.d_qk,
            d_v=self.d_v,
            dtype="bfloat16",
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """q, k, v, dout, whole, the same on every rank."""
        generator = torch.Generator(device="cuda").manual_seed(0)
        heads = {"q": (self.heads_q, self.d_qk), "k": (self.heads_kv, self.d_qk)}
        heads |= {"v": (self.heads_kv, self.d_v), "dout": (self.heads_q, self.d_v)}
        return {
            name: torch.randn(self.tokens, *hd, generator=generator, device="cuda").bfloat16()
            for name, hd in heads.items()
        }


def alone(job: Job, backend: Backend, x: dict[str, torch.Tensor]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The whole problem on one GPU, kernels only: (forward, forward and backward)."""
    left = None if job.window < 0 else job.window
    segments = VarlenBatch.pack(job.lengths, job.lengths, left, 0, "cuda")
    options = LaunchOptions(ScoreSpec(job.d_qk**-0.5))

    def forward() -> Any:
        return backend.forward(x["q"], x["k"], x["v"], segments, options)

    def both() -> Any:
        part = forward()
        out = part.out.to(x["q"].dtype)
        return out, *backend.backward(
            [BackwardOperands(x["dout"], x["q"], x["k"], x["v"], out, part.lse, None)], segments, options
        )

    return forward, both


@dataclass(frozen=True)
class Contender:
    """One way to compute the problem over all GPUs; each function returns this rank's slices: out (dq, dk, dv).

    Attributes:
        name: of the schedule.
        messages: what carried them.
        without: the compiler pass that did not run: "-" for none, "all" for all of them.
        slices: this rank's slices of a global tensor.
        inside: what several calls are made inside.
    """

    library: str
    name: str
    layout: str
    messages: str
    without: str
    slices: Callable[[torch.Tensor], torch.Tensor]
    forward: Callable[[], Any]
    both: Callable[[], Any]
    inside: Callable[[], AbstractContextManager[None]] = nullcontext


def parallel(
    job: Job, schedule: Any, layout: Any, messages: str, without: str, group: Any, x: dict[str, torch.Tensor]
) -> Contender:
    """cp_fast's; `messages`: "auto", "group", "peer_memory", or "graph" for calls that are replayed. `without`: see
    `Contender`.
    """
    off = switched(without)
    cp = cp_fast.ContextParallel(group, schedule, layout=layout, backend=job.backend)
    cu = torch.tensor([sum(job.lengths[:n]) for n in range(len(job.lengths) + 1)], dtype=torch.int32)
    with off():
        plan = cp_fast.make_plan(
            cp=cp,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            window_size=(job.window, 0),
            cu_seqlens_q=cu,
            heads_q=job.heads_q,
            heads_kv=job.heads_kv,
            d_qk=job.d_qk,
            d_v=job.d_v,
            dtype=torch.bfloat16,
            device=x["q"].device,
        )
    slices = partial(cp_fast.shard, cp=cp, plan=plan)
    local = {name: slices(t) for name, t in x.items()}
    q, k, v = (local[name].requires_grad_() for name in "qkv")
    if messages in ("group", "graph"):
        plan = replaced(plan, batch=replace(plan.batch, messages=None))
    by_group = plan.messages is None
    if messages == "peer_memory" and by_group:
        raise SystemExit("messages through peer memory cannot be had here; doctor says why")

    def forward() -> Any:
        with torch.no_grad():
            return cp_fast.attention(q, k, v, cp=cp, plan=plan)

    def both() -> Any:
        out = cp_fast.attention(q, k, v, cp=cp, plan=plan)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), local["dout"])

    if messages == "graph":
        return Contender("cp_fast", schedule, cp.layout, "graph", without, slices, captured(forward), captured(both))
    carried = "group" if by_group else "peer_memory"
    return Contender("cp_fast", schedule, cp.layout, carried, without, slices, forward, both, off)


def other(way: Other, x: dict[str, torch.Tensor]) -> Contender:
    """Another library's."""
    local = {name: way.slices(t).contiguous() for name, t in x.items()}
    q, k, v = (local[name].requires_grad_() for name in "qkv")

    def forward() -> Any:
        with torch.no_grad():
            return way.attend(q, k, v)

    def both() -> Any:
        out = way.attend(q, k, v)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), local["dout"])

    return Contender(way.library, way.schedule, way.layout, "group", "-", way.slices, forward, both, way.inside)


def captured(fn: Callable[[], Any]) -> Callable[[], Any]:
    """The same call as a CUDA graph, whose messages are the group's own: the host launches one thing."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.autograd.set_multithreading_enabled(False):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fn()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            results = fn()

    def replay(_reads: Any = fn) -> Any:  # its tensors, which the graph has by address, live as long
        graph.replay()
        return results

    return replay


def host_seconds(fn: Callable[[], Any], calls: int) -> float:
    """The host's time to launch one of several calls in a row; the median of five, of the slowest rank."""
    taken = []
    for _ in range(5):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            fn()
        taken.append((time.perf_counter() - begin) / calls)
    return largest(statistics.median(taken))


def peak_bytes(fn: Callable[[], Any]) -> int:
    """Most memory allocated during a call, above what was allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def worst_error(contender: Contender, whole: Any) -> float:
    """The largest relative error of this rank's slices, over out, dq, dk, dv and all ranks."""
    with contender.inside():
        slices = contender.both()
    errors = []
    for reference, mine in zip(whole, slices, strict=True):
        expected = contender.slices(reference).double()
        errors.append(((mine.double() - expected).norm() / expected.norm()).item())
    return largest(max(errors))


def checked(contenders: list[Contender], whole: Any) -> tuple[list[tuple[Contender, float]], dict[str, str]]:
    """The contenders with their errors, and which of other libraries' are left out, and why. If one of ours is wrong,
    nothing is reported.
    """
    found, left_out = list[tuple[Contender, float]](), dict[str, str]()
    for contender in contenders:
        reason, error = "", float("nan")
        try:
            error = worst_error(contender, whole)
        except Exception as failure:  # whatever another library raises is its answer
            if contender.library == "cp_fast":
                raise
            reason = " ".join(f"{type(failure).__name__}: {failure}".split())
        if not reason and not error < 1e-2:
            reason = f"relative error {error:.2e} against one GPU"
        if not reason:
            found.append((contender, error))
        elif contender.library == "cp_fast":
            raise SystemExit(f"{contender.name}: {reason}; nothing is reported")
        else:
            left_out[f"{contender.library} {contender.name}"] = reason
    return found, left_out


def measure(job: Job, one: tuple[Callable[[], Any], Callable[[], Any]], contenders: list[Contender]) -> list[list[Any]]:
    """By contender the medians of (one GPU's forward, forward, one GPU's both, both), all in turns."""
    for fn in one:
        fn()
    for contender in contenders:
        with contender.inside():
            for _ in range(2):
                contender.forward()
                contender.both()
    rounds: list[list[list[float]]] = [[] for _ in contenders]
    fewer = max(job.calls // job.gpus, 1)
    for _ in range(job.rounds):
        for times, contender in zip(rounds, contenders, strict=True):
            times.append([])
            for alone_fn, fn in zip(one, (contender.forward, contender.both), strict=True):
                times[-1].append(seconds(alone_fn, fewer))
                with contender.inside():
                    times[-1].append(seconds(fn, job.calls))
    return [[statistics.median(column) for column in zip(*times, strict=True)] for times in rounds]


def worker(rank: int, job: Job, ways: tuple[list[str], ...], peers: bool, trace: str, folder: str) -> None:
    rows = measured(connect(rank, job.gpus, folder), job, ways, peers, trace)
    if rank == 0:
        torch.save(rows, Path(folder) / "rows.pt")
    gc.collect()  # NCCL waits for the graphs that hold its messages
    dist.destroy_process_group()


def measured(
    device: torch.device, job: Job, ways: tuple[list[str], ...], peers: bool, trace: str
) -> list[dict[str, Any]]:
    """The record's rows, one of each contender, all in turns; without times where ranks share a GPU."""
    mesh = init_device_mesh("cuda", (job.gpus // 2, 2)) if job.gpus % 2 == 0 else None
    x = job.tensors()
    one = alone(job, by_name(job.backend), x)
    whole = one[1]()
    groups = {"a2a+p2p": mesh}
    contenders = [
        parallel(job, schedule, layout, messages, without, groups.get(schedule, dist.group.WORLD), x)
        for schedule, layout, messages, without in product(*ways)
    ]
    absent: dict[str, str] = {}
    if peers:
        ways_of_others, absent = others(job.problem, by_name(job.backend), dist.group.WORLD, device)
        contenders += [other(way, x) for way in ways_of_others]
    right, left_out = checked(contenders, whole)
    not_run = "; ".join(f"{name}: {reason}" for name, reason in (absent | left_out).items())
    if job.gpus > torch.cuda.device_count():
        return [
            _named(contender) | {"relative_error": f"{error:.1e}", "not_run": not_run} for contender, error in right
        ]
    contenders, rows = [contender for contender, _ in right], []
    for (contender, error), times in zip(right, measure(job, one, contenders), strict=True):
        one_forward, forward, one_both, both = times
        flops = job.forward_flops / job.gpus / 1e12
        with contender.inside():
            host, peak = host_seconds(contender.both, job.calls), peak_bytes(contender.both)
        rows.append(
            {
                **_named(contender),
                "forward_ms": round(1e3 * forward, 3),
                "forward_backward_ms": round(1e3 * both, 3),
                "forward_tflops_per_gpu": round(flops / forward, 1),
                "forward_backward_tflops_per_gpu": round(3.5 * flops / both, 1),
                "forward_efficiency": round(one_forward / job.gpus / forward, 3),
                "forward_backward_efficiency": round(one_both / job.gpus / both, 3),
                "one_gpu_forward_ms": round(1e3 * one_forward, 3),
                "one_gpu_forward_backward_ms": round(1e3 * one_both, 3),
                "host_ms": round(1e3 * host, 3),
                "peak_gib_above_inputs": round(peak / 2**30, 3),
                "relative_error": f"{error:.1e}",
                "not_run": not_run,
            }
        )
    if trace:
        for contender in contenders:
            name = f"{contender.name} {contender.layout} {contender.messages}"
            name = name if contender.library == "cp_fast" else f"{contender.library} {name}"
            with contender.inside():
                timeline.record(Path(trace), name, contender.both, dist.get_rank())
    return rows


def _named(contender: Contender) -> dict[str, str]:
    """A contender in a row's words."""
    fields = "library", "name", "layout", "messages", "without"
    return {"schedule" if field == "name" else field: getattr(contender, field) for field in fields}


def main(
    gpus: Annotated[int, typer.Option(help="Processes, one a GPU.")] = 2,
    tokens: Annotated[int, typer.Option(help="One sequence of so many tokens.")] = 32768,
    lengths: Annotated[str, typer.Option(help="Or several: 16384,8192,8192.")] = "",
    heads: Annotated[str, typer.Option(help="Query heads, kv heads.")] = "32,8",
    dims: Annotated[str, typer.Option(help="d_qk, d_v.")] = "128,128",
    window: Annotated[int, typer.Option(help="Left side of a sliding window; -1 for none.")] = -1,
    schedules: Schedules = "p2p,all_gather,a2a",
    layouts: Annotated[str, typer.Option(help="Layouts, several with commas.")] = "dual_chunk",
    messages: Annotated[str, typer.Option(help="auto, or some of peer_memory, group and graph, with commas.")] = "auto",
    without: Annotated[
        str, typer.Option(help="Compiler passes switched off: each, or -, all, names, with commas.")
    ] = "-",
    peers: Annotated[bool, typer.Option("--peers", help="Other libraries too, in turns.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Folder for Chrome traces and pictures.")] = None,
    backend: Annotated[str, typer.Option(help="The kernel library.")] = "fa4",
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 10,
    calls: Annotated[int, typer.Option(help="Calls in a row in a round, over all GPUs.")] = 8,
    commit: Commit = "",
    out: Annotated[Path | None, typer.Option(help="CSV file to append to.")] = None,
) -> None:
    """Measure the schedules on this machine's GPUs."""
    if (here := torch.cuda.device_count()) < gpus:
        if here == 0 or out is not None or trace is not None:
            raise typer.BadParameter(f"{gpus} ranks share {here} GPUs, which gives no times for --out and --trace")
        print(
            f"{gpus} ranks share {here} GPUs: each contender is compared with one GPU's result, and NO TIME is reported"
        )
    sizes = tuple(int(n) for n in lengths.split(",")) if lengths else (tokens,)
    (h_q, h_kv), (d_qk, d_v) = ([int(n) for n in pair.split(",")] for pair in (heads, dims))
    job = Job(gpus, sizes, h_q, h_kv, d_qk, d_v, window, backend, rounds, calls)
    with tempfile.TemporaryDirectory() as folder:
        if trace is not None:
            trace.mkdir(parents=True, exist_ok=True)
        ways = *(names.split(",") for names in (schedules, layouts, messages)), list(passes_of(without))
        spawn(worker, args=(job, ways, peers, str(trace or ""), folder), nprocs=gpus)
        rows = torch.load(Path(folder) / "rows.pt", weights_only=False)
    machine = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "commit": commit}
    problem = asdict(job) | {"lengths": " ".join(map(str, sizes))}
    rows = [machine | problem | row for row in rows]
    for row in rows:
        hidden = {*machine, "rounds", "backend", "not_run"}
        print({name: value for name, value in row.items() if name not in hidden})
    if rows[0]["not_run"]:
        print("not run:", rows[0]["not_run"].replace("; ", "\n         "))
    if out is not None:
        fresh = not out.exists()
        if not fresh and out.open(newline="").readline().strip().split(",") != list(rows[0]):
            raise SystemExit(f"{out} has other columns; nothing is appended")
        with out.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            if fresh:
                writer.writeheader()
            writer.writerows(rows)
    if trace is not None:
        for picture in timeline.pictures(trace, gpus):
            print(picture)


if __name__ == "__main__":
    typer.run(main)
