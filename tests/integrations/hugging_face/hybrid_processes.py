"""A hybrid model of transformers in bfloat16 with a process for each rank, against one process without cp_fast.

    python -m tests.integrations.hugging_face.hybrid_processes --size 2 --out hybrid.json     # NCCL
    python -m tests.integrations.hugging_face.hybrid_processes --size 2 --device cpu          # gloo, short documents

Packed documents, in every layout. One process on the CPU runs them one by one with transformers' own functions, in
float32 and in bfloat16. The errors of the ranks' logits, loss and gradients against float32 may be 1.5 times those of
bfloat16 in one process, and a hundredth more. Exit code 1 if one is larger.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import typer

import cp_fast
from benchmarks.parts.linear_layers.tuning import tune_only
from benchmarks.parts.ranks import Commit, Device, JsonOut, connect
from conformance.runner.processes import run_together
from cp_fast.integrations import token_batches
from cp_fast.integrations import transformers as ours
from cp_ref.schedules.words import LAYOUTS
from tests.integrations.hugging_face.documents_apart import alone
from tests.integrations.hugging_face.hybrids import tiny_hybrid

NAME = "Qwen3NextForCausalLM"
LIMIT_S = 300.0
LENGTHS = (700, 2, 301, 21)
SIZES = {"hidden_size": 128, "head_dim": 64, "max_position_embeddings": 1024}
SIZES |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
SIZES |= {"num_experts_per_tok": 4}  # all of them, as the choice depends on the last bit
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rank:
    """A process."""

    rank: int
    size: int
    device: str
    folder: str


def batch_of(device: str) -> Tensors:
    """Packed documents; shorter ones for a CPU."""
    lengths = [n if device == "cuda" else -(-n // 20) for n in LENGTHS]
    ids = torch.randint(3, 50, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


def model_of(device: torch.device | str, dtype: torch.dtype) -> Any:
    """The same weights in every dtype."""
    return tiny_hybrid(NAME, **SIZES).bfloat16().to(device, dtype)


def reference(device: str) -> tuple[Tensors, Tensors]:
    """The results of one process in float32 and in bfloat16, on a CPU. device: of the ranks."""
    sys.modules["fla"] = None  # type: ignore[assignment]  # transformers takes its own functions, which a CPU has
    found: list[Tensors] = []
    for dtype in (torch.float32, torch.bfloat16):
        logits, loss, grads = alone(model_of("cpu", dtype), batch_of(device))
        found.append({"logits": logits, "loss": loss} | grads)
    return found[0], found[1]


def one_rank(job: Rank) -> dict[str, tuple[Tensors, torch.Tensor]]:
    """A rank's share by layout, and the numbers of the tokens of its logits."""
    torch.set_num_threads(1)
    if job.device == "cuda":
        tune_only(0, 1000)
    device = connect(job.rank, job.size, job.folder, job.device)
    batch = {name: x.to(device) for name, x in batch_of(job.device).items()}
    numbers = torch.arange(batch["input_ids"].numel(), device=device)[None]
    found: dict[str, tuple[Tensors, torch.Tensor]] = {}
    for layout in LAYOUTS:
        cp = cp_fast.ContextParallel(dist.group.WORLD, layout=layout)
        model = ours.prepare(model_of(device, torch.bfloat16), cp)
        out = model(**ours.shard_batch(batch, cp=cp, model=model))
        out.loss.backward()
        share = {"logits": out.logits.detach()[0], "loss": out.loss.detach()}
        share |= {name: w.grad for name, w in model.named_parameters() if w.grad is not None}
        mine = token_batches.shard_tokens({**batch, "labels": numbers}, cp=cp, shift_labels=False)["labels"]
        found[layout] = {name: x.cpu() for name, x in share.items()}, mine.flatten().cpu()
    dist.destroy_process_group()
    return found


def together(shares: list[tuple[Tensors, torch.Tensor]]) -> Tensors:
    """The ranks' logits in the order of the tokens, and their sums of losses and gradients."""
    logits = torch.cat([share["logits"] for share, _ in shares])
    numbers = torch.cat([numbers for _, numbers in shares])
    real = numbers >= 0
    names = [name for name in shares[0][0] if name != "logits"]
    sums = {name: torch.stack([share[name].float() for share, _ in shares]).sum(0) for name in names}
    return {"logits": logits[real][numbers[real].argsort()], **sums}


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, of the whole tensor."""
    return ((found.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-6)).item()


def play(size: int, device: str) -> dict[str, Any]:
    """The errors by layout, of the ranks and of one process, and what is too large."""
    context = multiprocessing.get_context("forkserver")
    [(exact, plain)] = run_together(context, reference, {"one process": device}, RuntimeError, LIMIT_S)
    with tempfile.TemporaryDirectory() as folder:
        jobs = {f"rank {rank}": Rank(rank, size, device, folder) for rank in range(size)}
        ranks = run_together(context, one_rank, jobs, RuntimeError, LIMIT_S)
    layouts: dict[str, Any] = {}
    for layout in LAYOUTS:
        found = together([rank[layout] for rank in ranks])
        assert found.keys() == exact.keys(), found.keys() ^ exact.keys()
        errors = {name: (error(found[name], x), error(plain[name], x)) for name, x in exact.items()}
        wrong = [name for name, (mine, theirs) in errors.items() if not mine <= 1.5 * theirs + 0.01]
        layouts[layout] = {"errors, and of one process": errors, "wrong": wrong}
    return layouts


def main(size: int = 2, device: Device = "cuda", commit: Commit = "", out: JsonOut = None) -> None:
    """Play, and print what is wrong and the largest errors."""
    began = time.monotonic()
    layouts = play(size, device)
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if device == "cuda" else []
    record: dict[str, Any] = {"commit": commit, "model": NAME, "size": size, "gpus": gpus, "torch": torch.__version__}
    record |= {"seconds": round(time.monotonic() - began, 1), "layouts": layouts}
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n")
    for layout, found in layouts.items():
        errors = found["errors, and of one process"]
        worst = max(errors, key=lambda name: errors[name][0])
        said = [f"{name} {errors[name][0]:.2e}/{errors[name][1]:.2e}" for name in ("logits", "loss", worst)]
        typer.echo(f"{layout}: {', '.join(said)} of {len(errors)}; wrong: {found['wrong']}")
    bad = any(found["wrong"] for found in layouts.values())
    typer.echo(f"{size} ranks, {record['seconds']} s: {'FAILED' if bad else 'ALL RIGHT'}")
    raise typer.Exit(int(bad))


if __name__ == "__main__":
    from tests.integrations.hugging_face import hybrid_processes  # under its own name, which the processes import

    typer.run(hybrid_processes.main)
