"""Tiny models of many families of transformers, with random weights in float32."""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
from typing import Any

import torch

__all__ = ["FAMILIES", "REFUSED", "batch_of", "tiny"]

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "n_routed_experts": 4, "n_group": 1}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "topk_group": 1, "first_k_dense_replace": 1}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
CHUNKS = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "attention_chunk_size": 7}
CHUNKS |= {"intermediate_size_mlp": 48, "floor_scale": 4, "num_local_experts": 2}


FAMILIES: dict[str, dict[str, Any]] = {  # what is right over ranks
    "LlamaForCausalLM": {},
    "RobertaForMaskedLM": {},  # whose labels are not shifted, and whose positions begin behind the padding's
    "Qwen3MoeForCausalLM": EXPERTS,
    "DeepseekV3ForCausalLM": EXPERTS | LATENT,
    "BertForMaskedLM": {},
    "LlamaForTokenClassification": {},
    "Gemma3ForCausalLM": WINDOWS,
    "GPT2LMHeadModel": {},
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "GPTNeoXForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 5},
    "MixtralForCausalLM": EXPERTS,
    "Qwen2ForCausalLM": {},
    "Qwen2MoeForCausalLM": EXPERTS | {"shared_expert_intermediate_size": 16},
    "Qwen3ForCausalLM": {},
    "Gemma2ForCausalLM": WINDOWS,
    "GptOssForCausalLM": WINDOWS | EXPERTS,
    "Glm4MoeForCausalLM": EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "Phi3ForCausalLM": {},
    "PhimoeForCausalLM": EXPERTS,
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": WINDOWS,
    "OlmoeForCausalLM": EXPERTS,
    "CohereForCausalLM": {},
    "Cohere2ForCausalLM": WINDOWS,
    "GraniteMoeForCausalLM": EXPERTS,
    "SmolLM3ForCausalLM": {},
    "Starcoder2ForCausalLM": {},
    "DiffLlamaForCausalLM": {},
    "Ernie4_5ForCausalLM": {},
    "SeedOssForCausalLM": {},
    "CamembertForTokenClassification": {},
    "DistilBertForTokenClassification": {},
    "BertForTokenClassification": {},
    "StableLmForCausalLM": {},  # whose layers hand no keywords on to their attention
    "NemotronForCausalLM": {},
    "GPTNeoForCausalLM": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 5},
    "XGLMForCausalLM": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    "GPTNeoXJapaneseForCausalLM": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "MegatronBertForMaskedLM": {},
    "BloomForCausalLM": {},
    "BloomForTokenClassification": {},
    "MptForCausalLM": {"max_seq_len": 64},
    "ModernBertForMaskedLM": {"local_attention": 6, "global_attn_every_n_layers": 2},
    "ModernBertForTokenClassification": {"local_attention": 6, "global_attn_every_n_layers": 2},
    "Llama4ForCausalLM": EXPERTS | CHUNKS,
    "EsmForMaskedLM": {"mask_token_id": 4, "position_embedding_type": "rotary", "num_key_value_heads": 4},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # and what is named of the others
    "RwkvForCausalLM": ({"attention_hidden_size": 32}, r"time_shift \(ZeroPad2d of RwkvSelfAttention\) mixes tokens"),
    "MobileBertForTokenClassification": ({}, r"embeddings.embedding_transformation \(Linear\) mixes tokens without"),
    "BertModel": ({}, r"pooler \(BertPooler\) pools over tokens"),
    "T5ForConditionalGeneration": ({}, "has an encoder and a decoder"),
    "ViTModel": ({}, "reads pixel_values"),
}


def tiny(name: str, **more: Any) -> Any:
    """A small model of a class of transformers, in evaluation mode: most families drop out by default."""
    kind = getattr(importlib.import_module("transformers"), name)
    sizes = FAMILIES.get(name, REFUSED.get(name, ({}, ""))[0])
    torch.manual_seed(0)
    return kind(kind.config_class(**(SIZES | sizes | more))).eval()


def batch_of(name: str) -> dict[str, torch.Tensor]:
    """Two sequences, padded, with labels as the model takes them alone."""
    ids = torch.randint(3, 50, (2, 24), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(24) < torch.tensor([[24], [15]])).long()
    labels = ids % 2 if "Classification" in name else ids.clone()
    labels[:, 9] = -100
    return {"input_ids": ids, "labels": labels.masked_fill(mask == 0, -100), "attention_mask": mask}
