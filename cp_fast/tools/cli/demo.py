"""`demo`: context-parallel attention on real documents over real processes, checked against the oracle."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import socket
import sysconfig
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, cached_property, partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape
from torch.distributed.device_mesh import init_device_mesh
from typer import Option

import cp_fast
from conformance.runner.processes import run_together
from cp_fast.build.recipe import BuildError, Unavailable
from cp_fast.compile.chosen_schedule import choose
from cp_fast.kernels.attention.choose_backend import BACKENDS
from cp_ref.problems.read_problem import DTYPES
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.schedule import Schedule
from cp_ref.schedules.values import MOST_RANKS, check_choice, read_count
from cp_ref.schedules.verify.proof import verify
from cp_ref.schedules.words import LAYOUTS, MASKS, Unsupported, canonical_layout
from cp_ref.show.cli.description import cost_table, show_picture
from cp_ref.show.cli.options import check_number, cumulative, exchanging, window, with_options
from cp_ref.show.cli.terminal import CHECK_FAILED, check_svg, complain, one_line, table
from cp_ref.show.svg_pictures import svg_picture

__all__ = [
    "Document",
    "Job",
    "Measured",
    "RankFailed",
    "checks",
    "demo",
    "read_documents",
    "run_rank",
    "spawn",
    "under_torchrun",
]

# ---- documents
#
# Real documents as bytes: the running Python's own sources and texts, or the user's files.


_SHORTEST = 50
_SUFFIXES = {".py", ".txt", ".rst", ".md"}
_NOT_HERE = {"__pycache__", "site-packages", "dist-packages", "test", "tests"}


class Document(NamedTuple):
    """The first bytes of a file."""

    name: str
    data: bytes


def read_documents(paths: list[Path], tokens: int, longest: int, seed: int) -> list[Document]:
    """Documents of `tokens` bytes in all, the last one cut to fit; fewer where the files end.

    Args:
        paths: files and folders of the user, taken in order, cut to `longest` bytes. Without any, files of the running
            Python's standard library in random order, each cut to a random length: the logarithms of these are spread
            evenly from 50 bytes to `longest`, so that most are short and a few long ones hold most of the tokens.

    Raises:
        ValueError: there is nothing to read.
    """
    rng, documents, left = random.Random(seed), [], tokens
    least = 1 if paths else min(_SHORTEST, longest)
    files = [file for path in paths for file in _files(path)] if paths else [*_texts_of_python()]
    if not paths:
        rng.shuffle(files)
    for path in files:
        length = longest if paths else round(math.exp(rng.uniform(math.log(least), math.log(longest))))
        with path.open("rb") as file:
            data = file.read(min(length, left))
        if len(data) >= min(least, left) and b"\0" not in data:
            documents.append(Document(path.name, data))
            left -= len(data)
        if not left:
            break
    if not documents:
        where = ", ".join(map(str, paths)) if paths else "the standard library's folder"
        raise ValueError(f"there is no text in {where}; name files or folders with --text")
    return documents


def _files(path: Path) -> list[Path]:
    """A file of the user, or all files in a folder, hidden ones left out."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"--text {path}: there is no such file or folder")
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return [p for p in files if not any(name.startswith(".") for name in p.relative_to(path).parts)]


@cache
def _texts_of_python() -> tuple[Path, ...]:
    """Looked for once: on a network's file system that takes seconds."""
    root = Path(sysconfig.get_path("stdlib"))
    folders = root, *sorted(p for p in root.glob("*/") if p.name not in _NOT_HERE)
    return tuple(p for folder in folders for p in sorted(folder.glob("*")) if p.suffix in _SUFFIXES and p.is_file())


# ---- options
#
# The demonstration's options, and what every rank makes of them: the packed documents, q, k, v and the gradient.


_WIDTH = 128  # The embedding has this width.


