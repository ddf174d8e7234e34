"""Context-parallel attention under other libraries' names. Each module is imported on first use, and needs its library
only if it says so.

    flash_attn           flash_attn_func, flash_attn_varlen_func, and their forms of one tensor
    ring_flash_attn      its functions, without those of striped rows
    sdpa                 scaled_dot_product_attention
    transformers         prepare(model, cp): checks a model, and switches its attention; shard_batch
    trainer              ContextParallelMixin, for transformers' Trainer
    accelerate           use(accelerator): its own ParallelismConfig(cp_size=n) runs on this package
    diffusers            use(model, cp): transformers of video and images, in training and inference
    transformer_engine   patch(): the function that its attention calls under context parallelism
    megatron             CoreAttention, for the specs of transformer layers and blocks
    torchtitan           apply_cp_to_forward and prepare_context_parallel_input, for varlen attention
    loss                 token_mean: a loss over the tokens of all ranks
    token_batches        shard_tokens, for any model: a rank's part of a batch of token ids
    sequences            sequence_sum and token_log_probs, of which losses of preference are made
    sampler              DocumentSampler, GroupsOfAllSizes, pack: groups of ranks as long as their documents

A function honours every argument that it accepts, and raises with the name of any other. All of them plan once for a
batch: a call with equal lengths finds the plan of the layer before. Keep lengths on the CPU: every call reads them on
the host, and would wait for a GPU.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_MODULES = (
    "accelerate",
    "diffusers",
    "flash_attn",
    "loss",
    "megatron",
    "ring_flash_attn",
    "sampler",
    "sdpa",
    "sequences",
    "token_batches",
    "torchtitan",
    "trainer",
    "transformer_engine",
    "transformers",
)


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
