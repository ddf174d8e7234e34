"""DeepSeek-V4's layers with compressed keys on GPUs: errors and times, compared with dense attention.

    python -m benchmarks.compressed check --problems 200 --part 0 --parts 8 &    # random calls, with gradients
    python -m benchmarks.compressed speed --out compressed.json            # one of eight ranks of 524,288 tokens
    python -m benchmarks.compressed ranks --gpus 2 --out ranks.json        # one document over two ranks

`speed` has the query rows of one of eight ranks: the last 65,536 rows of a document that is so long that they see as
many tokens as the rows of a rank of `dual_chunk` do in the mean. 64 query heads over one key of 512, which is the value
too; a window of 128 tokens; a sink for each head. The layer of rate 128 sees all closed entries, the layer of rate 4
the 512 best, by an indexer of 64 heads of 128. Dense attention is FlashAttention 4 on the same rows, 256 heads over 4
of 128: as many operations for a pair. Operations are counted over visible pairs. `predicted_ms` was written before the
first run.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer

import cp_fast
from benchmarks.parts.ranks import Commit, JsonOut, connect, seconds, write_json
from benchmarks.parts.sparse_shape import milliseconds
from conformance.implementation import Implementation
from cp_fast.kernels.attention.backend_protocol import BackwardOperands, LaunchOptions
from cp_fast.kernels.attention.choose_backend import by_name
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_fast.kernels.sparse.sparse_kernels import Runs, Visible
from cp_fast.kernels.sparse.triton_sparse import triton_kernels
from cp_ref.schedules.problem import ScoreSpec
from tests.sparse.compressed_problems import random_problems

app = typer.Typer(add_completion=False)
STANDS_S = 100.0
LIMIT = 1e-2  # ||error|| / ||it||, of rows that are compared with PyTorch in float32
PREDICTED = {  # milliseconds, from bytes and operations, and from the rates of docs/how_to/sparse.md
    "rate 128": {"forward": 71.0, "backward": 400.0},
    "rate 4": {"select": 250.0, "forward": 21.0, "backward": 120.0},
    "dense": {"forward": 3_460.0, "backward": 9_700.0},
}


@dataclass(frozen=True)
class Shape:
    """One causal document of `keys` tokens, of which the last `rows` are query rows; keys are tokens of a window and,
    behind them, entries.
    """

    rate: int
    rows: int = 65_536
    keys: int = 294_912
    heads: int = 64
    d: int = 512
    window: int = 128
    top_k: int = 512
    h_i: int = 64
    d_i: int = 128

    @property
    def tokens(self) -> int:
        """Those that the rows see, of the whole window of the first row on."""
        return self.rows + self.window - 1

    @property
    def entries(self) -> int:
        return self.keys // self.rate

    def closed(self) -> torch.Tensor:
        """How many entries each row sees, int32 [rows]."""
        return (torch.arange(self.keys - self.rows + 1, self.keys + 1, device="cuda") // self.rate).int()

    def window_runs(self) -> Runs:
        first = torch.arange(self.rows, dtype=torch.int32, device="cuda")[:, None]
        return Runs(first, first + self.window, self.window)

    def all_runs(self) -> Runs:
        """The window, and all closed entries."""
        window, closed = self.window_runs(), self.closed()[:, None]
        starts = torch.cat([window.starts, torch.full_like(closed, self.tokens)], 1)
        stops = torch.cat([window.stops, self.tokens + closed], 1)
        return Runs(starts, stops, self.window + int(closed.max()))

    def visible(self) -> Visible:
        """The entries that each row may choose."""
        closed = self.closed()[:, None]
        return Visible(torch.zeros_like(closed), closed, torch.zeros_like(closed))

    def tensors(self) -> dict[str, torch.Tensor]:
        """q, k, dout and the sinks."""
        draw = torch.Generator("cuda").manual_seed(2)

        def some(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, device="cuda", dtype=torch.bfloat16)

        k = some(self.tokens + self.entries, 1, self.d)
        q, dout = (some(self.rows, self.heads, self.d) for _ in range(2))
        return {"q": q, "k": k, "dout": dout, "sink": some(self.heads).float()}

    def flops(self, pairs: float) -> dict[str, float]:
        """Two a pair, head and column; a backward pass as its five products."""
        products = {"forward": 2, "backward": 5}
        return {name: 2 * count * pairs * self.heads * self.d for name, count in products.items()}


@app.command()
def check(
    problems: Annotated[int, typer.Option(help="How many, of both functions together.")] = 200,
    part: Annotated[int, typer.Option(help="Which part, from 0.")] = 0,
    parts: Annotated[int, typer.Option(help="Into how many parts the work is divided.")] = 1,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """Random calls of `compress_keys` and `compressed_attention` on simulated ranks of one GPU, against float64."""
    wrong, done = dict[str, list[str]](), 0
    for problem in random_problems(problems, part, parts, dtype):
        found, done = problem.check(Implementation(cp_fast), "cuda"), done + 1
        if found:
            wrong[str(problem)] = found
            print(f"WRONG {problem}", *found[:3], sep="\n  ", flush=True)
    write_json(out, _versions(commit) | {"dtype": dtype, "problems": done, "wrong": wrong})
    print(f"part {part}: {len(wrong)} wrong of {done} in {dtype}")
    raise typer.Exit(1 if wrong else 0)


@app.command()
def speed(
    rows: Annotated[int, typer.Option(help="Query rows.")] = 65_536,
    of_ranks: Annotated[int, typer.Option(help="Of how many ranks this is one.")] = 8,
    calls: Annotated[int, typer.Option(help="Of each.")] = 3,
    dense: Annotated[bool, typer.Option(help="FlashAttention 4 too.")] = True,
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """Times on one GPU of a layer of each kind, beside dense attention."""
    keys, found, wrong = rows * (of_ranks + 1) // 2, dict[str, Any](), False
    for rate in (128, 4):
        right, found[f"rate {rate}"] = _layer(Shape(rate, rows, keys), calls)
        wrong |= not right
        gc.collect()
        torch.cuda.empty_cache()
        write_json(out, _record(commit, rows, of_ranks, found))
    if dense and not wrong:
        found["dense"] = _dense(rows, keys)
        whole = sum(found["dense"]["ms"].values())
        for name in ("rate 128", "rate 4"):
            mine = sum(found[name]["ms"].values())
            found[name] |= {"layer_ms": mine, "dense_over_it": whole / mine}
            print(f"{name}: {mine:.1f} ms, dense {whole:.1f} ms, {whole / mine:.1f} times faster", flush=True)
        write_json(out, _record(commit, rows, of_ranks, found))
    raise typer.Exit(1 if wrong else 0)


@app.command()
def ranks(
    gpus: Annotated[int, typer.Option(help="Processes, one a GPU.")] = 2,
    tokens: Annotated[int, typer.Option(help="Of the one document.")] = 65_536,
    calls: Annotated[int, typer.Option(help="Of each.")] = 3,
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """A layer of each kind over all ranks, its results beside those of one process, and the time of one GPU alone."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (gpus, tokens, calls, folder), nprocs=gpus)  # pyright: ignore[reportPrivateImportUsage]
        found = json.loads((Path(folder) / "found.json").read_text())
    print(f"{gpus} GPUs: {found}")
    write_json(out, _versions(commit) | {"gpus": gpus, "tokens": tokens} | found)


