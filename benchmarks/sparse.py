"""Attention over chosen keys on GPUs, at DeepSeek-V3.2's shape: errors and times, compared with dense attention.

    python -m benchmarks.sparse check --problems 200 --part 0 --parts 8    # random problems against PyTorch, in float64
    python -m benchmarks.sparse warm --part 0 --parts 8 &                  # of 8 processes: compile for the two below
    python -m benchmarks.sparse variants --out variants.json               # constants of each kernel, and their times
    python -m benchmarks.sparse speed --out speed.json                     # one GPU, one causal document
    python -m benchmarks.sparse speed --tokens 65536 --of-ranks 8 --calls 1 --out rank.json  # one rank's rows of eight
    python -m benchmarks.sparse ranks --gpus 2 --out ranks.json            # the same document over two ranks

`speed` has 128 query heads on the latent form (one kv head, d_qk 576, v its first 512 columns), 64 heads of 128 in the
indexer, and 2,048 keys a row. The indexer's inputs are random, so the keys of a row are spread over its document, and
reading them is as scattered as it can be. Operations are counted over chosen pairs. Dense attention is measured too:
FlashAttention 4 on the same rows, 128 heads of 192 and 128, causal. A size is reported if its results are right: some
rows of each are compared with PyTorch, in float32.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer

import cp_fast
from benchmarks.parts.ranks import Commit, JsonOut, connect, seconds, write_json
from benchmarks.parts.sparse_shape import Shape, dense_tensors, milliseconds, sample_mistakes, variants
from cp_fast.kernels.attention.backend_protocol import BackwardOperands, LaunchOptions
from cp_fast.kernels.attention.choose_backend import by_name
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_fast.kernels.sparse.triton_sparse import triton_kernels
from cp_ref.schedules.problem import ScoreSpec
from tests.sparse.kernel_checks import draw, mistakes

app = typer.Typer(add_completion=False)
Part = Annotated[int, typer.Option(help="Which part, from 0.")]
Parts = Annotated[int, typer.Option(help="Into how many parts the work is divided.")]
LIMITS = {"order": 1e-5, "cut": 0.0, "ties": 0.0, "rows": 0.0, "lse": 1e-3}  # of the others: 1e-2
STANDS_S = 100.0


@app.command()
def check(
    problems: Annotated[int, typer.Option(help="How many.")] = 200,
    part: Part = 0,
    parts: Parts = 1,
    seed: Annotated[int, typer.Option(help="Of the first.")] = 0,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    out: JsonOut = None,
) -> None:
    """Random problems on one GPU."""
    wrong, done = dict[str, list[str]](), 0
    for number in range(seed, seed + problems):
        if number % parts == part:
            problem = draw(number, getattr(torch, dtype))
            found = mistakes(triton_kernels, problem, "cuda")
            done += 1
            if found:
                wrong[str(problem)] = found
                print(f"WRONG {problem}", *found, sep="\n  ", flush=True)
            write_json(out, {"dtype": dtype, "problems": done, "wrong": wrong} | _versions(""))
    print(f"part {part}: {len(wrong)} wrong of {done}")
    raise typer.Exit(1 if wrong else 0)


@app.command()
def warm(part: Part = 0, parts: Parts = 8) -> None:
    """Compile a part of the variants, into Triton's cache on the disk."""
    for number, (name, on, call, _) in enumerate(variants(Shape(rows=16))):
        if number % parts == part:
            _attempt(f"{name} {on}", call)


