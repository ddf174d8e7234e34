"""Entries of configurations whose small values cannot be told from their names, by the configuration's class."""

from __future__ import annotations

from typing import Any

__all__ = ["EXCEPTIONS"]

_SHARED = {  # the last two layers take the keys and values of the first two
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    "intermediate_size": [48] * 4,
}
_ANGLES = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 1, 1]}
_BY_LAYER = {"full_attention": _ANGLES, "sliding_attention": _ANGLES, "mrope_section": "as it is"}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32, "num_hidden_layers": 1}
_BYTES = _HEADS | {"vocab_size": 260}
_PICTURES = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "num_embeddings": 16}
_STAGES = {"depths": [1, 1], "embed_dim": [32, 32], "num_heads": [2, 2], "num_groups": [2, 2], "patch_size": [7, 3]}
_STAGES |= {"patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False, True]}
_SOUND = {"patch_sizes": [16, 6, 5, 4], "hidden_sizes": [32] * 4, "depths": [1] * 4, "num_hidden_layers": 4}
_CONVOLUTION = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
_QWEN4 = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 2,
    "split_ngram_parts": 2,
    "ple_embed_dim": 32,
}

_CODES = range(16)  # of pictures in a vocabulary
_LETTERS = {code: "".join(chr(ord("A") + int(digit)) for digit in str(code)) for code in _CODES}
_TILES = {"image_grid_pinpoints": [[56, 112], [112, 112]]}  # of pictures that are cut in tiles of 56
_MARKS = {"vision_start_token_id": 80, "vision_end_token_id": 81, "audio_start_token_id": 82, "audio_end_token_id": 83}
_IMAGE_TOKENS = {"image_token_id": 70, "video_token_id": 71}

EXCEPTIONS: dict[str, dict[str, Any]] = {  # "as it is": the class's own value
    "Apertus1p5Config": {
        "image_token_offset": 48,
        "audio_token_offset": 64,
        "vision_config": {"codebook_size": 16},
        "audio_config": {"codebook_size": 16},
    },
    "BambaConfig": {"attn_layer_indices": [1]},
    "BltConfig": {
        "encoder_hash_byte_group_vocab": 50,
        "patcher_config": _BYTES,
        "encoder_config": _BYTES | {"hidden_size_global": 32},
        "decoder_config": _BYTES | {"hidden_size_global": 32},
        "global_config": _HEADS,
    },
    "ChameleonConfig": {
        "vocabulary_map": {"<image>": 70} | {f"IMGIMG{letters}Z": 72 + code for code, letters in _LETTERS.items()},
        "vq_config": _PICTURES | {"resolution": 32},
    },
    "CohereCompassConfig": {"text_config": {"rope_parameters": _BY_LAYER}},
    "CohereCompassTextConfig": {"rope_parameters": _BY_LAYER},
    "DbrxConfig": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "DeepseekOcr2Config": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {
            "sam_config": {"downsample_channels": [32, 32], "output_channels": 32, "window_size": 2},
        },
    },
    "DiffusionGemmaConfig": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}},
    "DogeConfig": {"keep_window_size": "as it is"},
    "DoryConfig": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
    },
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1},
    "Dots3NoteConfig": {"text_config": {"head_dim": 16}},
    "Dots3NoteTextConfig": {"head_dim": 16},
    "Emu3Config": {
        "vocabulary_map": {"<image>": 70, "<|extra_200|>": 71}
        | {f"<|visual token {code:06}|>": 72 + code for code in _CODES},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "codebook_size": 16},
    },
    "Ernie4_5_VLMoeConfig": {
        "text_config": {"moe_intermediate_size": [16, 16], "rope_parameters": _ANGLES | {"mrope_section": [1, 1, 2]}}
    },
    "EsmConfig": {"vocab_size": 96, "mask_token_id": 70, "pad_token_id": 1},
    "Florence2Config": {"vision_config": _STAGES},
    "GPTNeoConfig": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "Gemma3nTextConfig": _SHARED,
    "Glm5NextConfig": {"text_config": {"index_kpool": 4}},
    "GotOcr2Config": {"vision_config": {"window_size": 2, "output_channels": 32}},
    "Granite4VisionConfig": _TILES
    | {
        "deepstack_layer_map": [[0, 0]],
        "downsample_rate": "1/2",
        "spatial_target_layers": [0, 1],
        "vision_feature_select_strategy": "default",
        "vision_config": {"hidden_size": 64, "image_size": 56, "patch_size": 14},
    },
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "InklingConfig": {"vision_config": {"patch_size": 2}},
    "JambaConfig": {"attn_layer_offset": 1, "expert_layer_offset": 1, "expert_layer_period": 2},
    "JanusConfig": {"vq_config": _PICTURES | {"latent_channels": 32, "embed_dim": 8}},
    "Lfm2Config": _CONVOLUTION,
    "Lfm2MoeConfig": _CONVOLUTION | {"num_dense_layers": 1},
    "LiltConfig": {"hidden_size": 48},
    "MistralLarge4Config": {
        "text_config": {"kv_source_layers": [0, 0, 2, 3], "indexer_types": ["full", "shared", "full", "full"]}
    },
    "Mamba2Config": {"num_heads": 8, "head_dim": 8},
    "Molmo2Config": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "MuseSparkConfig": {"audio_config": _SOUND, "out_hidden_size": 128},
    "NemotronH_Omni_Reasoning_V3_Config": _IMAGE_TOKENS | {"vision_config": {"video_temporal_patch_size": 2}},
    "NeoMMEConfig": {"head_dim": 16},
    "PerceiverConfig": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 1, "d_model": 32},
    "Qwen3ASRConfig": {"audio_config": {"output_dim": 32}},
    "Qwen4ExpConfig": {"text_config": _QWEN4},
    "Qwen4ExpTextConfig": _QWEN4,
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ReformerConfig": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [8, 8],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {
        "attention_head_dim": 16,  # 2 * hidden_size over 4 heads
        "attention_hidden_size": 64,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
    },
    "AriaConfig": {"projector_patch_to_query_dict": {"16": 4}},
    "Gemma3Config": {"mm_tokens_per_image": 4},
    "LlavaNextConfig": _TILES,
    "LlavaNextVideoConfig": _TILES,
    "LlavaOnevisionConfig": _TILES,
    "VipLlavaConfig": {"vision_feature_layer": [-2, -1]},
    "PaliGemmaConfig": {"text_config": {"num_key_value_heads": 2, "use_bidirectional_attention": False}},
    "MuseGlimmerConfig": {"out_hidden_size": 128},
    "MiniCPMOcrConfig": _IMAGE_TOKENS | {"insert_layer_id": 0, "vision_config": {"insert_layer_id": 0}},
    "MiniCPMV4_6Config": _IMAGE_TOKENS | {"insert_layer_id": 0, "vision_config": {"insert_layer_id": 0}},
    "MiniCPMV4_7Config": _IMAGE_TOKENS | {"insert_layer_id": 0, "vision_config": {"insert_layer_id": 0}},
    "Qwen2_5OmniThinkerConfig": _MARKS,
    "Qwen3OmniMoeThinkerConfig": _MARKS,
    "Glm46VConfig": {"text_config": {"rope_parameters": _ANGLES}},
    "Step3p7Config": {"text_config": {"sliding_window": 6}},
}
