"""A model of Qwen3-4B's shape, with random weights, trained on sequences as long as the memory allows:

    torchrun --nproc-per-node 2 examples/long_context.py --tokens 131072
    torchrun --nproc-per-node 2 examples/long_context.py --tokens 131072 --documents 5
    python examples/long_context.py --find-longest --processes 2
    torchrun --nproc-per-node 2 examples/long_context.py --tiny

FSDP2 shards the weights, context parallelism the tokens. Checkpointing recomputes all but attention, whose results wait
in the host's memory. The loss never has all logits. The lines with a number are what a program of yours needs. Needs
transformers; uses Liger's loss on GPUs if it is installed.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Qwen3Config

import cp_fast as cp
from conformance.runner.processes import device_of_group, own_gpu
from cp_fast.checkpoint import save_attention
from cp_fast.integrations import transformers as cp_transformers
from cp_fast.integrations.loss import loss_for_backward

QWEN3_4B: dict[str, Any] = {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728}
QWEN3_4B |= {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
TINY: dict[str, Any] = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
CHUNK = 2048  # tokens whose logits exist at once
OPTIMIZERS = ("adamw", "adamw-stochastic", "adamw-8bit")
OUT_OF_MEMORY = "OutOfMemoryError"


class WithLoss(torch.nn.Module):
    """A prepared model, and the sum of its tokens' losses without the logits of all tokens."""

    def __init__(self, model: Any, *, liger: bool = False) -> None:
        super().__init__()
        self.model, self.liger = model, liger

    def forward(self, shift_labels: torch.Tensor, **batch: Any) -> torch.Tensor:
        hidden = self.model.model(**batch, use_cache=False).last_hidden_state.flatten(0, 1)
        weight, labels = self.model.lm_head.weight, shift_labels.flatten()
        if self.liger:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, labels)
        parts: list[Any] = []
        for rows, targets in zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True):
            parts.append(checkpoint(chunk_loss, rows, weight, targets, use_reentrant=False))
        return torch.stack(parts).sum()


