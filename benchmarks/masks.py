"""Masks of several areas: context parallelism and FlexAttention against the rate of the dense causal kernel.

    python -m benchmarks.masks --gpus 2 --tokens 16384 --layouts dual_chunk,balanced --seconds 125 --out masks.csv

`--without -,factor_keys,all` measures each schedule without a compiler pass too, in the same turns; `each` means
-, every pass, and all (see `benchmarks/attention.py`).

`share` = (visible pairs / the rate of the dense causal kernel on one GPU) / gpus / time: 1 is a mask that costs what
its pairs cost. All are measured in turns by CUDA events (A B C A B C), several calls in a row, on all GPUs at once; the
slowest GPU counts, and the median of the rounds is reported. Before that out, dq, dk and dv are compared with attention
written out with the whole mask, in float32. If they differ, the row says so and has no time.

With `--peers` MagiAttention computes the same masks in the same turns (`parts/others.py`), with its own placement of
tokens; TransformerEngine refuses every mask of several areas, and has `causal` by `attention.py --peers`.

With fewer GPUs than ranks, ranks share a GPU: then results are compared, and no time is reported.

FlexAttention, compiled, computes the whole problem on one GPU, in turns with the dense kernel there; its share is of
one GPU. It compiles for long: so it comes last, each GPU has some of the masks, and what is not reached in time has a
row that says so. Rows are written as they come.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.multiprocessing.spawn import spawn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cp_fast
from benchmarks.parts.others import magi_way
from benchmarks.parts.ranks import connect, largest, passes_of, seconds, seconds_alone, switched
from cp_fast import masks
from cp_fast.kernels.attention.backend_protocol import BackwardOperands, LaunchOptions
from cp_fast.kernels.attention.choose_backend import by_name
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_ref.schedules.areas import Areas, areas_of_windows
from cp_ref.schedules.problem import ScoreSpec

Maker = Callable[[int], torch.Tensor]
MaskMod = Callable[..., torch.Tensor]
Slices = Callable[[torch.Tensor], torch.Tensor]
Contenders = Callable[..., Iterator[tuple[str, str, Slices, Callable[[], Any]]]]

_MOST = 1e-2  # relative error
_GRACE = 25.0  # seconds for what has begun in time
_COLUMNS: tuple[str, ...] = ("mask", "what", "layout", "ms", "share", "note")
_FLEX, _MAGI = ("flex_attention", "one GPU"), ("magi_attention", "its own")

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
    """The options of a run: `tokens` is of each GPU."""

    gpus: int
    tokens: int
    names: tuple[str, ...]
    schedules: tuple[str, ...]
    layouts: tuple[str, ...]
    rounds: int
    calls: int
    seconds: float
    without: tuple[str, ...] = ("-",)
    peers: bool = False
    began: float = field(default_factory=time.time)
    heads_q: int = 32
    heads_kv: int = 8
    dim: int = 128

    @property
    def rows(self) -> int:
        return self.gpus * self.tokens

    @property
    def shared(self) -> bool:
        """Whether ranks share a GPU, where a time says nothing."""
        return self.gpus > torch.cuda.device_count()

    @property
    def until(self) -> float:
        """When nothing more is begun."""
        return self.began + self.seconds


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
    backend, segments = by_name("fa4"), VarlenBatch.pack((job.rows,), (job.rows,), None, 0, "cuda")
    q, k, v, dout = (x[name] for name in ("q", "k", "v", "dout"))
    options = LaunchOptions(ScoreSpec(job.dim**-0.5))

    def both() -> Any:
        part = backend.forward(q, k, v, segments, options)
        return backend.backward(
            [BackwardOperands(dout, q, k, v, part.out.to(q.dtype), part.lse, None)], segments, options
        )

    return both


def written_out(job: Job, name: str, x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """out, dq, dk, dv of the whole problem, float32 [t, h, d]: every rank computes some heads, with the whole mask."""
    rank, group, size = dist.get_rank(), job.heads_q // job.heads_kv, 4096
    row = torch.arange(job.rows, device=x["q"].device)
    found: list[list[torch.Tensor]] = [[], [], [], []]
    for head in range(rank, job.heads_kv, job.gpus):
        mine = slice(head * group, (head + 1) * group)
        q, dout = (x[n][:, mine].transpose(0, 1).float() for n in ("q", "dout"))
        k, v = (x[n][:, head].float() for n in "kv")
        out, dq, dk, dv = torch.empty_like(q), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for begin in range(0, job.rows, size):
            some = slice(begin, begin + size)
            seen = MASKS[name][1](0, 0, row[some, None], row[None])
            p = (job.dim**-0.5 * q[:, some] @ k.T).masked_fill_(~seen, float("-inf")).softmax(-1)
            out[:, some] = p @ v
            dv += (p.transpose(1, 2) @ dout[:, some]).sum(0)
            ds = dout[:, some] @ v.T - (out[:, some] * dout[:, some]).sum(-1, keepdim=True)
            ds.mul_(p).mul_(job.dim**-0.5)
            dq[:, some] = ds @ k
            dk += (ds.transpose(1, 2) @ q[:, some]).sum(0)
        for results, one in zip(found, (out, dq, dk[None], dv[None]), strict=True):
            results.append(one)
    return [_of_all_heads(torch.stack(results), job.gpus) for results in found]


def _of_all_heads(mine: torch.Tensor, ranks: int) -> torch.Tensor:
    """[t, h, d] from every rank's [kv heads, g, t, d], of which it has every `ranks`-th."""
    of_all = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(of_all, mine)
    return torch.stack(of_all, 1).flatten(0, 2).transpose(0, 1).contiguous()


