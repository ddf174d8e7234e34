"""Tiny transformers of diffusers with random weights, and batches for them; lengths that do not divide."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

Batch = dict[str, Any]


class Family(NamedTuple):
    """A model and a batch of it. name: diffusers' class. sizes: of its configuration."""

    name: str
    sizes: dict[str, Any]
    batch: Callable[[], Batch]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _ids(tokens: int, axes: int) -> torch.Tensor:
    return torch.arange(tokens * axes).reshape(axes, tokens).T.contiguous().float() % 7


def flux(batch: int = 2, image: int = 11, text: int = 5) -> Batch:
    return {
        "hidden_states": noise(batch, image, 4),
        "encoder_hidden_states": noise(batch, text, 32),
        "pooled_projections": noise(batch, 32),
        "timestep": torch.linspace(0.2, 0.9, batch),
        "img_ids": _ids(image, 3),
        "txt_ids": torch.zeros(text, 3),
        "guidance": torch.full((batch,), 3.5),
    }


def flux2(batch: int = 2, image: int = 11, text: int = 5) -> Batch:
    return {
        "hidden_states": noise(batch, image, 4),
        "encoder_hidden_states": noise(batch, text, 32),
        "timestep": torch.linspace(0.2, 0.9, batch),
        "img_ids": _ids(image, 4).expand(batch, -1, -1),
        "txt_ids": torch.zeros(batch, text, 4),
        "guidance": torch.full((batch,), 3.5),
    }


def wan(batch: int = 2, frames: int = 3, height: int = 6, width: int = 10, text: int = 7) -> Batch:
    return {
        "hidden_states": noise(batch, 4, frames, height, width),
        "timestep": torch.arange(5, 5 + batch),
        "encoder_hidden_states": noise(batch, text, 16),
    }


def wan_of_steps() -> Batch:
    """A time step for each token, as Wan 2.2 has them."""
    return wan() | {"timestep": torch.arange(90).reshape(2, 45)}


def wan_of_images() -> Batch:
    """A text of 512 tokens behind those of an image, as Wan 2.1 has them."""
    return wan(text=512) | {"encoder_hidden_states_image": noise(2, 5, 16)}


def qwen_image(batch: int = 2, text: int = 7, seen: tuple[int, ...] = (7, 4), width: int = 5) -> Batch:
    return {
        "hidden_states": noise(batch, 3 * width, 16),
        "encoder_hidden_states": noise(batch, text, 16),
        "encoder_hidden_states_mask": torch.arange(text) < torch.tensor(seen)[:, None],
        "timestep": torch.linspace(0.2, 0.9, batch),
        "img_shapes": [[(1, 3, width)]] * batch,
    }


def ltx(batch: int = 2, text: int = 6, seen: tuple[int, ...] = (6, 3), width: int = 5) -> Batch:
    return {
        "hidden_states": noise(batch, 3 * 3 * width, 4),
        "encoder_hidden_states": noise(batch, text, 16),
        "encoder_attention_mask": (torch.arange(text) < torch.tensor(seen)[:, None]).long(),
        "timestep": torch.tensor([5, 7])[:batch],
        "num_frames": 3,
        "height": 3,
        "width": width,
    }


def ltx_of_steps() -> Batch:
    return ltx() | {"timestep": torch.arange(90).reshape(2, 45)}


def ltx2(batch: int = 2, text: int = 6, audio: int = 11) -> Batch:
    mask = torch.arange(text) < torch.tensor([text, 3])[:, None]
    return {
        "hidden_states": noise(batch, 2 * 3 * 5, 4),
        "audio_hidden_states": noise(batch, audio, 4),
        "encoder_hidden_states": noise(batch, text, 16),
        "audio_encoder_hidden_states": noise(batch, text, 16),
        "timestep": torch.rand(batch, 30) * 1000,
        "audio_timestep": torch.tensor([500.0, 300.0]),
        "sigma": torch.tensor([500.0, 300.0]),
        "encoder_attention_mask": mask.long(),
        "audio_encoder_attention_mask": mask.long(),
        "num_frames": 2,
        "height": 3,
        "width": 5,
        "audio_num_frames": audio,
    }


