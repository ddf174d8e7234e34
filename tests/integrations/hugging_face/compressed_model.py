"""A small DeepSeek-V4, with a layer of each type."""

from __future__ import annotations

import importlib
from typing import Any

import torch

__all__ = ["NAME", "with_compressed_keys"]

NAME = "DeepseekV4ForCausalLM"
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 8, "head_dim": 16, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8,
    "n_routed_experts": 7, "num_experts_per_tok": 2, "n_shared_experts": 1, "partial_rotary_factor": 0.5,
    "layer_types": ["sliding_attention", "heavily_compressed_attention", *["compressed_sparse_attention"] * 2],
    "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5}, "sliding_window": 4,
    "index_n_heads": 16, "index_head_dim": 12, "index_topk": 2, "hc_mult": 2, "hc_sinkhorn_iters": 3,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def with_compressed_keys(name: str = NAME, **more: Any) -> Any:
    """A small model in training mode, with a layer of each type, and weights large enough for choices to differ."""
    kind = getattr(importlib.import_module("transformers"), name)
    torch.manual_seed(0)
    model = kind._from_config(kind.config_class(**(SIZES | more)), attn_implementation="eager")
    for where, weight in model.named_parameters():
        if weight.dim() > 1 or where.endswith("sinks"):
            torch.nn.init.normal_(weight, std=0.2)
    for where, table in model.named_buffers():
        if where.endswith("tid2eid"):  # which experts a token has, by its id
            table.copy_(torch.randint(0, SIZES["n_routed_experts"], table.shape))
    return model.train()