def flex(job: Job, name: str, x: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """FlexAttention of the whole problem on one GPU: out, dq, dk, dv as [t, h, d]."""
    block_mask = create_block_mask(MASKS[name][1], None, None, job.rows, job.rows, device="cuda")
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    q, k, v, dout = (x[n].transpose(0, 1)[None].contiguous() for n in ("q", "k", "v", "dout"))
    for leaf in (q, k, v):
        leaf.requires_grad_()

    def both() -> Any:
        out = compiled(q, k, v, block_mask=block_mask, enable_gqa=True)
        grads = torch.autograd.grad(out, (q, k, v), dout)
        return [y[0].transpose(0, 1) for y in (out.detach(), *grads)]

    return both


def parallel(
    job: Job, name: str, schedule: Any, layout: Any, x: dict[str, torch.Tensor]
) -> tuple[Slices, Callable[[], Any]]:
    """cp_fast's: this rank's slices of a global tensor, and forward and backward."""
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
    slices = partial(cp_fast.shard, cp=cp, qkv_format="thd", plan=plan)
    return slices, _both(slices, x, partial(cp_fast.attention, cp=cp, plan=plan))


def magi(job: Job, name: str, x: dict[str, torch.Tensor]) -> tuple[Slices, Callable[[], Any]]:
    """MagiAttention's."""
    slices, attend = magi_way(_areas(job, name), job.rows, (job.heads_q, job.heads_kv, job.dim), job.dim**-0.5)
    return slices, _both(slices, x, attend)


def _both(slices: Slices, x: dict[str, torch.Tensor], attend: Callable[..., torch.Tensor]) -> Callable[[], Any]:
    local = {n: slices(t).contiguous() for n, t in x.items()}
    q, k, v = (local[n].requires_grad_() for n in "qkv")

    def both() -> Any:
        out = attend(q, k, v)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), local["dout"])

    return both


def contenders(job: Job, name: str, x: dict[str, torch.Tensor]) -> Iterator[tuple[str, str, Slices, Callable[[], Any]]]:
    """What is measured of a mask: in words, its layout, this rank's slices of a global tensor, and a call."""
    for schedule, layout, without in product(job.schedules, job.layouts, job.without):
        off = switched(without)
        with off():
            slices, both = parallel(job, name, schedule, layout, x)
        what = schedule if without == "-" else f"{schedule} without {without}"
        yield what, layout, slices, partial(_inside, off, both)
    if job.peers:
        yield *_MAGI, *magi(job, name, x)


def _inside(off: Callable[[], AbstractContextManager[None]], call: Callable[[], Any]) -> Any:
    with off():
        return call()