def helios(batch: int = 2) -> Batch:
    return {
        "hidden_states": noise(batch, 4, 3, 8, 8),
        "timestep": torch.tensor([5, 7])[:batch],
        "encoder_hidden_states": noise(batch, 7, 16),
        "indices_hidden_states": torch.arange(5, 8).expand(batch, -1),
        "indices_latents_history_short": torch.arange(4, 5).expand(batch, -1),
        "indices_latents_history_mid": torch.arange(2, 4).expand(batch, -1),
        "indices_latents_history_long": torch.arange(0, 4).expand(batch, -1),
        "latents_history_short": noise(batch, 4, 1, 8, 8),
        "latents_history_mid": noise(batch, 4, 2, 8, 8),
        "latents_history_long": noise(batch, 4, 4, 8, 8),
    }


def cosmos3() -> Batch:
    text, video = 5, 2 * 3 * 3
    return {
        "input_ids": torch.arange(3, 3 + text),
        "text_indexes": torch.arange(text),
        "position_ids": torch.arange(3 * (text + video)).reshape(3, -1) % 11,
        "und_len": text,
        "sequence_length": text + video,
        "vision_tokens": [noise(1, 2, 2, 6, 6)],
        "vision_token_shapes": [(2, 3, 3)],
        "vision_sequence_indexes": torch.arange(text, text + video),
        "vision_mse_loss_indexes": torch.arange(text, text + video),
        "vision_timesteps": torch.full((video,), 500.0),
        "vision_noisy_frame_indexes": [torch.arange(2)],
    }


def minimax_h3(batch: int = 2, text: int = 4) -> Batch:
    video, audio = 12, 5
    tags = torch.cat([torch.full((n,), tag) for n, tag in ((text, 1), (audio, 2), (video, 0))])
    return {
        "hidden_states": noise(batch, video, 16),
        "audio_hidden_states": noise(batch, audio, 6),
        "encoder_hidden_states": noise(batch, text, 16),
        "timestep": torch.tensor([0.3, 0.7]),
        "timestep_indices": (tags == 2).long(),
        "token_tags": tags,
        "position_ids": _ids(len(tags), 3),
        "text_indices": torch.arange(text),
        "audio_indices": torch.arange(text, text + audio),
        "video_indices": torch.arange(text + audio, len(tags)),
    }