def _rank(rank: int, gpus: int, tokens: int, calls: int, folder: str) -> None:
    faulthandler.dump_traceback_later(STANDS_S, repeat=True)  # a rank that waits for the other says where
    device = connect(rank, gpus, folder)
    over = cp_fast.ContextParallel(dist.group.WORLD, "all_gather")
    group, _ = dist.new_subgroups(1)
    alone, found = cp_fast.ContextParallel(group, "all_gather"), dict[str, Any]()
    for rate in (128, 4):
        results, times = list[list[torch.Tensor]](), list[float]()
        for cp in (over, alone):
            step = _whole_layer(cp, Shape(rate, tokens, tokens), device)
            results.append(step(whole=True))
            times.append(seconds(lambda step=step: step(whole=False), calls) * 1e3)
            del step
            gc.collect()
            torch.cuda.empty_cache()
        errors = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(*results, strict=True)]
        share = times[1] / gpus / times[0]
        found[f"rate {rate}"] = {"ranks_ms": times[0], "one_gpu_ms": times[1], "share": share, "errors": errors}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _whole_layer(cp: Any, shape: Shape, device: Any) -> Callable[..., list[torch.Tensor]]:
    """Both passes of a layer of the public functions, from the rows of its compressor on: out and the gradients of the
    keys and of the rows of the compressor; of all ranks, or of this one.
    """
    plan = cp_fast.make_plan(
        cp=cp, qkv_format="thd", attn_mask_type="padding_causal", cu_seqlens_q=torch.tensor([0, shape.rows]),
        window_size=(shape.window - 1, 0), softmax_type="learnable", heads_q=shape.heads, heads_kv=1, d_qk=shape.d,
        d_v=shape.d, dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    overlap, draw = shape.rate == 4, torch.Generator("cuda").manual_seed(4)
    wide = 2 if overlap else 1
    sizes = {
        "q": (shape.heads, shape.d), "dout": (shape.heads, shape.d), "kv": (1, shape.d), "values": (wide * shape.d,),
        "gates": (wide * shape.d,), "q_index": (shape.h_i, shape.d_i), "k_index": (2 * shape.d_i,),
        "gates_index": (2 * shape.d_i,), "weights": (shape.h_i,),
    }  # fmt: skip
    mine = dict[str, torch.Tensor]()
    for name, size in sizes.items():
        x = torch.randn(shape.rows, *size, generator=draw, device="cuda", dtype=torch.bfloat16)
        mine[name] = cp_fast.shard(x, cp=cp, plan=plan).contiguous()
        del x
    leaves = [mine[name].requires_grad_() for name in ("q", "kv", "values", "gates")]
    sinks, how = torch.zeros(shape.heads, device="cuda"), {"cp": cp, "plan": plan, "rate": shape.rate}

    def step(*, whole: bool) -> list[torch.Tensor]:
        q, kv, values, gates = leaves
        entries, indices = cp_fast.compress_keys(values, gates, **how, overlap=overlap)[:, None], None
        if overlap:
            of_index = cp_fast.compress_keys(mine["k_index"], mine["gates_index"], **how, overlap=True)
            indices = cp_fast.select_keys(mine["q_index"], of_index, mine["weights"], **how, top_k=shape.top_k)
        out = cp_fast.compressed_attention(q, kv, kv, entries, entries, indices, **how, softmax_offset=sinks)
        results = out.detach(), *torch.autograd.grad(out, leaves, mine["dout"])[1:]
        return [cp_fast.unshard(x, cp=cp, plan=plan) for x in results] if whole else [*results]

    return step


def _layer(shape: Shape, calls: int) -> tuple[bool, dict[str, Any]]:
    """Whether the results of some rows are right, and the times."""
    kernels, x = triton_kernels, shape.tensors()
    q, k, dout, sink = x.values()
    scale, timed = shape.d**-0.5, dict[str, Callable[[], Any]]()
    if shape.rate == 4:
        draw = torch.Generator("cuda").manual_seed(1)
        q_index = torch.randn(shape.rows, shape.h_i, shape.d_i, generator=draw, device="cuda", dtype=torch.bfloat16)
        k_index = torch.randn(shape.entries, shape.d_i, generator=draw, device="cuda", dtype=torch.bfloat16)
        weights, visible = torch.randn(shape.rows, shape.h_i, generator=draw, device="cuda"), shape.visible()
        timed["select"] = lambda: kernels.select(q_index, k_index, weights, visible, shape.top_k, shape.d_i**-0.5)
        indices = timed["select"]()
        timed["rows_of"] = lambda: kernels.rows_of(indices[:, None], visible)
        listed = timed["rows_of"]()
        rows = torch.where(listed < 0, listed, listed + shape.tokens)
        runs, pairs = shape.window_runs(), shape.rows * (shape.window + shape.top_k)
    else:
        rows, runs = torch.empty(shape.rows, 1, 0, dtype=torch.int32, device="cuda"), shape.all_runs()
        pairs = int((runs.stops - runs.starts).sum())
    out, lse = kernels.forward(q, k, k, rows, scale, sink, runs=runs)
    gradient = q, k, k, rows, out, lse, dout, None, scale
    dq, dk, _ = kernels.backward(*gradient, False, one_sum=True, runs=runs)
    errors = _errors(shape, x, rows, runs, (out, lse, dq, dk))
    wrong = [name for name, error in errors.items() if not error <= LIMIT]
    print(f"rate {shape.rate} {'WRONG' if wrong else 'right'}: {errors}", flush=True)
    if wrong:
        return False, {"errors": errors, "wrong": wrong}
    del dq, dk
    timed["forward"] = lambda: kernels.forward(q, k, k, rows, scale, sink, runs=runs)
    timed["backward"] = lambda: kernels.backward(*gradient, False, one_sum=True, runs=runs)
    ms = {name: milliseconds(call, calls) for name, call in timed.items()}
    rates = {name: count / ms[name] / 1e9 for name, count in shape.flops(float(pairs)).items()}
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"rate {shape.rate} ms {ms}; TFLOP/s {rates}; peak {peak:.1f} GiB", flush=True)
    found = {"errors": errors, "pairs": pairs, "ms": ms, "tflops": rates, "peak_gib": peak}
    return True, found | {"operations": shape.flops(float(pairs))}