def chunk_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of the losses of some tokens, hidden [t, d]; labels of -100 do not count."""
    return torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), labels, ignore_index=-100, reduction="sum")


def shard_weights(model: Any, *, liger: bool = False) -> Any:
    """The model with its loss, its weights sharded over all ranks by FSDP2: one group of weights for each layer."""
    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(WithLoss(model, liger=liger), mesh=mesh)


def optimizer_of(name: str, parameters: Any) -> Any:
    """PyTorch's AdamW, whose states have the weights' dtype; or torchao's, which rounds bfloat16 weights at random, and
    has states of 8 bits too.
    """
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-4)
    from torchao import optim

    kind = optim.AdamW8bit if name == "adamw-8bit" else optim._AdamW
    return kind(parameters, lr=1e-4, bf16_stochastic_round=True)


def lengths_of(tokens: int, documents: int) -> list[int]:
    """Uneven lengths that add up to `tokens`."""
    shares = [2.0**-n for n in range(documents)]
    lengths = [max(1, int(tokens * share / sum(shares))) for share in shares]
    lengths[0] += tokens - sum(lengths)
    return lengths


def batch_of(tokens: int, lengths: list[int], vocabulary: int, step: int) -> dict[str, torch.Tensor]:
    """Random tokens, the same on all ranks; packed documents say their positions."""
    ids = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(step))
    batch = {"input_ids": ids, "labels": ids}
    return batch | {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]} if len(lengths) > 1 else batch


def train(given: argparse.Namespace) -> None:
    """Some steps, and what they took."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        own_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, size, device = dist.get_rank(), dist.get_world_size(), device_of_group()
    lengths = lengths_of(given.tokens, given.documents)
    layout = "balanced" if given.documents > 1 else "dual_chunk"
    context = cp.ContextParallel(dist.group.WORLD, given.cp_comm_type, layout=layout)  # 1

    sizes = (TINY if given.tiny else QWEN3_4B) | ({"num_hidden_layers": given.layers} if given.layers else {})
    config = Qwen3Config(**sizes, max_position_embeddings=given.tokens, tie_word_embeddings=True)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)
    model = cp_transformers.prepare(model, context).train()  # 2
    saving: dict[str, Any] = {"use_reentrant": False, "context_fn": save_attention(offload=not given.no_offload)}  # 3
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=saving)  # 4
    weights = sum(p.numel() for p in model.parameters())
    whole = shard_weights(model, liger=on_gpu and importlib.util.find_spec("liger_kernel") is not None)
    optimizer = optimizer_of(given.optimizer, whole.parameters())

    seconds, losses = [], []
    for step in range(given.steps):
        start = now(device)
        part = cp_transformers.shard_batch(batch_of(given.tokens, lengths, sizes["vocab_size"], step), cp=context)  # 5
        part.pop("labels")
        count = part.pop("num_items_in_batch")
        part = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in part.items()}
        loss = whole(**part) / count  # this rank's part of the mean over all tokens
        loss_for_backward(loss, averaged_over=whole).backward()  # 6
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(now(device) - start)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    best = min(seconds[1:] or seconds)
    alone = config.num_hidden_layers * attention_seconds(context, config, lengths, device, model.dtype)
    peak = torch.tensor(float(peak_bytes(on_gpu)))
    if on_gpu:
        peak = peak.to(device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if rank == 0:
        say(given, config, weights, lengths, losses, best, alone, float(peak), on_gpu, size)
    dist.destroy_process_group()


def attention_seconds(context: Any, config: Any, lengths: list[int], device: torch.device, dtype: Any) -> float:
    """What one layer's attention takes by itself, forward and backward; of two calls the second."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    heads, heads_kv, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    how: dict[str, Any] = {"heads_q": heads, "heads_kv": heads_kv, "d_qk": dim, "d_v": dim}
    plan = cp.make_plan(cp=context, qkv_format="thd", cu_seqlens_q=ends, dtype=dtype, device=device, **how)
    rows = len(cp.position_ids(cp=context, plan=plan))
    q, k, v = (
        torch.randn(rows, n, dim, device=device, dtype=dtype).requires_grad_() for n in (heads, heads_kv, heads_kv)
    )
    taken = 0.0
    for _ in range(2):
        dist.barrier()
        start = now(device)
        cp.attention(q, k, v, cp=context, plan=plan).sum().backward()
        taken = now(device) - start
    return taken


def now(device: torch.device) -> float:
    """Seconds, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_bytes(on_gpu: bool) -> int:
    """The most memory that this rank's GPU, or this process, has held."""
    if on_gpu:
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def say(
    given: argparse.Namespace,
    config: Any,
    weights: int,
    lengths: list[int],
    losses: list[float],
    seconds: float,
    attention: float,
    peak: float,
    on_gpu: bool,
    size: int,
) -> None:
    """Print what the fastest step took. Recomputed work does not count as work of the model."""
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    scores = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    flops = 6 * weights * given.tokens + scores
    print("losses", *(f"{loss:.4f}" for loss in losses))
    print(f"{given.tokens} tokens in {len(lengths)} documents: {given.tokens / seconds:.0f} tokens/s over {size} ranks")
    if on_gpu:
        print(f"MFU {flops / seconds / size / given.peak_tflops / 1e12:.3f} of {given.peak_tflops} TFLOP/s")
    else:
        print(f"MFU is for GPUs; {flops / seconds / 1e9:.3f} GFLOP/s")
    print(f"peak memory {peak / 2**30:.2f} GiB a {'GPU' if on_gpu else 'process'}")
    print(f"attention alone: {attention / seconds:.2f} of the step")


def find_longest(given: argparse.Namespace) -> None:
    """Double the length until memory ends, then halve the gap. Each length runs in processes of its own, as no group
    outlives a rank that ran out of memory.
    """
    fits, fails, tokens = 0, given.most + 1, given.tokens
    while True:
        passed = run_alone(given, tokens)
        print(f"{tokens} tokens {'fit' if passed else 'do not fit'}", flush=True)
        fits, fails = (tokens, fails) if passed else (fits, tokens)
        room = fails - fits
        if fits and room <= max(1, fits // 16):
            break
        if not fits:
            tokens //= 2
        else:
            tokens = min(2 * fits, given.most) if fails > given.most else fits + room // 2
        if tokens in (0, fits):
            break
    print(f"longest: {fits} tokens")


def run_alone(given: argparse.Namespace, tokens: int) -> bool:
    """Whether a step of this length has memory enough. Raises RuntimeError where it fails for another reason."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(given.processes), __file__]
    names = ("documents", "layers", "steps", "optimizer", "cp_comm_type", "peak_tflops")
    for name in names:
        command += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    command += [
        "--tokens",
        str(tokens),
        *(f"--{name}" for name in ("tiny", "no-offload") if getattr(given, name.replace("-", "_"))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and OUT_OF_MEMORY not in done.stderr + done.stdout:
        raise RuntimeError(f"{tokens} tokens:\n{done.stdout}\n{done.stderr}")
    return not done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, help="of the whole batch, over all ranks; 131072, or 256 with --tiny")
    parser.add_argument("--documents", type=int, default=1, help="packed documents of uneven lengths")
    parser.add_argument("--layers", type=int, default=0, help="0: those of the model")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cp-comm-type", default="p2p", choices=("p2p", "all_gather", "a2a"))
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS, help="the others need torchao")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of one GPU in bfloat16, for the MFU")
    parser.add_argument("--no-offload", action="store_true", help="attention's results stay on the GPU")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a trial")
    parser.add_argument("--find-longest", action="store_true", help="start with python, not torchrun")
    parser.add_argument("--most", type=int, default=2**24, help="tokens at which --find-longest ends")
    parser.add_argument("--processes", type=int, default=2, help="of --find-longest")
    given = parser.parse_args()
    given.tokens = given.tokens or (256 if given.tiny else 131072)
    if min(given.tokens, given.documents, given.steps, given.processes) < 1:
        parser.error("--tokens, --documents, --steps and --processes must be at least 1")
    (find_longest if given.find_longest else train)(given)


if __name__ == "__main__":
    main()