_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
_FLUX = _HEADS | {"in_channels": 4, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)}
_FLUX |= {"num_layers": 2, "num_single_layers": 2, "pooled_projection_dim": 32, "guidance_embeds": True}
_FLUX2 = {name: size for name, size in _FLUX.items() if name not in ("axes_dims_rope", "pooled_projection_dim")}
_FLUX2 |= {"axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 16}
_WAN = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16}
_WAN |= {"freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32, "patch_size": (1, 2, 2)}
_LTX = _HEADS | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "num_layers": 2}
_LTX |= {"caption_channels": 16}
_LTX2 = _LTX | {"audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2}
_LTX2 |= {"audio_attention_head_dim": 8, "audio_cross_attention_dim": 16}
_LTX23 = _LTX2 | {"rope_type": "split", "gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True}
_LTX23 |= {"audio_cross_attn_mod": True, "perturbed_attn": True}
_HELIOS = {name: size for name, size in _WAN.items() if name != "rope_max_seq_len"} | {"rope_dim": (4, 4, 4)}
_QWEN = _HEADS | {"in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 16}
_QWEN |= {"axes_dims_rope": (4, 6, 6)}
_COSMOS = {"head_dim": 16, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 50}
_COSMOS |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "latent_channel": 2, "patch_latent_dim": 8}
_COSMOS |= {"rope_axes_dim": (4, 2, 2)}
_MINIMAX = _HEADS | {"hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1, "ffn_dim": 32, "in_channels": 4}
_MINIMAX |= {"audio_in_channels": 6, "text_dim": 16, "freq_dim": 16, "time_embed_hidden_dim": 16, "time_embed_dim": 8}
_MINIMAX |= {"rope_freq_dim": 2}

WAN, QWEN, LTX2 = "WanTransformer3DModel", "QwenImageTransformer2DModel", "LTX2VideoTransformer3DModel"
HELIOS = "HeliosTransformer3DModel"
FAMILIES = {
    "flux": Family("FluxTransformer2DModel", _FLUX, flux),
    "flux2": Family("Flux2Transformer2DModel", _FLUX2, flux2),
    "wan": Family(WAN, _WAN, wan),
    "wan, steps of tokens": Family(WAN, _WAN, wan_of_steps),
    "wan, of images": Family(WAN, _WAN | {"image_dim": 16, "added_kv_proj_dim": 24}, wan_of_images),
    "qwen_image": Family(QWEN, _QWEN, qwen_image),
    "ltx": Family("LTXVideoTransformer3DModel", _LTX, ltx),
    "ltx, steps of tokens": Family("LTXVideoTransformer3DModel", _LTX, ltx_of_steps),
    "ltx2": Family(LTX2, _LTX2, ltx2),
    "ltx2.3": Family(LTX2, _LTX23, ltx2),
    "helios": Family(HELIOS, _HELIOS, helios),
    "helios, amplified": Family(HELIOS, _HELIOS | {"is_amplify_history": True}, helios),
    "cosmos3": Family("Cosmos3OmniTransformer", _COSMOS, cosmos3),
    "minimax_h3": Family("MiniMaxH3Transformer3DModel", _MINIMAX, minimax_h3),
    "chronoedit": Family("ChronoEditTransformer3DModel", _WAN, wan),
}


def tiny(family: str) -> Any:
    """The same model for every call."""
    import diffusers

    name, sizes, _ = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(diffusers, name)(**sizes).float()
        for weight in model.parameters():  # some begin as zeros, and would hide what is wrong
            if weight.ndim < 2 or not weight.any():
                weight.data += 0.1 * torch.randn_like(weight)
    return model


def batch_of(family: str) -> Batch:
    """The same batch for every call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return FAMILIES[family].batch()


def outputs(model: Any, batch: Batch) -> list[torch.Tensor]:
    """All that a model gives back."""
    found: list[torch.Tensor] = []
    for out in model(**batch, return_dict=False):
        found += out if isinstance(out, list) else [] if out is None else [out]
    return found


def loss_of(outs: list[torch.Tensor]) -> torch.Tensor:
    """A loss in which every element of every output has a weight of its own."""
    losses = []
    for out in outs:
        target = torch.cos(torch.arange(out.numel(), device=out.device) ** 1.5).reshape(out.shape)
        losses.append((out - target).square().mean())
    return torch.stack(losses).sum()


Found = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


def grads_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def alone(family: str, *batches: Batch) -> Found:
    """Outputs and gradients of one process, of several batches before one backward pass."""
    return _alone(family, batches) if batches else _alone_of_its_batch(family)


@cache
def _alone_of_its_batch(family: str) -> Found:
    return _alone(family, (batch_of(family),))


def _alone(family: str, batches: tuple[Batch, ...]) -> Found:
    model = tiny(family)
    outs = [out for batch in batches for out in outputs(model, batch)]
    loss_of(outs).backward()
    return [out.detach() for out in outs], grads_of(model)


def check(found: list[Found], expected: Found) -> None:
    outs, grads = expected
    for mine, theirs in found:
        for x, y in zip(mine, outs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        assert theirs.keys() == grads.keys()
    for name, grad in grads.items():
        total = sum(theirs[name] for _, theirs in found)
        bound = 1e-4 * float(grad.abs().max()) + 1e-7
        torch.testing.assert_close(total, grad, rtol=1e-3, atol=bound, msg=lambda said, n=name: f"{n}: {said}")
