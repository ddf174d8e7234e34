"""Masks of several areas: context parallelism and FlexAttention against the rate of the dense causal kernel.

    python benchmarks/masks.py --gpus 2 --tokens 16384 --layouts dual_chunk,balanced --out masks.csv

`share` = (visible pairs / the rate of the dense causal kernel on one GPU) / gpus / time: 1 is a mask that costs what
its pairs cost. All are measured in turns by CUDA events (A B C A B C), several calls in a row, on all GPUs at once; the
slowest GPU counts, and the median of the rounds is reported. Before that out, dq, dk and dv are compared with
FlexAttention's on one GPU; where they differ nothing is reported. FlexAttention, compiled, computes the whole problem
on each GPU; its share is of one GPU.
"""

from __future__ import annotations

import csv
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.multiprocessing.spawn import spawn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cp_fast
from cp_fast import masks
from cp_fast.backends import BackwardOperands, LaunchOptions, Segments, by_name
from cp_ref.spec import areas_of_rows

if __package__:
    from benchmarks.attention import seconds
else:
    from attention import seconds

Maker = Callable[[int], torch.Tensor]
MaskMod = Callable[..., torch.Tensor]

PROMPT, ANSWER, BLOCK, FIRST, WINDOW = 4096, 1024, 1024, 64, 4096
MASKS: dict[str, tuple[Maker, MaskMod]] = {
    "causal": (lambda n: masks.documents([0, n]), lambda b, h, q, k: k <= q),
    "prefix_lm": (lambda n: masks.prefix_lm(PROMPT, n), lambda b, h, q, k: (k <= q) | ((k < PROMPT) & (q < PROMPT))),
    "shared_prefix": (
        lambda n: masks.shared_prefix(PROMPT, [ANSWER] * ((n - PROMPT) // ANSWER)),
        lambda b, h, q, k: (k <= q) & ((k < PROMPT) | ((q - PROMPT) // ANSWER == (k - PROMPT) // ANSWER)),
    ),
    "block_causal": (lambda n: masks.block_causal(n, BLOCK), lambda b, h, q, k: k // BLOCK <= q // BLOCK),
    "first_and_window": (
        lambda n: masks.first_tokens_and_window(n, FIRST, WINDOW),
        lambda b, h, q, k: (k <= q) & ((k < FIRST) | (k >= q - WINDOW)),
    ),
}


@dataclass(frozen=True)
class Job:
    """What is measured: `tokens` is of each GPU."""

    gpus: int
    tokens: int
    names: tuple[str, ...]
    schedules: tuple[str, ...]
    layouts: tuple[str, ...]
    rounds: int
    calls: int
    heads_q: int = 32
    heads_kv: int = 8
    dim: int = 128

    @property
    def rows(self) -> int:
        return self.gpus * self.tokens


def tensors(job: Job) -> dict[str, torch.Tensor]:
    """q, k, v, dout, whole, the same on every rank."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    heads = {"q": job.heads_q, "k": job.heads_kv, "v": job.heads_kv, "dout": job.heads_q}
    return {
        name: torch.randn(job.rows, n, job.dim, generator=generator, device="cuda").bfloat16()
        for name, n in heads.items()
    }


def dense_causal(job: Job, x: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """FlashAttention 4's causal kernel on one GPU, forward and backward, of as many tokens."""
    backend, segments = by_name("fa4"), Segments.pack((job.rows,), (job.rows,), None, 0, "cuda")
    q, k, v, dout = (x[name] for name in ("q", "k", "v", "dout"))
    options = LaunchOptions(job.dim**-0.5)

    def both() -> Any:
        part = backend.forward(q, k, v, segments, options)
        return backend.backward(
            BackwardOperands(dout, q, k, v, part.out.to(q.dtype), part.lse, None), segments, options
        )

    return both


def flex(job: Job, name: str, x: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """FlexAttention of the whole problem on one GPU: out, dq, dk, dv as [t, h, d]."""
    block_mask = create_block_mask(MASKS[name][1], None, None, job.rows, job.rows, device="cuda", _compile=True)
    compiled: Any = torch.compile(flex_attention)
    q, k, v, dout = (x[n].transpose(0, 1)[None].contiguous() for n in ("q", "k", "v", "dout"))
    for leaf in (q, k, v):
        leaf.requires_grad_()

    def both() -> Any:
        out = compiled(q, k, v, block_mask=block_mask, enable_gqa=True)
        grads = torch.autograd.grad(out, (q, k, v), dout)
        return [y[0].transpose(0, 1) for y in (out.detach(), *grads)]

    return both


def parallel(
    job: Job, name: str, schedule: str, layout: str, x: dict[str, torch.Tensor]
) -> tuple[Any, Callable[[], Any]]:
    """cp_fast's: its plan, and forward and backward."""
    cp = cp_fast.ContextParallel(dist.group.WORLD, schedule, layout=layout)
    cu = torch.tensor([0, job.rows], dtype=torch.int32)
    plan = cp_fast.make_plan(
        cp=cp,
        qkv_format="thd",
        areas=MASKS[name][0](job.rows),
        cu_seqlens_q=cu,
        heads_q=job.heads_q,
        heads_kv=job.heads_kv,
        d_qk=job.dim,
        d_v=job.dim,
        dtype=torch.bfloat16,
        device="cuda",
    )
    local = {n: cp_fast.shard(t, cp=cp, qkv_format="thd", plan=plan) for n, t in x.items()}
    q, k, v = (local[n].requires_grad_() for n in "qkv")

    def both() -> Any:
        out = cp_fast.attention(q, k, v, cp=cp, plan=plan)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), local["dout"])

    return (cp, plan), both


def check(context: Any, whole: Any, mine: Any, what: str) -> None:
    """End the run where slices differ from the whole results."""
    cp, plan = context
    for reference, slices in zip(whole, mine, strict=True):
        expected = cp_fast.shard(reference.contiguous(), cp=cp, qkv_format="thd", plan=plan).double()
        error = float((slices.double() - expected).norm() / expected.norm())
        if not error < 1e-2:
            raise SystemExit(f"{what}: relative error {error:.2e} against FlexAttention; nothing is reported")


def worker(rank: int, job: Job, folder: str) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    store = f"file://{Path(folder) / 'store'}"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=job.gpus, device_id=device)
    x = tensors(job)
    dense = dense_causal(job, x)
    rows: list[dict[str, Any]] = []
    for name in job.names:
        pairs = int(areas_of_rows(tuple(map(tuple, MASKS[name][0](job.rows).tolist()))).pairs.sum())  # type: ignore[arg-type]
        alone = flex(job, name, x)
        whole = alone()
        contenders: dict[tuple[str, str], Callable[[], Any]] = {}
        for schedule in job.schedules:
            for layout in job.layouts:
                context, both = parallel(job, name, schedule, layout, x)
                check(context, whole, both(), f"{name}, {schedule}, {layout}")
                contenders[schedule, layout] = both
        del whole
        turns = [dense, alone, *contenders.values()]
        for fn in turns * 2:
            fn()
        times = [[seconds(fn, job.calls) for fn in turns] for _ in range(job.rounds)]
        of_dense, of_flex, *others = (statistics.median(column) for column in zip(*times, strict=True))
        ideal = of_dense * pairs / (job.rows * (job.rows + 1) / 2)  # on one GPU
        rows.append(_row(name, "flex_attention", "one GPU", of_flex, ideal / of_flex))
        rows += [_row(name, *what, t, ideal / job.gpus / t) for what, t in zip(contenders, others, strict=True)]
    if rank == 0:
        with (Path(folder) / "rows.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    dist.destroy_process_group()


def _row(mask: str, what: str, layout: str, time: float, share: float) -> dict[str, Any]:
    return {"mask": mask, "what": what, "layout": layout, "ms": round(1e3 * time, 3), "share": round(share, 3)}


def main(
    gpus: Annotated[int, typer.Option(help="GPUs of this machine.")] = 2,
    tokens: Annotated[int, typer.Option(help="Of each GPU.")] = 16384,
    names: Annotated[str, typer.Option("--masks", help=f"Some of {', '.join(MASKS)}.")] = ",".join(MASKS),
    schedules: Annotated[str, typer.Option(help="Some of p2p, all_gather, a2a.")] = "p2p,all_gather,a2a",
    layouts: Annotated[str, typer.Option(help="Some of dual_chunk, contiguous, balanced.")] = "dual_chunk,balanced",
    rounds: Annotated[int, typer.Option(help="Turns of which the median counts.")] = 7,
    calls: Annotated[int, typer.Option(help="Calls in a row.")] = 8,
    out: Annotated[Path | None, typer.Option(help="A CSV file to write.")] = None,
) -> None:
    """Measure, forward and backward, and print a table of milliseconds and shares."""
    of_masks, of_schedules, of_layouts = (tuple(x.split(",")) for x in (names, schedules, layouts))
    job = Job(gpus, tokens, of_masks, of_schedules, of_layouts, rounds, calls)
    with tempfile.TemporaryDirectory() as folder:
        spawn(worker, (job, folder), nprocs=gpus)
        text = (Path(folder) / "rows.csv").read_text()
    typer.echo(text)
    if out is not None:
        out.write_text(text)


if __name__ == "__main__":
    typer.run(main)