@dataclass(frozen=True)
class Job:
    """The options as given. Documents lie one after the other in a buffer, each padded to a multiple of 2 * ranks."""

    ranks: Annotated[int | None, Option(help="Number of ranks: 4, or torchrun's.", min=1, show_default=False)] = None
    text: Annotated[list[Path] | None, Option(help="A file or folder instead of Python's own; repeatable.")] = None
    tokens: Annotated[int, Option(help="Bytes of text in all.", min=1)] = 16384
    longest: Annotated[int, Option(help="Longest document, in bytes.", min=1)] = 2500
    heads: Annotated[int, Option(help="Query heads.", min=1)] = 4
    heads_kv: Annotated[int, Option(help="Key and value heads.", min=1)] = 2
    head_dim: Annotated[int, Option(help="Head dim, even.", min=2)] = 64
    dtype: Annotated[str, Option(help="float32 on a CPU, bfloat16 on GPUs, unless said otherwise.")] = ""
    layout: Annotated[str, Option(help="dual_chunk (or zigzag), contiguous or balanced.")] = "dual_chunk"
    mask: Annotated[str, Option(help="attn_mask_type, such as padding_causal or padding.")] = "padding_causal"
    window: Annotated[str, Option(help="LEFT,RIGHT; -1 is unbounded.")] = "-1,-1"
    cp_comm_type: Annotated[str, Option(help="The schedule: p2p, all_gather, a2a, a2a+p2p or auto.")] = "p2p"
    a2a_size: Annotated[int | None, Option(help="a2a+p2p only: how many ranks exchange heads, 2 unless given.")] = None
    backend: Annotated[str, Option(help="auto, fa4, cudnn, fa2, cpu or torch: the attention kernels.")] = "auto"
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto"
    seed: Annotated[int, Option(help="Of the choice of documents and the weights.")] = 0
    head: Annotated[int, Option(help="The picture's query head, where heads are spread over the ranks.")] = 0
    spoil: Annotated[str, Option(hidden=True)] = ""  # For tests: a result to change, or "rank N" to let it fail.

    def __post_init__(self) -> None:
        """Raises ValueError for a wrong option, before any rank starts."""
        object.__setattr__(self, "layout", canonical_layout(self.layout))
        backends, devices = ("auto", *(b.name for b in BACKENDS)), ("auto", "cpu", "cuda")
        choices = {"layout": LAYOUTS, "mask": MASKS, "device": devices, "backend": backends, "dtype": ("", *DTYPES)}
        for name, known in choices.items():
            check_choice(f"--{name}", getattr(self, name), known)
        if self.heads % self.heads_kv or self.head_dim % 2:
            words = f"--heads {self.heads} must be a multiple of --heads-kv {self.heads_kv}"
            raise ValueError(f"{words}, and --head-dim {self.head_dim} even")
        check_number("--head", self.head, self.heads)
        read_count("--ranks", 4 if self.ranks is None else self.ranks, at_least=1, at_most=MOST_RANKS)
        window(self.window)
        _ = self.exchanging

    @cached_property
    def where(self) -> tuple[int, str, str]:
        """The number of ranks, their device, and both in words: one process a GPU if there are enough GPUs."""
        world = here = self.ranks or 4
        started_by = ""
        if under_torchrun():
            world = int(os.environ["WORLD_SIZE"])
            if self.ranks not in (None, world):
                raise ValueError(f"--ranks is {self.ranks}, but torchrun has started {world}; leave it out")
            here, started_by = int(os.environ.get("LOCAL_WORLD_SIZE", world)), " started by torchrun"
        gpus = torch.cuda.device_count() if torch.cuda.is_available() and torch.distributed.is_nccl_available() else 0
        if self.device == "cuda" and gpus < here:
            raise ValueError(f"--device cuda needs one GPU a rank: {here} ranks, {gpus} GPUs that NCCL can use")
        if self.device != "cpu" and gpus >= here:
            return world, "cuda", f"{world} processes{started_by} over NCCL, one GPU each"
        fewer = f": there are fewer GPUs ({gpus}) than ranks; --ranks {gpus} uses them"
        why = "" if self.device == "cpu" else fewer if gpus else " (no GPU that NCCL can use)"
        return world, "cpu", f"{world} processes{started_by} over gloo on the CPU{why}"

    @property
    def exchanging(self) -> int:
        """How many ranks exchange heads."""
        return exchanging(self.cp_comm_type, self.a2a_size, self.where[0])

    @cached_property
    def documents(self) -> list[Document]:
        """The documents, in the order of the buffer."""
        return read_documents(self.text or [], self.tokens, self.longest, self.seed)

    @cached_property
    def slots(self) -> list[int]:
        """Each document's length, padded."""
        multiple = 2 * self.where[0]
        return [-(-len(d.data) // multiple) * multiple for d in self.documents]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        return getattr(torch, self.dtype or ("float32" if self.where[1] == "cpu" else "bfloat16"))

    def problem(self) -> dict[str, Any]:
        """The arguments of `make_plan`, except the context and the device."""
        sizes = {"heads_q": self.heads, "heads_kv": self.heads_kv, "d_qk": self.head_dim, "d_v": self.head_dim}
        lengths = cumulative([len(d.data) for d in self.documents])
        cu_seqlens = {"cu_seqlens_q": lengths, "cu_seqlens_q_padded": cumulative(self.slots)}
        mask = {"attn_mask_type": self.mask, "window_size": window(self.window)}
        return {"qkv_format": "thd", "dtype": self.torch_dtype} | sizes | cu_seqlens | mask

    def token_ids(self) -> torch.Tensor:
        """The packed buffer: the bytes as token ids, -1 for padding; int64 [t]."""
        padded = (d.data.ljust(slots, b"\0") for d, slots in zip(self.documents, self.slots, strict=True))
        ids = torch.frombuffer(bytearray(b"".join(padded)), dtype=torch.uint8).long()
        return ids.where(ids > 0, -1)  # Documents have no zero bytes.

    def qkv(self, ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Token ids [t] and positions [t] to q [t, h_q, d], k and v [t, h_kv, d]: fixed random weights and RoPE.

        Padding becomes NaN on purpose: nothing of it may reach a result.
        """
        draw = torch.Generator().manual_seed(self.seed)  # On the CPU, so that every device has the same numbers.
        x = torch.randn(256, _WIDTH, generator=draw).to(ids.device)[ids.clamp(min=0)]
        x[ids < 0] = float("nan")
        widths = (self.heads * self.head_dim, *[self.heads_kv * self.head_dim] * 2)
        weights = [torch.randn(_WIDTH, n, generator=draw).to(ids.device) * _WIDTH**-0.5 for n in widths]
        q, k, v = ((x @ w).unflatten(-1, (-1, self.head_dim)) for w in weights)
        dims = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=ids.device)
        angles = positions.double()[:, None, None] * 10_000.0 ** (-dims / self.head_dim)  # [t, 1, d/2]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        rotated = [torch.cat([a * cos - b * sin, a * sin + b * cos], -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1))]
        return [x.to(self.torch_dtype).requires_grad_() for x in (*rotated, v)]

    def dout(self) -> torch.Tensor:
        """A gradient of the whole output [t, h_q, d], NaN in the padding."""
        ids, draw = self.token_ids(), torch.Generator().manual_seed(self.seed + 1)
        dout = torch.randn(len(ids), self.heads, self.head_dim, generator=draw)
        dout[ids < 0] = float("nan")
        return dout.to(self.torch_dtype)


def under_torchrun() -> bool:
    """Whether this process is one of the ranks already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


# ---- ranks
#
# The ranks of the demonstration: each runs attention on its slice. A rank that fails ends all of them and is named.


_LIMIT = timedelta(minutes=5)  # For any one message: a rank that hangs is an error.


@dataclass(frozen=True)
class Measured:
    """Global tensors on the CPU, in sequence order, and every rank's times."""

    tensors: dict[str, torch.Tensor]  # q, k, v, dout, out, dq, dk, dv [t, h, d]; lse [t, h_q]; positions, ids [t]
    seconds: list[tuple[float, float]]  # forward and backward
    problem: Problem
    schedule: Schedule


class RankFailed(RuntimeError):
    """A rank raised or died. args: the rank and its error, and the traceback if there is one."""


def spawn(job: Job) -> Measured:
    """Run every rank in a separate process. Raises what the first one raised; then the others have been ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # PyTorch is imported once, not in every rank.
    with tempfile.TemporaryDirectory(prefix="cp_fast_demo_") as folder:
        places = {f"rank {rank}": (job, rank, rank, f"file://{folder}/store") for rank in range(job.where[0])}
        return run_together(context, run_rank, places, RankFailed)[0]


def run_rank(place: tuple[Job, int, int, str]) -> Measured | None:
    """This rank, from start to end; rank 0 has the results.

    place: the job, the rank, its number on this machine, and the process group's `init_method`.

    Raises:
        ValueError: the rank refused the options. RankFailed: it raised another error.
    """
    job, rank, local_rank, init_method = place
    world, kind, _ = job.where
    cuda, loopback = kind == "cuda", {"lo", "lo0"} & {interface for _, interface in socket.if_nameindex()}
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    try:
        if cuda:
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
        if loopback and init_method != "env://":  # All ranks are on this machine: gloo needs no name resolution.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", min(loopback))
        group = {"init_method": init_method, "rank": rank, "world_size": world, "device_id": device if cuda else None}
        dist.init_process_group("nccl" if cuda else "gloo", timeout=_LIMIT, **group)
        measured = _measure(job, device)
        dist.destroy_process_group()
        return measured
    except Exception as error:
        message = f"rank {rank} failed: {type(error).__name__}: {one_line(error)}"
        if isinstance(error, ValueError | Unsupported):  # It is about the options: the message is enough.
            raise ValueError(message) from error
        says_what_to_do = isinstance(error, BuildError | Unavailable)
        details = () if says_what_to_do else (traceback.format_exc(),)
        raise RankFailed(message, *details) from error


def _measure(job: Job, device: torch.device) -> Measured | None:
    """Attention on this rank's slice, forward and backward. Collective."""
    group: Any = dist.group.WORLD
    if job.cp_comm_type == "a2a+p2p":  # Neighbours exchange heads. The ring goes around their groups.
        group = init_device_mesh(device.type, (job.where[0] // job.exchanging, job.exchanging))
    words: Any = {"cp_comm_type": job.cp_comm_type, "layout": job.layout}  # The context refuses wrong words.
    cp = cp_fast.ContextParallel(group, backend=job.backend, **words)
    if job.spoil == f"rank {cp.rank}":
        raise RuntimeError("this rank was told to fail")
    if job.spoil == f"death of rank {cp.rank}":
        os._exit(7)
    plan = cp_fast.make_plan(cp=cp, device=device, **job.problem())
    ids = cp_fast.shard(job.token_ids(), cp=cp, plan=plan).to(device)
    positions = cp_fast.position_ids(cp=cp, plan=plan, device=device)
    q, k, v = job.qkv(ids, positions)
    dout = cp_fast.shard(job.dout(), cp=cp, plan=plan).to(device)

    def timed(run: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        dist.barrier()
        began = time.perf_counter()
        result = run(*arguments)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return result, time.perf_counter() - began

    forward = partial(cp_fast.attention, q, k, v, cp=cp, plan=plan, return_lse=True)
    forward()[0].backward(dout)  # This compiles kernels and opens connections.
    q.grad = k.grad = v.grad = None
    (out, lse), forward_s = timed(forward)
    _, backward_s = timed(out.backward, dout)
    local: dict[str, Any] = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse.t(), "ids": ids}
    local |= {"dq": q.grad, "dk": k.grad, "dv": v.grad, "positions": positions}
    whole = {n: cp_fast.unshard(x.detach().contiguous(), cp=cp, plan=plan).cpu() for n, x in local.items()}
    seconds = [(0.0, 0.0)] * cp.size
    dist.all_gather_object(seconds, (forward_s, backward_s))
    return None if cp.rank else Measured(whole, seconds, plan.problem, plan.schedule)


# ---- checks
#
# The demonstration's check: every result against the oracle, document by document, and the padding against zero.


_RESULTS = ("out", "lse", "dq", "dk", "dv")


def checks(job: Job, measured: Measured) -> list[tuple[str, tuple[str, ...], bool]]:
    """(what is checked, its errors and bounds in words, whether it is right)."""
    got, ids = dict(measured.tensors), job.token_ids()
    if job.spoil in _RESULTS:
        got[job.spoil] = got[job.spoil].clone()
        got[job.spoil].view(-1)[0] += 0.125
    wrong = {
        "token ids": [got["ids"] != ids],
        "RoPE positions": [got["positions"] != torch.cat([torch.arange(n) for n in job.slots])],
        "padding is 0": [(x.exp() if n == "lse" else x)[ids < 0] != 0 for n, x in got.items() if n in _RESULTS],
        "free of NaN": [got[name].isnan() for name in _RESULTS],
    }  # The padding's inputs are NaN, and reach no result.
    rows = [
        (row.name, tuple(f"{x:.2e}" for x in (row.max_error, row.max_bound, row.mean_error, row.mean_bound)), row.ok)
        for row in _errors(job, measured, got)
    ]
    for name, parts in wrong.items():
        count = sum(int(part.sum()) for part in parts)
        words = f"{count:,} wrong" if count else "none wrong", f"of {sum(x.numel() for x in parts):,}", "", ""
        rows.append((name, words, not count))
    return rows


def _errors(job: Job, measured: Measured, got: dict[str, torch.Tensor]) -> list[Any]:
    """The rows of `conformance.compare`: each result's error against `dense_attention` in float64, and its bound, which
    comes from plain attention in the same dtype on the same inputs.
    """
    from conformance import compare, eager_attention

    problem, group = measured.problem, measured.problem.heads_per_kv
    alone = replace(problem, cp_size=1, cp_comm_type="p2p", a2a_size=1, layout="contiguous")
    alone = replace(alone, heads_q=group, heads_kv=1)
    masks: dict[str, Any] = {"attn_mask_type": problem.attn_mask_type, "window_size": problem.window_size}
    own, exact, baseline = (defaultdict[str, list[torch.Tensor]](list) for _ in range(3))
    for start, document in zip(problem.starts_q, problem.sequences, strict=False):
        # One document alone, without padding; then kv head by kv head, to save memory.
        n = document.len_q
        of_document = replace(alone, sequences=(Sequence(n, n, n, n),))
        lengths: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": torch.tensor([0, n])}
        rows = {name: x[start : start + n].to(job.where[1]) for name, x in got.items() if x.ndim > 1}
        for head in range(problem.heads_kv):
            one = {name: x.unflatten(1, (problem.heads_kv, -1))[:, head] for name, x in rows.items()}
            one["lse"] = one["lse"].t()
            wide = {name: x.double() for name, x in one.items()}
            found = (
                one,
                _both(wide, partial(cp_fast.dense_attention, **lengths, **masks)),
                _both(one, partial(eager_attention, problem=of_document)),
            )
            for part, results in zip((own, exact, baseline), found, strict=True):
                for name in _RESULTS:
                    part[name].append(results[name].flatten(0, 1))
    own, exact, baseline = ({name: torch.cat(xs) for name, xs in part.items()} for part in (own, exact, baseline))
    return list(compare(own, exact, baseline, job.torch_dtype))


def _both(given: dict[str, torch.Tensor], attend: Callable[..., tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    """The results of both passes on q, k, v and dout."""
    leaves = [given[name].detach().requires_grad_() for name in "qkv"]
    out, lse, _ = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, given["dout"].to(out.dtype))
    return dict(zip(_RESULTS, (out.detach(), lse.detach(), *grads), strict=True))


# ---- the command
#
# The `demo` command: from options to a verdict.


@with_options
def demo(
    job: Job,
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this file too.")] = None,
) -> None:
    """Run attention over real documents on several ranks, forward and backward, and check all results with the oracle.

    Exit code: 0, 1 when a check or a rank fails, 2 for options that are refused.
    """
    check_svg(svg)
    console = Console(quiet=under_torchrun() and os.environ["RANK"] != "0")
    _show_documents(console, job)
    with console.status("running all ranks"):
        measured = _run(job)
    if measured is None:
        return
    problem, schedule = measured.problem, measured.schedule
    with console.status("checking every result with the oracle"):
        rows = checks(job, measured)
    console.print()
    show_picture(console, problem, schedule, job.head, choose(problem).head_chunks)
    ring = f" (a2a in groups of {job.exchanging})" if job.cp_comm_type == "a2a+p2p" else ""
    title = f"{job.where[0]} ranks, {job.cp_comm_type}{ring}, {job.layout}, {job.mask}"
    forward, backward = ([f"{1e3 * s:,.1f} ms" for s in of] for of in zip(*measured.seconds, strict=True))
    console.print(cost_table(title, verify(problem, schedule), forward=forward, backward=backward))
    columns = ("result", ">largest error", ">bound", ">mean error", ">bound", "")
    made = table("against the oracle (dense attention in float64)", *columns)
    for name, values, ok in rows:
        made.add_row(name, *values, "[green]ok[/]" if ok else "[bold red]FAILED[/]")
    console.print(made)
    if svg is not None:
        svg.write_text(svg_picture(problem, schedule, job.head), encoding="utf-8")
        console.print(f"picture written to {svg}", soft_wrap=True)
    if not all(ok for _, _, ok in rows):
        complain("a check failed: the table above says which")
        raise typer.Exit(CHECK_FAILED)
    console.print("[bold green]All results are right.[/]")


def _run(job: Job) -> Measured | None:
    """The results, on rank 0; a failure is told in one line behind its traceback."""
    try:
        if not under_torchrun():
            return spawn(job)
        return run_rank((job, int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0")), "env://"))
    except RankFailed as error:
        message, *details = error.args
        for trace in details:
            Console(stderr=True, highlight=False).print(trace, style="dim", markup=False, soft_wrap=True)
        complain(message)
        raise typer.Exit(CHECK_FAILED) from None


def _show_documents(console: Console, job: Job) -> None:
    lengths, names = sorted(len(d.data) for d in job.documents), [d.name for d in job.documents]
    few = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    padding = sum(job.slots) - sum(lengths)
    dtype = str(job.torch_dtype).removeprefix("torch.")
    console.print(
        f"[bold]{sum(lengths):,} bytes[/] of {len(names)} documents ({escape(few)}), from {lengths[0]:,} to "
        f"{lengths[-1]:,} bytes, half of them under {median(lengths):,.0f}; packed with {padding:,} slots of padding\n"
        f"{job.heads} query heads over {job.heads_kv}, d {job.head_dim}, {dtype}; {escape(job.where[2])}"
    )
