"""Train a small transformer on packed documents, once on one device with PyTorch's own attention and once with each
schedule over several ranks: the loss curves have to be the same.

    python -m benchmarks.training --ranks 4 --out benchmarks/results/training_4x_h200      # .csv and .png
    python -m benchmarks.training --simulated --ranks 4      # all ranks on one GPU, over the simulated group
    python -m benchmarks.training --device cpu --ranks 2 --steps 5 --tokens 256

The model (bytes, RoPE, grouped heads, autocast to bfloat16 on a GPU) and the order of the documents are the same in
every run. A rank holds its share of each document, so that every step moves keys and values between the ranks, forward
and backward. In bfloat16 training amplifies each rounding, so that not even two runs on one device give the same curve:
that is why there are two. Exit code 1 if a curve is further from the first than `tolerance` and than twice the second.
"""

from __future__ import annotations

import csv
import os
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

import cp_fast
from benchmarks.parts.ranks import Commit, Device, Schedules, connect
from cp_fast.tools.cli.demo import read_documents
from cp_ref import SimGroup
from cp_ref.groups.collectives import all_reduce_sum

ALONE, AGAIN = "one device, PyTorch's attention", "one device, once more"


@dataclass(frozen=True)
class Job:
    """The options of all runs."""

    ranks: int
    device: str
    steps: int
    tokens: int  # of a step, real ones
    layers: int = 4
    heads_q: int = 8
    heads_kv: int = 2
    head_dim: int = 64

    @property
    def width(self) -> int:
        return self.heads_q * self.head_dim

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Real documents of very uneven lengths: ids [t] (padding -1), and cumulative lengths, real and padded."""
        documents = read_documents([], self.tokens, self.tokens // 2, seed=step)
        factor = 2 * 8  # of every run, so that all have the same buffer
        lengths = [len(d.data) for d in documents]
        slots = [-(-n // factor) * factor for n in lengths]
        parts = [
            functional.pad(torch.tensor(list(d.data)), (0, slot - n), value=-1)
            for d, n, slot in zip(documents, lengths, slots, strict=True)
        ]
        return torch.cat(parts), cumulative(lengths), cumulative(slots)


def cumulative(lengths: list[int]) -> torch.Tensor:
    return functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


class Block(torch.nn.Module):
    """Attention and a feed-forward layer, normalised before."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(job.width) for _ in range(2))
        heads = job.heads_q + 2 * job.heads_kv
        self.qkv = torch.nn.Linear(job.width, heads * job.head_dim, bias=False)
        self.out = torch.nn.Linear(job.width, job.width, bias=False)
        self.up = torch.nn.Linear(job.width, 4 * job.width, bias=False)
        self.down = torch.nn.Linear(4 * job.width, job.width, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.job.head_dim))  # [t, h_q + 2 h_kv, d]
        q, k, v = heads.split([self.job.heads_q, self.job.heads_kv, self.job.heads_kv], dim=1)
        x = x + self.out(attend(rotated(q, positions), rotated(k, positions), v).flatten(1))
        return x + self.down(functional.silu(self.up(self.norms[1](x))))


class Model(torch.nn.Module):
    """Bytes to the logits of the next byte."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, job.width)
        self.blocks = torch.nn.ModuleList(Block(job) for _ in range(job.layers))
        self.head = torch.nn.Linear(job.width, 256, bias=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        x = self.embedding(ids.clamp(min=0))
        for block in self.blocks:
            x = block(x, positions, attend)
        return self.head(x)


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = (positions[:, None] * frequencies)[:, None]  # [t, 1, d / 2]
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def attend_alone(cu: torch.Tensor, cu_padded: torch.Tensor) -> Any:
    """Document by document, with torch.nn.functional.scaled_dot_product_attention."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pieces = []
        for n in range(len(cu) - 1):
            start, stop, length = int(cu_padded[n]), int(cu_padded[n + 1]), int(cu[n + 1] - cu[n])
            q_n, k_n, v_n = (x[start : start + length].transpose(0, 1)[None] for x in (q, k, v))
            out = functional.scaled_dot_product_attention(q_n, k_n, v_n, is_causal=True, enable_gqa=True)
            pieces.append(functional.pad(out[0].transpose(0, 1), (0, 0, 0, 0, 0, stop - start - length)))
        return torch.cat(pieces)

    return attend


def train(job: Job, cp: cp_fast.ContextParallel | None, device: torch.device) -> list[float]:
    """The mean loss of every step; over the ranks of `cp`, or on this device alone."""
    torch.manual_seed(0)
    begin, model = time.monotonic(), Model(job).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(job.steps):
        ids, cu, cu_padded = job.batch(step)
        ends = torch.zeros(len(ids), dtype=torch.bool)
        ends[(cu_padded[1:] - 1).long()] = True  # a document's last slot predicts nothing
        labels = ids.roll(-1).masked_fill(ends | (ids < 0), -1)
        positions = torch.arange(len(ids)) - torch.repeat_interleave(cu_padded[:-1], cu_padded.diff())
        attend: Any = attend_alone(cu, cu_padded)
        batch = [x.to(device) for x in (ids, labels, positions)]
        if cp is not None:
            split = {"cp": cp, "qkv_format": "thd", "cu_seqlens_padded": cu_padded}
            batch = [cp_fast.shard(x, **split) for x in batch]
            plan = cp_fast.make_plan(
                cp=cp,
                qkv_format="thd",
                cu_seqlens_q=cu,
                cu_seqlens_q_padded=cu_padded,
                heads_q=job.heads_q,
                heads_kv=job.heads_kv,
                d_qk=job.head_dim,
                d_v=job.head_dim,
                dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
                device=device,
            )
            attend = partial(cp_fast.attention, cp=cp, plan=plan)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(batch[0], batch[2], attend)
        loss = functional.cross_entropy(logits.float(), batch[1], ignore_index=-1, reduction="sum")
        loss = loss / int((labels >= 0).sum())
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        if cp is not None:
            share = [*(p.grad.flatten() for p in model.parameters() if p.grad is not None), total[None]]
            *grads, total = all_reduce_sum(cp.comm, torch.cat(share)).split([len(x) for x in share])
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.grad = grad.view_as(p)  # every rank had the gradient of its own tokens' loss
        optimizer.step()
        losses.append(float(total))
        if (step + 1) % 50 == 0 and (cp is None or cp.comm.rank == 0):
            name = ALONE if cp is None else cp.cp_comm_type
            print(f"{name}: step {step + 1}, loss {losses[-1]:.4f}, {time.monotonic() - begin:.0f} s", flush=True)
    return losses


