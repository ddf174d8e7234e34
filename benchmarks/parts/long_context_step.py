"""Training steps of one library at several lengths, on the ranks that torchrun starts; `long_context.py` runs it.

    torchrun --nproc-per-node 2 benchmarks/parts/long_context_step.py --library cp_fast --lengths 65536 --out rows

The model, its loss and its optimizer are those of `examples/long_context.py`, so the libraries differ in attention, and
in what checkpointing recomputes. Rank 0 appends one JSON row for each length to the file `--out`.

    cp_fast                   p2p, dual_chunk, attention saved and offloaded (`cp_fast+liger`: Liger's fused loss)
                              (`cp_fast+balanced`: that layout, for packed documents)
    accelerate                accelerate's `ParallelismConfig(cp_size=...)`, which is PyTorch's context parallel, on
                              cuDNN's kernels; full checkpointing (`accelerate+own_loss`: the loss of Transformers)
    pytorch                   the same context parallel without accelerate
    ring_flash_attn           its adapter for Transformers, on cp_fast's kernels; full checkpointing

With `--documents N` the tokens are N documents of log-normal lengths. `cp_fast` packs them in one row. The context
parallelism of the others knows no packed documents. They take micro-batches, whose rows are padded to the longest one.
A micro-batch has no more tokens than the packed row, padding included. Documents come in the order drawn or
(`accelerate+by_length`) in that of their lengths. One optimizer step has all of them.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, Qwen3Config

import cp_fast as cp
from cp_fast.checkpoint import save_attention
from cp_fast.integrations import transformers as cp_transformers
from cp_fast.integrations.loss import loss_for_backward
from cp_fast.kernels.attention.choose_backend import choose

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.parts.others import flash_attn_interface  # noqa: E402

EXAMPLE = runpy.run_path(str(ROOT / "examples" / "long_context.py"))
WARM_UP = 4096  # tokens of the first step, which makes the optimizer's states and compiles kernels
PICTURED = 131072  # tokens of the rows that have the readings of memory
Batch = dict[str, Any]


class Way(NamedTuple):
    """A model with its loss, an optimizer, and this rank's part of a batch, to be used inside a context."""

    whole: Any
    optimizer: Any
    cut: Callable[[Batch], AbstractContextManager[Batch]]


class OwnLoss(torch.nn.Module):
    """The loss of Transformers, which has the logits of all tokens, times the number of tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, shift_labels: torch.Tensor, **batch: Any) -> torch.Tensor:
        loss = self.model(**batch, labels=shift_labels, shift_labels=shift_labels, use_cache=False).loss
        return loss * (shift_labels != -100).sum()


def full_checkpointing(model: Any) -> Any:
    """All of each layer is recomputed."""
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def with_optimizer(whole: Any, cut: Callable[[Batch], AbstractContextManager[Batch]]) -> Way:
    return Way(whole, EXAMPLE["optimizer_of"]("adamw", whole.parameters()), cut)


def cp_fast(model: Any, option: str) -> Way:
    """This project."""
    context = cp.ContextParallel(dist.group.WORLD, layout="balanced" if option == "balanced" else "dual_chunk")
    model = cp_transformers.prepare(model, context).train()
    saving: dict[str, Any] = {"use_reentrant": False, "context_fn": save_attention(offload=option != "no_offload")}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=saving)

    @contextmanager
    def cut(batch: Batch) -> Iterator[Batch]:
        given = {name: x for name, x in batch.items() if name != "shift_labels"}
        part = cp_transformers.shard_batch(given, cp=context)
        part = {name: x for name, x in part.items() if name not in ("labels", "num_items_in_batch")}
        yield {name: x.to(model.device) if isinstance(x, torch.Tensor) else x for name, x in part.items()}

    return with_optimizer(EXAMPLE["shard_weights"](model, liger=option == "liger"), cut)


def by_buffers(batch: Batch, parallel: Callable[..., Any], device: torch.device) -> Iterator[Batch]:
    """PyTorch's context parallel cuts buffers in place, those that Trainer of Transformers gives it."""
    whole = {name: batch[name].to(device) for name in ("input_ids", "shift_labels")}
    whole["position_ids"] = torch.arange(whole["input_ids"].shape[1], device=device)[None]
    whole["attention_mask"] = torch.ones_like(whole["input_ids"])
    buffers = list(whole.values())
    with (
        sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True),
        parallel(buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)),
    ):
        yield whole


