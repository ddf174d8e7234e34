"""One training step of the Qwen3-0.6B shape over GPUs, compared with one process, and how long that takes.

    python -m benchmarks.checks.step_gpu --commit "$(git rev-parse HEAD)" --out step_2x.json    # two GPUs over NCCL
    python -m benchmarks.checks.step_gpu --device cpu --tiny --tokens 64 --out /tmp/step.json   # to try it

Weights are random, in bfloat16 (float32 on a CPU). The record has the time of the whole comparison, and the report.
Exit code 1 where the step is wrong. Needs transformers.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from conformance.step import compare_step
from cp_fast.integrations import transformers as cp_transformers

SIZES: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def build(cp: Any, tiny: bool, device: str) -> Any:
    """The model in a loop of one's own: gradients are summed over ranks."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**(SIZES | TINY if tiny else SIZES), use_cache=False)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    where = device if device == "cpu" else f"cuda:{torch.cuda.current_device()}"
    with torch.device(where):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    if cp is not None:
        model = cp_transformers.prepare(model, cp)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch = {name: x.to(where) for name, x in batch.items()}
        part = model(**(batch if cp is None else cp_transformers.shard_batch(batch, cp=cp))).loss
        part.backward()
        if cp is not None:
            for weight in model.parameters():
                dist.all_reduce(weight.grad)
            dist.all_reduce(part := part.detach())
        return part

    return model, step


def batch(tokens: int, tiny: bool) -> dict[str, torch.Tensor]:
    """One sequence."""
    words = (TINY if tiny else SIZES)["vocab_size"]
    ids = torch.randint(0, words, (1, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def main(
    out: Annotated[Path, typer.Option(help="The record, JSON.")],
    commit: Annotated[str, typer.Option(help="Of what runs.")] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    ranks: Annotated[int, typer.Option(min=1, help="GPUs, or processes.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Of the sequence, over all ranks.")] = 32768,
    cp_comm_type: Annotated[str, typer.Option(help="The schedule.")] = "p2p",
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of two small layers.")] = False,
) -> None:
    """Compare one step, and write a record."""
    start = time.perf_counter()
    building, batching = partial(build, tiny=tiny, device=device), partial(batch, tokens, tiny)
    report = compare_step(building, batching, ranks, cp_comm_type=cp_comm_type, device=device)
    seconds = time.perf_counter() - start
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    rows = {row.name: [row.max_error, row.max_bound] for row in report.rows if not row.ok or " of " not in row.name}
    record = {"commit": commit, "device": name, "ranks": ranks, "tokens": tokens, "cp_comm_type": cp_comm_type}
    record |= {"tiny": tiny, "torch": torch.__version__, "seconds": round(seconds, 1), "right": report.right}
    record |= {"compared": len(report.rows), "rows": rows, "report": str(report).splitlines()}
    out.write_text(json.dumps(record, indent=1) + "\n")
    typer.echo(f"{report}\n{seconds:.1f} s")
    raise typer.Exit(0 if report.right else 1)


if __name__ == "__main__":
    typer.run(main)