def worker(rank: int, job: Job, schedules: list[Any], folder: str, record: Record) -> None:
    torch.set_num_threads(1)
    device = connect(rank, job.ranks, folder, job.device)
    mesh = init_device_mesh(job.device, (job.ranks // 2, 2)) if job.ranks % 2 == 0 else None
    for schedule in schedules:
        cp = cp_fast.ContextParallel(mesh if schedule == "a2a+p2p" else dist.group.WORLD, schedule)
        losses = train(job, cp, device)
        if rank == 0:
            record.add(schedule, losses)
    if rank == 0:
        torch.save(record.curves, Path(folder) / "curves.pt")
    dist.destroy_process_group()


def simulate(job: Job, schedules: list[Any], record: Record) -> None:
    """The same with all ranks in this process, on one device."""
    device = torch.device(job.device, 0) if job.device == "cuda" else torch.device("cpu")

    def one(member: Any, schedule: Any) -> list[float]:
        group = member.split(2) if schedule == "a2a+p2p" else member
        return train(job, cp_fast.ContextParallel(group, schedule), device)

    for name in schedules:
        record.add(name, SimGroup(job.ranks).run(partial(one, schedule=name))[0])


@dataclass
class Record:
    """The curves so far, and a file that has them: a run that is cut short leaves what it came to."""

    out: Path | None
    words: str
    curves: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, losses: list[float]) -> None:
        self.curves[name] = losses
        if self.out is not None:
            with self.out.with_suffix(".csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["step", *self.curves, self.words])
                steps = zip(*self.curves.values(), strict=True)
                writer.writerows([n, *(f"{loss:.6f}" for loss in row)] for n, row in enumerate(steps))

    def distance(self, name: str) -> tuple[float, float]:
        """From the first curve: the largest difference, and the largest of means over 10 steps."""
        a, b = (torch.tensor(self.curves[n], dtype=torch.float64) for n in (name, ALONE))
        means = (a - b).unfold(0, min(10, len(a)), 1).mean(dim=1)
        return float((a - b).abs().max()), float(means.abs().max())


def plot(curves: dict[str, list[float]], job: Job, path: Path) -> None:
    """The curves above; what they differ from the single device's below."""
    import matplotlib  # an extra: only pictures need it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=[2, 1])
    for name, losses in curves.items():
        style = {"color": "black", "linewidth": 3, "alpha": 0.35} if name == ALONE else {"linewidth": 1}
        above.plot(losses, label=name, **style)
        if name != ALONE:
            below.plot([a - b for a, b in zip(losses, curves[ALONE], strict=True)], label=name, linewidth=1)
    above.set_ylabel("loss (nats per byte)")
    above.set_title(f"{job.layers} layers, width {job.width}, {job.tokens} tokens a step, {job.ranks} ranks")
    above.legend()
    below.axhline(0, color="black", linewidth=0.5)
    below.set_ylabel("minus one device")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(
    ranks: Annotated[int, typer.Option(help="Processes; one a GPU.")] = 4,
    device: Device = "cuda",
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 200,
    tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 16384,
    schedules: Schedules = "p2p,all_gather,a2a,a2a+p2p",
    simulated: Annotated[bool, typer.Option("--simulated", help="All ranks on one device, in this process.")] = False,
    tolerance: Annotated[float, typer.Option(help="Largest difference of a curve's mean over 10 steps.")] = 0.02,
    commit: Commit = "",
    out: Annotated[Path | None, typer.Option(help="Write OUT.csv and OUT.png.")] = None,
) -> None:
    """Train with every schedule, and compare the loss curves."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    job = Job(ranks, device, steps, tokens)
    if device == "cpu":
        job = Job(ranks, device, steps, tokens, layers=2, heads_q=4, heads_kv=2, head_dim=16)
    one_device = torch.device(device, 0) if device == "cuda" else torch.device(device)
    record = Record(out, f"commit {commit}, torch {torch.__version__}, {ranks} ranks, {device}")
    for name in (ALONE, AGAIN):
        record.add(name, train(job, None, one_device))
    if simulated:
        simulate(job, schedules.split(","), record)
    else:
        with tempfile.TemporaryDirectory() as folder:
            spawn(worker, args=(job, schedules.split(","), folder, record), nprocs=ranks)
            record.curves = torch.load(Path(folder) / "curves.pt")
    allowed = max(tolerance, 2 * record.distance(AGAIN)[1])
    far = []
    for name, losses in record.curves.items():
        largest, smooth = record.distance(name)
        print(f"{name:34} first {losses[0]:.4f}, last {losses[-1]:.4f}; off by {largest:.1e}, means {smooth:.1e}")
        if not smooth <= allowed:
            far.append(name)
    if out is not None:
        plot(record.curves, job, out.with_suffix(".png"))
    if far:
        print(f"further than {allowed:.2e} from the single device's curve: {', '.join(far)}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
