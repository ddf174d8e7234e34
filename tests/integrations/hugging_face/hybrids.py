"""Tiny hybrid models of transformers: the classes that run over ranks, and those that are refused."""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
from typing import Any

import torch

from tests.integrations.hugging_face.families import EXPERTS, SIZES

__all__ = ["HYBRIDS", "REFUSED_HYBRIDS", "tiny_hybrid"]

LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
GATED = LAYERS | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_conv_kernel_dim": 4}
GATED |= {"linear_key_head_dim": 8, "linear_value_head_dim": 6}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 16}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
KIMI = LAYERS | EXPERTS | LATENT | {"linear_num_heads": 4, "linear_head_dim": 8, "linear_conv_kernel_dim": 4}
KIMI |= {"num_key_value_heads": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
KIMI |= {"mlp_layer_types": ["dense", "sparse"]}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
STATES |= {"mamba_d_conv": 4, "mamba_expand": 2}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8}
NEMOTRON |= {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"], "num_hidden_layers": 4}
NEMOTRON |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
NEMOTRON |= {"moe_shared_expert_intermediate_size": 16, "topk_group": 1}
ZAMBA = {"n_mamba_heads": 8, "mamba_headdim": 8, "mamba_d_state": 16, "mamba_ngroups": 1, "chunk_size": 8}
INDEXED: dict[str, Any] = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16}
INDEXED |= {"indexer_compress_ratio": 4}
SCAN = {"state_size": 8, "time_step_rank": 4, "expand": 2}
JAMBA = {"mamba_d_state": 8, "mamba_dt_rank": 4, "mamba_expand": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
JAMBA |= {"num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
ZAMBA1 = {"mamba_d_state": 8, "mamba_dt_rank": 4, "mamba_expand": 2, "n_mamba_heads": 2, "num_hidden_layers": 3}
ZAMBA1 |= {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "attention_head_dim": 16}
ZAMBA1 |= {"attention_hidden_size": 64}
ZAYA = EXPERTS | {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 5}
ZAYA |= {"num_experts_per_tok": 1}
CONV = {"layer_types": ["conv", "full_attention"]}

HYBRIDS: dict[str, dict[str, Any]] = {  # by the functions that they call
    "Qwen3NextForCausalLM": GATED | SHARED,
    "Qwen3_5ForCausalLM": GATED,
    "Qwen3_5MoeForCausalLM": GATED | SHARED,
    "LaraMiniForCausalLM": GATED | EXPERTS,
    "OlmoHybridForCausalLM": GATED,
    "KimiLinearForCausalLM": KIMI,
    "BailingHybridForCausalLM": KIMI,
    "BambaForCausalLM": STATES | {"attn_layer_indices": [1]},
    "FalconH1ForCausalLM": STATES | {"mamba_d_ssm": 64},
    "GraniteMoeHybridForCausalLM": STATES | LAYERS | EXPERTS | {"shared_intermediate_size": 16},
    "NemotronHForCausalLM": NEMOTRON,
    "Zamba2ForCausalLM": ZAMBA | {"layers_block_type": ["linear_attention", "hybrid"]},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1, "chunk_size": 8},
    "MiniMaxForCausalLM": EXPERTS | LAYERS | {"block_size": 4},
    "MambaForCausalLM": SCAN,
    "FalconMambaForCausalLM": SCAN,
    "JambaForCausalLM": JAMBA,
    "ZambaForCausalLM": ZAMBA1,
    "RecurrentGemmaForCausalLM": {"lru_width": 32, "block_types": ["recurrent", "attention"]},
    "ZayaForCausalLM": ZAYA,
    "Lfm2ForCausalLM": CONV,
    "Lfm2MoeForCausalLM": CONV | EXPERTS | {"num_dense_layers": 1},
    "Lfm3ForCausalLM": CONV,
}
REFUSED_HYBRIDS: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen4ExpForCausalLM": (GATED | SHARED | INDEXED, "'indexed_attention'"),
    "Glm5NextTextModel": (KIMI | {"index_topk": 16, "index_kpool": 4, "qk_rope_head_dim": 0}, "'indexed_attention'"),
    "InklingForCausalLM": ({}, "position_bias is a tensor"),
    "Inkling2ForCausalLM": ({}, "causal_conv1d_fn is not given cp_batch"),
    "Inkling2LoopForCausalLM": ({}, "causal_conv1d_fn is not given cp_batch"),
    "xLSTMForCausalLM": ({}, "never calls its attention by transformers' AttentionInterface"),
    "RwkvForCausalLM": ({"attention_hidden_size": 32}, r"time_shift \(ZeroPad2d of RwkvSelfAttention\) mixes tokens"),
}


def tiny_hybrid(name: str, **more: Any) -> Any:
    """A small model in training mode, with weights that are large enough for states to matter."""
    kind = getattr(importlib.import_module("transformers"), name)
    sizes = HYBRIDS[name] if name in HYBRIDS else REFUSED_HYBRIDS[name][0]
    torch.manual_seed(0)
    model = kind._from_config(kind.config_class(**(SIZES | sizes | more)), attn_implementation="eager")
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    return model.train()