@app.command("variants")
def _variants(
    rows: Annotated[int, typer.Option(help="Query rows of a launch.")] = 1024,
    keys: Annotated[int, typer.Option(help="Tokens of the document.")] = 65_536,
    calls: Annotated[int, typer.Option(help="Of each.")] = 5,
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """Times of each kernel alone, with other constants."""
    found = list[dict[str, Any]]()
    for name, on, call, flops in variants(Shape(rows=rows, keys=keys)):
        ms = _attempt(f"{name} {on}", lambda call=call: milliseconds(call, calls))
        if ms is not None:
            rate = flops / ms / 1e9
            found.append({"kernel": name, "constants": str(on), "ms": ms, "tflops": rate})
            print(f"{name:14} {ms:8.3f} ms {rate:6.0f} TFLOP/s  {on}", flush=True)
        write_json(out, _versions(commit) | {"rows": rows, "keys": keys, "variants": found})


@app.command()
def speed(
    tokens: Annotated[str, typer.Option(help="Query rows, with commas.")] = "65536,32768,16384,8192",
    of_ranks: Annotated[
        int, typer.Option(help="Of how many ranks this is one: its rows see so many times as many keys in the mean.")
    ] = 1,
    calls: Annotated[int, typer.Option(help="Of each.")] = 3,
    dense: Annotated[bool, typer.Option(help="FlashAttention 4 too.")] = True,
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """Times on one GPU, beside dense attention."""
    found, wrong = dict[str, Any](), False
    for size in map(int, tokens.split(",")):
        shape = Shape(rows=size, keys=size * (of_ranks + 1) // 2)
        right, found[str(size)] = _speed(shape, calls)
        wrong |= not right
        if dense and right:
            gc.collect()
            torch.cuda.empty_cache()
            both = _attempt("dense", lambda shape=shape: _dense(shape, calls))
            if both is not None:
                ms = found[str(size)]["ms"]
                whole = ms["select"] + ms["rows_of"] + ms["forward"]
                ratios = {
                    "forward": both["forward"] / whole,
                    "both passes": (both["forward"] + both["backward"]) / (whole + ms["backward"]),
                }
                found[str(size)] |= {"dense_ms": both, "dense_over_sparse": ratios}
                print(f"{size} dense {_short(both)} ms; times faster, selection included: {_short(ratios)}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        write_json(out, _versions(commit) | {"of_ranks": of_ranks, "sizes": found})
    raise typer.Exit(1 if wrong else 0)


@app.command()
def ranks(
    gpus: Annotated[int, typer.Option(help="Processes, one a GPU.")] = 2,
    tokens: Annotated[int, typer.Option(help="Of the one document.")] = 65_536,
    calls: Annotated[int, typer.Option(help="Of each.")] = 3,
    schedule: Annotated[str, typer.Option(help="cp_comm_type.")] = "all_gather",
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """One document over all ranks, and the time of one GPU alone over theirs."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (gpus, tokens, calls, schedule, folder), nprocs=gpus)  # pyright: ignore[reportPrivateImportUsage]
        found = json.loads((Path(folder) / "found.json").read_text())
    print(f"{gpus} GPUs, {schedule}: {found}")
    write_json(out, _versions(commit) | {"gpus": gpus, "tokens": tokens, "schedule": schedule} | found)


def _speed(shape: Shape, calls: int) -> tuple[bool, dict[str, Any]]:
    """Whether the results are right, and the times of each function."""
    kernels, visible = triton_kernels, shape.visible()
    index, x = shape.index_tensors(), shape.tensors()
    q, k, v, dout = x.values()
    indices = kernels.select(*index, visible, shape.top_k, shape.index_scale)
    rows = kernels.rows_of(indices[:, None], visible)
    out, lse = kernels.forward(q, k, v, rows, shape.scale, None)
    gradient = q, k, v, rows, out, lse, dout, None, shape.scale
    dq = kernels.backward(*gradient, False)[0]
    errors = sample_mistakes(kernels, shape, index, x, (indices, rows, out, lse, dq))
    wrong = [name for name, error in errors.items() if not error <= LIMITS.get(name, 1e-2)]
    print(
        f"{shape.rows} {'WRONG ' + ', '.join(wrong) if wrong else 'right'}: errors {_short(errors, '.1e')}", flush=True
    )
    if wrong:
        return False, {"errors": errors, "wrong": wrong}
    del dq
    terms = *index, q, k, lse, rows, shape.index_scale, shape.scale
    dloss = torch.ones(shape.rows, device="cuda")
    timed: dict[str, Callable[[], Any]] = {
        "select": lambda: kernels.select(*index, visible, shape.top_k, shape.index_scale),
        "rows_of": lambda: kernels.rows_of(indices[:, None], visible),
        "forward": lambda: kernels.forward(q, k, v, rows, shape.scale, None),
        "backward": lambda: kernels.backward(*gradient, False),
        "backward_one_sum": lambda: kernels.backward(*gradient, False, one_sum=True),
        "backward_in_order": lambda: kernels.backward(*gradient, True),
        "loss": lambda: kernels.loss(*terms),
        "loss_backward": lambda: kernels.loss_backward(*terms, dloss, False),
    }
    ms = dict[str, float]()
    for name, call in timed.items():
        taken = _attempt(f"{name} of {shape.rows}", lambda call=call: milliseconds(call, calls))
        ms[name] = float("nan") if taken is None else taken
    rates = {name: flops / ms[name] / 1e9 for name, flops in shape.flops.items()}
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"{shape.rows} ms {_short(ms)}; TFLOP/s {_short(rates, '.0f')}; peak {peak:.1f} GiB", flush=True)
    return True, {"errors": errors, "ms": ms, "tflops": rates, "peak_gib": peak}


def _dense(shape: Shape, calls: int) -> dict[str, float]:
    """ms of FlashAttention 4's passes."""
    x = dense_tensors(shape.rows, shape.keys, 128, (192, 128))
    backend, batch = by_name("fa4"), VarlenBatch.pack((shape.rows,), (shape.keys,), None, 0, "cuda")
    options = LaunchOptions(ScoreSpec(192**-0.5))

    def forward() -> Any:
        return backend.forward(x["q"], x["k"], x["v"], batch, options)

    part = forward()
    operands = BackwardOperands(x["dout"], x["q"], x["k"], x["v"], part.out.to(x["q"].dtype), part.lse, None)
    return {
        "forward": milliseconds(forward, calls),
        "backward": milliseconds(lambda: backend.backward([operands], batch, options), calls),
    }


def _rank(rank: int, gpus: int, tokens: int, calls: int, schedule: Any, folder: str) -> None:
    faulthandler.dump_traceback_later(STANDS_S, repeat=True)  # a rank that waits for the other says where
    device = connect(rank, gpus, folder)
    shape = Shape(rows=tokens, keys=tokens)
    cp = cp_fast.ContextParallel(dist.group.WORLD, schedule)
    plan = cp_fast.make_plan(
        cp=cp, qkv_format="thd", attn_mask_type="padding_causal", cu_seqlens_q=torch.tensor([0, tokens]),
        heads_q=shape.heads, heads_kv=1, d_qk=shape.d, d_v=shape.d_v, dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    whole = shape.index_tensors()
    index = [cp_fast.shard(t, cp=cp, plan=plan).contiguous() for t in whole]
    x = shape.tensors()
    k = cp_fast.shard(x["k"], cp=cp, plan=plan).contiguous().requires_grad_()
    q, dout = (cp_fast.shard(x[name], cp=cp, plan=plan).contiguous() for name in ("q", "dout"))
    q.requires_grad_()

    def select() -> torch.Tensor:
        return cp_fast.select_keys(*index, cp=cp, plan=plan, top_k=shape.top_k, scale=shape.index_scale)

    def forward() -> torch.Tensor:
        v = k[..., : shape.d_v]
        return cp_fast.sparse_attention(q, k, v, select(), cp=cp, plan=plan, softmax_scale=shape.scale)

    def both() -> Any:
        out = forward()
        return out.detach(), *torch.autograd.grad(out, (q, k), dout)

    kernels, visible = triton_kernels, shape.visible()
    wanted = kernels.select(*whole, visible, shape.top_k, shape.index_scale)
    same = torch.equal(cp_fast.shard(wanted, cp=cp, plan=plan), select())
    del x, wanted
    gc.collect()
    found: dict[str, Any] = {"same_indices": same}
    for name, call in {"select": select, "select and forward": forward, "all": both}.items():
        call()
        found[f"{name}_ms"] = seconds(call, calls) * 1e3
    x = shape.tensors()
    q, k, v, dout = x.values()

    def alone() -> Any:
        indices = kernels.select(*whole, visible, shape.top_k, shape.index_scale)
        rows = kernels.rows_of(indices[:, None], visible)
        out, lse = kernels.forward(q, k, v, rows, shape.scale, None)
        return kernels.backward(q, k, v, rows, out, lse, dout, None, shape.scale, False)

    alone()
    found["one_gpu_ms"] = seconds(alone, max(1, calls // gpus)) * 1e3
    found["share"] = found["one_gpu_ms"] / gpus / found["all_ms"]
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _attempt(name: str, call: Callable[[], Any]) -> Any:
    """The result; None, and what is wrong, if it raises."""
    try:
        found = call()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"FAILED {name}: {type(error).__name__}: {str(error)[-400:]}", flush=True)
        return None
    return found


def _short(numbers: dict[str, float], how: str = ".2f") -> str:
    return ", ".join(f"{name} {x:{how}}" for name, x in numbers.items())


def _versions(commit: str) -> dict[str, str]:
    import triton  # pyright: ignore[reportMissingImports]

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"commit": commit, "torch": torch.__version__, "triton": triton.__version__, "gpu": gpu}


if __name__ == "__main__":
    app()