def pytorch(model: Any, option: str) -> Way:
    """PyTorch's context parallel, and FSDP2 as in the example."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    cut = contextmanager(partial(by_buffers, parallel=partial(context_parallel, mesh), device=model.device))
    return with_optimizer(EXAMPLE["shard_weights"](full_checkpointing(model)), cut)


def accelerate(model: Any, option: str) -> Way:
    """accelerate's context parallel and its FSDP2."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    parallel = ParallelismConfig(cp_size=dist.get_world_size())
    on_cpu = model.device.type == "cpu"
    accelerator = Accelerator(parallelism_config=parallel, fsdp_plugin=plugin, cpu=on_cpu, mixed_precision="no")
    device = model.device
    model = full_checkpointing(model)
    whole: Any = OwnLoss(model) if option == "own_loss" else EXAMPLE["WithLoss"](model)
    optimizer = EXAMPLE["optimizer_of"]("adamw", whole.parameters())
    whole, optimizer = accelerator.prepare(whole, optimizer)
    cut = contextmanager(partial(by_buffers, parallel=accelerator.maybe_context_parallel, device=device))
    return Way(whole, optimizer, cut)


def ring_flash_attn(model: Any, option: str) -> Way:
    """ring-flash-attention's adapter for Transformers.

    Transformers 5 has removed a function that the adapter looks for, and a signature that it replaces. So the function
    is put back, and the adapter's attention is registered under another name.
    """
    import transformers.modeling_flash_attention_utils as utils

    rank, size, device = dist.get_rank(), dist.get_world_size(), model.device
    parts: dict[int, tuple[int]] = {}
    backend = choose(frozenset(), "auto" if device.type == "cuda" else "cpu")
    sys.modules["flash_attn.flash_attn_interface"] = flash_attn_interface(backend, parts, device)
    if not hasattr(utils, "is_flash_attn_greater_or_equal_2_10"):
        utils.is_flash_attn_greater_or_equal_2_10 = True  # type: ignore[attr-defined]
    adapter: Any = importlib.import_module("ring_flash_attn.adapters.hf_adapter")
    forwards = adapter.create_ring_flash_attention_forward(dist.group.WORLD, heads_k_stride=1)
    setattr(utils, "_flash_attention_forward", forwards[-1])  # noqa: B010
    AttentionInterface.register("ring", adapter.flash_attention_forward)
    AttentionMaskInterface.register("ring", lambda *_, **__: None)
    model.set_attn_implementation("ring")

    @contextmanager
    def cut(batch: Batch) -> Iterator[Batch]:
        tokens = batch["input_ids"].shape[1]
        parts.update({n: (n,) for n in range(tokens // size, tokens + 1, tokens // size)})
        ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        adapter.update_ring_flash_attn_params(ends, dist.group.WORLD)
        whole = {"input_ids": batch["input_ids"], "position_ids": torch.arange(tokens)[None]}
        whole["shift_labels"] = batch["shift_labels"]
        yield {name: x.chunk(size, 1)[rank].to(device) for name, x in whole.items()}

    return with_optimizer(EXAMPLE["shard_weights"](full_checkpointing(model)), cut)


WAYS: dict[str, Callable[[Any, str], Way]] = {
    "cp_fast": cp_fast,
    "accelerate": accelerate,
    "pytorch": pytorch,
    "ring_flash_attn": ring_flash_attn,
}


class Memory:
    """The memory of a step, read around attention and MLP of each layer, in the forward pass and when they are
    recomputed: what is allocated, and the most since the reading before.
    """

    def __init__(self, model: Any) -> None:
        self.readings: list[tuple[str, float, float]] = []
        self.peak = 0
        for number, layer in enumerate(model.model.layers):
            for part in ("self_attn", "mlp"):
                module = getattr(layer, part)
                module.register_forward_pre_hook(lambda *_, at=f"{number} {part} begins": self.read(at))
                module.register_forward_hook(lambda *_, at=f"{number} {part} ends": self.read(at))

    def read(self, at: str) -> None:
        if not torch.cuda.is_available():
            return
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.peak = max(self.peak, peak)
        self.readings.append((at, torch.cuda.memory_allocated() / 2**30, peak / 2**30))

    def start(self) -> None:
        self.read("begin")
        self.readings, self.peak = [], 0
        self.read("begin")


def lengths_of(tokens: int, documents: int) -> list[int]:
    """Log-normal lengths that add up to `tokens`.

    >>> lengths_of(1000, 8)
    [212, 139, 113, 199, 68, 90, 23, 156]
    """
    if documents < 2:
        return [tokens]
    shares = torch.randn(documents, generator=torch.Generator().manual_seed(1), dtype=torch.float64).exp().tolist()
    lengths = [max(2, int(tokens * share / sum(shares))) for share in shares]
    lengths[lengths.index(max(lengths))] += tokens - sum(lengths)
    return lengths


def padded(batch: Batch, lengths: list[int], *, by_length: bool) -> Iterator[Batch]:
    """The documents of a packed batch as micro-batches of padded rows, none of more tokens than the batch."""
    documents = {name: list(batch[name][0].split(lengths)) for name in ("input_ids", "shift_labels")}
    if by_length:
        documents = {name: sorted(some, key=len) for name, some in documents.items()}
        lengths = sorted(lengths)
    most, begin = sum(lengths), 0
    for end in range(1, len(lengths) + 1):
        if end < len(lengths) and (end + 1 - begin) * rounded(max(lengths[begin : end + 1])) <= most:
            continue
        width = rounded(max(lengths[begin:end]))
        yield {
            name: torch.stack([torch.nn.functional.pad(x, (0, width - len(x)), value=fill) for x in some[begin:end]])
            for (name, some), fill in zip(documents.items(), (0, -100), strict=True)
        }
        begin = end


def rounded(length: int) -> int:
    """The length of a row, which all ranks can cut in equal chunks."""
    return -(-length // (grain := 2 * dist.get_world_size())) * grain


def step(
    way: Way, tokens: int, documents: int, number: int, vocabulary: int, device: torch.device, library: str
) -> tuple[float, float]:
    """Seconds of one step, and its mean loss."""
    lengths = lengths_of(tokens, documents)
    batch = EXAMPLE["batch_of"](tokens, lengths, vocabulary, number)
    rows = [torch.nn.functional.pad(x, (0, 1), value=-100)[1:] for x in batch["labels"][0].split(lengths)]
    batch["shift_labels"] = torch.cat(rows)[None]
    now = EXAMPLE["now"]
    dist.barrier()
    start = now(device)
    total = torch.zeros((), device=device)
    packs = documents < 2 or library.startswith("cp_fast")
    for micro in [batch] if packs else padded(batch, lengths, by_length=library.endswith("by_length")):
        with way.cut(micro) as part:
            loss = way.whole(**part) / (tokens - len(lengths))
            loss_for_backward(loss, averaged_over=way.whole).backward()
            total += loss.detach().float()
    way.optimizer.step()
    way.optimizer.zero_grad()
    taken = now(device) - start
    dist.all_reduce(total)
    return taken, float(total)


def largest(values: list[float], device: torch.device) -> list[float]:
    """Over the ranks."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--lengths", required=True, help="of the whole sequence, with commas")
    parser.add_argument("--documents", type=int, default=1, help="packed or padded documents of log-normal lengths")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="the first is not measured, if there are more")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    name, _, option = given.library.partition("+")
    on_gpu = torch.cuda.is_available() and not given.tiny
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    sizes = EXAMPLE["TINY" if given.tiny else "QWEN3_4B"] | {"num_hidden_layers": given.layers}
    lengths = [int(n) for n in given.lengths.split(",")]
    config = Qwen3Config(**sizes, max_position_embeddings=max(lengths), tie_word_embeddings=True)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)
    memory = Memory(model)
    way = WAYS[name](model, option)
    sizes = {"vocabulary": config.vocab_size, "device": device, "library": given.library}
    step(way, min(WARM_UP, *lengths), 1, 0, **sizes)
    for tokens in lengths:
        if on_gpu:
            torch.cuda.empty_cache()
        done: list[tuple[float, float]] = []
        for number in range(given.steps):
            memory.start()
            done.append(step(way, tokens, given.documents, number, **sizes))
            memory.read("end")
        row: dict[str, Any] = {"library": given.library, "tokens": tokens, "layers": given.layers}
        row |= {"documents": given.documents} if given.documents > 1 else {}
        seconds = largest([taken for taken, _ in done], device)
        best = min(seconds[1:] or seconds)
        row |= {"seconds": [round(s, 4) for s in seconds], "losses": [round(loss, 4) for _, loss in done]}
        row |= {"tokens_per_s": round(tokens / best)}
        if on_gpu:
            free, total = torch.cuda.mem_get_info()
            used = [memory.peak, torch.cuda.max_memory_reserved(), total - free]
            peak, reserved, everything = (round(n / 2**30, 3) for n in largest([float(n) for n in used], device))
            row |= {"peak_gib": peak, "reserved_gib": reserved, "used_gib": everything}
            row |= {"total_gib": round(total / 2**30, 2)}
        if on_gpu and tokens == PICTURED:
            row["memory"] = [(at, round(now, 3), round(peak, 3)) for at, now, peak in memory.readings]
        if dist.get_rank() == 0:
            with Path(given.out).open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps({key: value for key, value in row.items() if key != "memory"}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