def worst_error(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """The largest relative error of out, dq, dk and dv."""
    pairs = zip(expected, found, strict=True)
    return max(float((y.float() - x.float()).norm() / x.float().norm()) for x, y in pairs)


def in_turns(
    turns: Sequence[Callable[[], Any]], job: Job, seconds_of: Callable[[Callable[[], Any], int], float]
) -> list[float]:
    """The median seconds of each."""
    for fn in turns:
        fn()
    times = [[seconds_of(fn, job.calls) for fn in turns] for _ in range(job.rounds)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


class Rows:
    """A rank's rows, each written as soon as it is there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, mask: str, what: str, layout: str, seconds: float, ideal: float) -> None:
        """A time, and the seconds of a mask that costs what its pairs cost."""
        self._write(mask, what, layout, round(1e3 * seconds, 3), round(ideal / seconds, 3), "")

    def note(self, mask: str, what: str, layout: str, why: str) -> None:
        """A row without a measurement."""
        self._write(mask, what, layout, "", "", why)

    def _write(self, *row: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def measure(
    job: Job, name: str, x: dict[str, torch.Tensor], dense: Callable[[], Any], some: Contenders, rows: Rows
) -> list[torch.Tensor]:
    """All contenders of a mask, checked and then in turns. Collective: all ranks have the same rows. Returns what out,
    dq, dk and dv are.
    """
    expected, right = written_out(job, name, x), dict[tuple[str, str], Callable[[], Any]]()
    for what, layout, slices, both in some(job, name, x):
        error = largest(worst_error([slices(whole) for whole in expected], both()))
        if not error < _MOST:
            rows.note(name, what, layout, f"WRONG: relative error {error:.1e}")
        elif job.shared:
            rows.note(name, what, layout, f"right, relative error {error:.1e}; ranks share a GPU: no time")
        else:
            right[what, layout] = both
    if not right:
        return expected
    of_dense, *times = in_turns([dense, *right.values()], job, seconds)
    for (what, layout), time_of in zip(right, times, strict=True):
        rows.add(name, what, layout, time_of, _ideal(job, name, of_dense) / job.gpus)
    return expected


def _ideal(job: Job, name: str, of_dense: float) -> float:
    """Seconds of one GPU for a mask's pairs, at the dense causal kernel's rate."""
    return of_dense * int(_areas(job, name).pairs.sum()) / (job.rows * (job.rows + 1) / 2)


def _areas(job: Job, name: str) -> Areas:
    return areas_of_windows(tuple(map(tuple, MASKS[name][0](job.rows).tolist())))  # type: ignore[arg-type]


def worker(rank: int, job: Job, folder: str, some: Contenders = contenders) -> None:
    """One rank: context parallelism of all masks, then FlexAttention of its share of them."""
    connect(rank, job.gpus, folder)
    x = tensors(job)
    dense, rows = dense_causal(job, x), Rows(Path(folder) / f"rows{rank}")
    mine: dict[str, list[torch.Tensor]] = {}
    for n, name in enumerate(job.names):
        if largest(time.time()) > job.until:
            break
        expected = measure(job, name, x, dense, some, rows if rank == 0 else Rows(Path(folder) / "others"))
        if n % job.gpus == rank:
            mine[name] = expected
    dist.destroy_process_group()
    if job.shared:
        return
    for name, expected in mine.items():
        if time.time() > job.until:
            break
        both = flex(job, name, x)
        if (error := worst_error(expected, both())) < _MOST:
            of_dense, time_of = in_turns([dense, both], job, seconds_alone)
            rows.add(name, *_FLEX, time_of, _ideal(job, name, of_dense))
        else:
            rows.note(name, *_FLEX, f"WRONG: relative error {error:.1e}")


def run(job: Job, work: Callable[..., None] = worker) -> list[dict[str, Any]]:
    """The rows of all masks, in their order; of what was not reached a row that says so."""
    why = "ranks share a GPU: no time" if job.shared else f"not reached in {job.seconds:.0f} s"
    with tempfile.TemporaryDirectory() as folder:
        context: Any = spawn(work, (job, folder), nprocs=job.gpus, join=False)
        try:
            while not context.join(timeout=1.0) and time.time() < job.until + _GRACE:
                pass
        except Exception as error:  # a rank failed: what was written is kept
            typer.echo(str(error), err=True)
            why = f"a rank failed: {type(error).__name__}"
        for process in context.processes:
            process.kill()
            process.join()
        lines = [line for path in sorted(Path(folder).glob("rows*")) for line in path.read_text().splitlines()]
    found: list[dict[str, Any]] = [dict(zip(_COLUMNS, json.loads(line), strict=True)) for line in lines]
    for name in job.names:
        reached = {row["what"] for row in found if row["mask"] == name}
        for what, where in (*((schedule, "all") for schedule in job.schedules), *([_MAGI] if job.peers else []), _FLEX):
            if what not in reached:
                found.append(dict(zip(_COLUMNS, (name, what, where, "", "", why), strict=True)))
    return sorted(found, key=lambda row: job.names.index(row["mask"]))


def main(
    gpus: Annotated[int, typer.Option(help="GPUs of this machine.")] = 2,
    tokens: Annotated[int, typer.Option(help="Of each GPU.")] = 16384,
    names: Annotated[str, typer.Option("--masks", help=f"Some of {', '.join(MASKS)}.")] = ",".join(MASKS),
    schedules: Annotated[str, typer.Option(help="Some of p2p, all_gather, a2a.")] = "p2p,all_gather",
    layouts: Annotated[str, typer.Option(help="Some of dual_chunk, contiguous, balanced.")] = "dual_chunk,balanced",
    rounds: Annotated[int, typer.Option(help="Turns of which the median counts.")] = 5,
    calls: Annotated[int, typer.Option(help="Calls in a row.")] = 6,
    without: Annotated[str, typer.Option(help="Compiler passes switched off: each, or -, all, names.")] = "-",
    peers: Annotated[bool, typer.Option("--peers", help="MagiAttention too, in turns.")] = False,
    limit: Annotated[float, typer.Option("--seconds", help="After which nothing more is begun.")] = 125.0,
    out: Annotated[Path | None, typer.Option(help="A CSV file to write.")] = None,
) -> None:
    """Measure, forward and backward, and print a table of milliseconds and shares."""
    of_masks, of_schedules, of_layouts = (tuple(x.split(",")) for x in (names, schedules, layouts))
    job = Job(gpus, tokens, of_masks, of_schedules, of_layouts, rounds, calls, limit, passes_of(without), peers)
    report(run(job), out)


def report(rows: Sequence[dict[str, Any]], out: Path | None) -> None:
    """Print the rows, and write them where they are asked for. Exit code 1 where something was wrong."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    typer.echo(text.getvalue())
    if out is not None:
        out.write_text(text.getvalue())
    if any(row["note"].startswith("WRONG") for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
