"""Whole pipelines of diffusers with tiny components: what each rank denoises and decodes is what one process does."""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.integrations import diffusers as ours
from cp_ref import SimGroup
from tests.integrations.diffusion.families import tiny

diffusers = pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[test-integrations]'")

Call = dict[str, Any]
_OF_WAN: dict[str, Any] = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
_OF_WAN |= {"temperal_downsample": [False, True, True], "latents_mean": [0.1] * 4, "latents_std": [1.5] * 4}
_OF_FLUX: dict[str, Any] = {"latent_channels": 1, "block_out_channels": (4,), "norm_num_groups": 1}
_OF_FLUX |= {"use_quant_conv": False, "use_post_quant_conv": False, "shift_factor": 0.1, "scaling_factor": 1.5}
_OF_LTX: dict[str, Any] = {"latent_channels": 4, "block_out_channels": (8,) * 4, "layers_per_block": (1,) * 5}
_OF_LTX |= {"decoder_block_out_channels": (8,) * 4, "decoder_layers_per_block": (1,) * 5}
_WORDS = ("tokenizer", "text_encoder")


def _text(tokens: int, width: int) -> torch.Tensor:
    return torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(2))


def _flow(**how: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**how)


def wan(**more: Any) -> tuple[Any, Call]:
    """With guidance in two calls of a step, and a scheduler that remembers steps."""
    scheduler = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    parts = {**dict.fromkeys(_WORDS), "vae": diffusers.AutoencoderKLWan(**_OF_WAN), "scheduler": scheduler}
    texts = {"prompt_embeds": _text(7, 16), "negative_prompt_embeds": _text(7, 16).flip(1)}
    sizes = {"height": 48, "width": 80, "num_frames": 9}
    return diffusers.WanPipeline(**parts, transformer=tiny("wan"), **more), texts | sizes


def wan_of_two() -> tuple[Any, Call]:
    """Wan 2.2: one transformer for much noise, and one for little."""
    other = tiny("wan")
    for weight in other.parameters():
        weight.data *= 0.9
    return wan(transformer_2=other, boundary_ratio=0.7)


def wan_of_image() -> tuple[Any, Call]:
    """A video from an image, whose latents and a mask are further channels."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        transformer = diffusers.WanTransformer3DModel.from_config({**tiny("wan").config, "in_channels": 12})
    parts = {**dict.fromkeys(_WORDS), "vae": diffusers.AutoencoderKLWan(**_OF_WAN), "scheduler": _flow()}
    given = wan()[1] | {"image": torch.rand(1, 3, 48, 80, generator=torch.Generator().manual_seed(5))}
    return diffusers.WanImageToVideoPipeline(**parts, transformer=transformer), given


def flux() -> tuple[Any, Call]:
    parts = dict.fromkeys((*_WORDS, "tokenizer_2", "text_encoder_2"))
    parts |= {"vae": diffusers.AutoencoderKL(**_OF_FLUX), "scheduler": _flow(use_dynamic_shifting=True)}
    given = {"prompt_embeds": _text(5, 32), "pooled_prompt_embeds": _text(1, 32)[:, 0], "height": 6, "width": 10}
    return diffusers.FluxPipeline(**parts, transformer=tiny("flux")), given


def qwen_image() -> tuple[Any, Call]:
    """With guidance by another text, of another length: two kinds of calls."""
    parts = dict.fromkeys(_WORDS)
    parts |= {"vae": diffusers.AutoencoderKLQwenImage(**_OF_WAN), "scheduler": _flow(use_dynamic_shifting=True)}
    given: Call = {"height": 48, "width": 80, "true_cfg_scale": 3.0}
    for name, tokens in (("prompt", 7), ("negative_prompt", 4)):
        given |= {f"{name}_embeds": _text(tokens, 16), f"{name}_embeds_mask": torch.ones(1, tokens, dtype=torch.long)}
    return diffusers.QwenImagePipeline(**parts, transformer=tiny("qwen_image")), given


def ltx() -> tuple[Any, Call]:
    """With padded texts, and guidance as a batch of two."""
    parts = {**dict.fromkeys(_WORDS), "vae": diffusers.AutoencoderKLLTXVideo(**_OF_LTX)}
    given: Call = {"height": 96, "width": 160, "num_frames": 17, "frame_rate": 8}
    for name, seen in (("prompt", 6), ("negative_prompt", 3)):
        mask = (torch.arange(6) < seen).long()[None]
        given |= {f"{name}_embeds": _text(6, 16), f"{name}_attention_mask": mask}
    scheduler = _flow(use_dynamic_shifting=True)
    return diffusers.LTXPipeline(**parts, scheduler=scheduler, transformer=tiny("ltx")), given


PIPELINES = (wan, wan_of_two, wan_of_image, flux, qwen_image, ltx)


def denoised(pipeline: Any, given: Call, kind: str) -> torch.Tensor:
    """Its latents, or its images or frames."""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return pipeline(**given, num_inference_steps=3, generator=generator, output_type=kind, return_dict=False)[0]


@pytest.mark.parametrize(("ranks", "kind"), [(2, "latent"), pytest.param(3, "pt", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("make", PIPELINES, ids=lambda make: make.__name__)
def test_a_pipeline_is_the_same_over_ranks(make: Callable[[], tuple[Any, Call]], ranks: int, kind: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        pipeline, given = make()

    def one(member: Any) -> torch.Tensor:
        mine = copy.deepcopy(pipeline)
        for name in ("transformer", "transformer_2"):
            if (model := getattr(mine, name, None)) is not None:
                ours.use(model, cp_fast.ContextParallel(member))
        return denoised(mine, given, kind)

    expected = denoised(pipeline, given, kind)
    assert bool(expected.isfinite().all())
    assert float(expected.std()) > (0.1 if kind == "latent" else 0)
    for found in SimGroup(ranks).run(one):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