def _errors(shape: Shape, x: dict[str, torch.Tensor], rows: torch.Tensor, runs: Runs, results: Any) -> dict[str, float]:
    """Relative errors of some rows; of dk those of a key that few rows see: the last token, which one row sees."""
    out, lse, dq, dk = results
    errors: dict[str, float] = {"out": 0.0, "lse": 0.0, "dq": 0.0, "dk": 0.0}
    for row in (0, 1, shape.rows // 3, shape.rows - 1):
        here = slice(row, row + 1)
        named = runs.of(here).listed(rows[here])[0, 0]
        at = named[named >= 0].long()
        q, keys = x["q"][row].float().requires_grad_(), x["k"][at, 0].float().requires_grad_()
        scores = q @ keys.T * shape.d**-0.5
        every = torch.cat([scores, x["sink"][:, None]], 1)
        mine = every.softmax(-1)[:, :-1] @ keys
        of_q, of_keys = torch.autograd.grad(mine, (q, keys), x["dout"][row].float())
        pairs = {"out": (out[row], mine), "lse": (lse[row], every.logsumexp(-1)), "dq": (dq[row], of_q)}
        if row == shape.rows - 1:
            last = at == shape.tokens - 1
            pairs["dk"] = dk[at[last], 0], of_keys[last]
        for name, (a, b) in pairs.items():
            difference = (a.double() - b.detach().double()).norm() / b.detach().double().norm()
            errors[name] = max(errors[name], float(difference.nan_to_num(nan=1e9)))
    return errors


def _dense(rows: int, keys: int) -> dict[str, Any]:
    """FlashAttention 4's passes."""
    draw = torch.Generator("cuda").manual_seed(3)

    def some(n: int, heads: int) -> torch.Tensor:
        return torch.randn(n, heads, 128, generator=draw, device="cuda", dtype=torch.bfloat16)

    q, dout, k, v = some(rows, 256), some(rows, 256), some(keys, 4), some(keys, 4)
    backend, batch = by_name("fa4"), VarlenBatch.pack((rows,), (keys,), None, 0, "cuda")
    options = LaunchOptions(ScoreSpec(128**-0.5))
    part = backend.forward(q, k, v, batch, options)
    operands = BackwardOperands(dout, q, k, v, part.out.to(q.dtype), part.lse, None)
    ms = {
        "forward": milliseconds(lambda: backend.forward(q, k, v, batch, options), 1),
        "backward": milliseconds(lambda: backend.backward([operands], batch, options), 1),
    }
    pairs = rows * (2 * keys - rows + 1) / 2
    operations = {"forward": 4 * pairs * 256 * 128, "backward": 10 * pairs * 256 * 128}
    print(f"dense ms {ms}", flush=True)
    return {"ms": ms, "pairs": pairs, "operations": operations}


def _record(commit: str, rows: int, of_ranks: int, found: dict[str, Any]) -> dict[str, Any]:
    return _versions(commit) | {"rows": rows, "of_ranks": of_ranks, "predicted_ms": PREDICTED} | found


def _versions(commit: str) -> dict[str, str]:
    import triton  # pyright: ignore[reportMissingImports]

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"commit": commit, "torch": torch.__version__, "triton": triton.__version__, "gpu": gpu}


if __name__ == "__main__":
    app()
