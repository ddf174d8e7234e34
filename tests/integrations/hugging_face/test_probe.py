"""What `prepare` sees of a model by its runs: ids that it leaves out, masks that it builds, rows, and far positions."""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import cp_fast
from benchmarks.parts.tiny_models import tiny_model
from cp_fast.integrations import transformers as ours
from cp_ref import SimGroup
from tests.integrations.hugging_face.families import tiny

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

pytestmark = pytest.mark.extras

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}


def over_two(model: Any, batch: dict[str, torch.Tensor], layout: Any = "dual_chunk", **more: Any) -> torch.Tensor:
    """The logits of whole rows, from two ranks."""

    def one(member: Any) -> torch.Tensor:
        cp = cp_fast.ContextParallel(member, layout=layout)
        mine = ours.prepare(copy.deepcopy(model), cp)
        part = ours.shard_batch(batch, cp=cp, model=mine)
        with torch.no_grad():
            return part["cp_batch"].unshard(mine(**part, **more).logits)

    return SimGroup(2).run(one)[0]


def alone(model: Any, batch: dict[str, torch.Tensor], **more: Any) -> torch.Tensor:
    """The same in one process, by the model's own masks."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(**batch, **more).logits


def refused(model: Any) -> str:
    """What `prepare` says."""
    with pytest.raises(NotImplementedError) as caught:
        ours.prepare(model, cp_fast.ContextParallel(SimGroup(1).run(lambda member: member)[0]))
    return str(caught.value)


NUMBERED = {"RobertaForMaskedLM": 0, "EsmForMaskedLM": 3, "CamembertForTokenClassification": 1}


@pytest.mark.parametrize("layout", ["dual_chunk", pytest.param("balanced", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", [*NUMBERED, "BertForMaskedLM", "LlamaForCausalLM"])
def test_a_token_with_the_id_of_padding(name: str, layout: Any) -> None:
    """The mask says token; some models leave its id out when they number positions."""
    padding = NUMBERED.get(name, 0)
    more = {"position_embedding_type": "absolute", "token_dropout": False} if name == "EsmForMaskedLM" else {}
    model = tiny(name, pad_token_id=padding, **more).double()
    ids = torch.randint(5, 50, (2, 16), generator=torch.Generator().manual_seed(1))
    ids[0, [4, 5, 9]] = padding
    mask = (torch.arange(16) < torch.tensor([[16], [11]])).long()
    batch = {"input_ids": ids.masked_fill(mask == 0, padding), "attention_mask": mask}
    there = mask.bool()
    torch.testing.assert_close(over_two(model, batch, layout)[there], alone(model, batch)[there])


def test_positions_of_a_packed_batch_are_those_that_it_says() -> None:
    model = tiny("RobertaForMaskedLM").double()
    ids = torch.randint(5, 50, (1, 16), generator=torch.Generator().manual_seed(1))
    ids[0, [4, 9]] = 0
    rows = {"input_ids": ids, "position_ids": 1 + torch.arange(16)[None]}
    torch.testing.assert_close(over_two(model, rows), alone(model, rows))


def both_sides(model: Any) -> Any:
    """A decoder that sees later tokens too, as users make an encoder of one."""
    model.config.is_causal = False
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    return model


SEES = {
    "MistralForCausalLM": {"sliding_window": 5},
    "Gemma3ForCausalLM": WINDOWS,
    "GptOssForCausalLM": WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmo3ForCausalLM": WINDOWS,
    "LlamaForCausalLM": {},
}


@pytest.mark.parametrize("name", SEES)
def test_windows_of_two_sides_are_those_of_the_masks_that_models_build(name: str) -> None:
    """|i - j| <= sliding_window, where FlashAttention in transformers takes one less. 5 and 6 differ in 24 tokens."""
    model = both_sides(tiny(name, **SEES[name]))
    batch = {"input_ids": torch.randint(3, 50, (1, 24), generator=torch.Generator().manual_seed(1))}
    expected = alone(model, batch)
    torch.testing.assert_close(over_two(model, batch), expected, rtol=1e-4, atol=1e-5)
    if "sliding_window" in SEES[name]:
        changed = ours.prepare(copy.deepcopy(model), cp_fast.ContextParallel(SimGroup(1).run(lambda one: one)[0]))
        changed.config.sliding_window = 4
        for layer in changed.model.layers:
            if getattr(layer.self_attn, "sliding_window", None) is not None:
                layer.self_attn.sliding_window = 4
        part = ours.shard_batch(batch, cp=cp_fast.ContextParallel(SimGroup(1).run(lambda one: one)[0]))
        with pytest.raises(ValueError, match=r"called with a window of 4; when it was prepared it was 5: call prepare"):
            changed(**part)


def test_attention_with_alibi_is_causal() -> None:
    model = tiny("BloomForCausalLM")
    model.config.is_causal = False
    assert "BloomAttention says is_causal=True, and its model builds a mask of both sides" in refused(model)


@pytest.mark.parametrize("name", ["GemmaForCausalLM", "Gemma2ForCausalLM", "MistralForCausalLM"])
def test_a_layer_and_a_mask_that_say_different_things(name: str) -> None:
    """Gemma's layers see both sides by use_bidirectional_attention, and its model builds a causal mask."""
    gemma = name != "MistralForCausalLM"
    model = tiny(name, **({"use_bidirectional_attention": True} if gemma else {}))
    if not gemma:
        both_sides(model)
        del model.config.is_causal
    said = refused(model)
    for words in (
        "Attention says is_causal=False",
        "its model builds a mask that is causal",
        "transformers' own paths differ",
        "set model.config.is_causal to False too",
    ):
        assert words in said
    model.config.is_causal = False
    batch = {"input_ids": torch.randint(3, 50, (1, 12), generator=torch.Generator().manual_seed(1))}
    torch.testing.assert_close(over_two(model, batch), alone(model, batch), rtol=1e-4, atol=1e-5)


def test_a_mask_that_reaches_the_wrong_layer() -> None:
    """One that is changed on its way, and a window that its layer does not have."""
    model = tiny("LlamaForCausalLM")
    theirs = model.model.layers[1].self_attn.forward

    def changed(*given: Any, attention_mask: Any = None, **named: Any) -> Any:
        return theirs(*given, attention_mask=None if attention_mask is None else attention_mask / 2, **named)

    model.model.layers[1].self_attn.forward = changed
    assert "the model makes an attention mask [2, 1," in refused(model)
    model = tiny("Gemma3ForCausalLM", **WINDOWS)
    model.model.layers[0].self_attn.sliding_window = 7
    said = refused(model)
    assert "says is_causal=True with a window of 7, and its model builds a mask that is causal, with 4 tokens" in said


def test_a_window_that_a_layer_does_not_name() -> None:
    """The mask has it, which eager attention and SDPA follow; without a mask nobody knows."""
    batch = {"input_ids": torch.randint(3, 50, (1, 24), generator=torch.Generator().manual_seed(1))}
    for more in ({"sliding_window": 5}, {}):
        model = tiny("PhimoeForCausalLM", **more)
        torch.testing.assert_close(over_two(model, batch), alone(model, batch), rtol=1e-4, atol=1e-5)
    model = tiny("LlamaForCausalLM")
    attention, without = model.model.layers[1].self_attn, {"attention_mask": None}
    attention.config = copy.deepcopy(model.config)
    attention.config.sliding_window, attention.config._attn_implementation = 5, "cp_fast"
    theirs = attention.forward
    attention.forward = lambda *given, **named: theirs(*given, **{**named, **without})
    assert "does not pass to its attention, nor has a mask" in refused(model)


class Counted(torch.nn.Module):
    """Queries that are scaled from token 1,024 on, by a token's number in the slice."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.inner(x) * torch.log1p(places // 1024 + 1.0)[:, None]


def test_scales_of_far_positions() -> None:
    model = tiny("LlamaForCausalLM")
    model.model.layers[1].self_attn.q_proj = Counted(model.model.layers[1].self_attn.q_proj)
    said = refused(model)
    assert said.startswith("model.layers.1.self_attn (LlamaAttention) counts a slice's tokens from 0"), said
    batch = {"input_ids": torch.randint(3, 50, (1, 24), generator=torch.Generator().manual_seed(1))}
    scaled = tiny("Ministral3ForCausalLM").double()  # by position_ids
    torch.testing.assert_close(over_two(scaled, batch), alone(scaled, batch), rtol=1e-5, atol=1e-6)


class OfRows(torch.nn.Module):
    """An embedding that adds another vector to each row of a batch."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids) + torch.arange(len(ids), device=ids.device)[:, None, None]


def test_what_acts_by_row() -> None:
    """It is right where a slice's rows are the batch's, and refused where they have tokens of several rows."""
    model = tiny("LlamaForCausalLM").double()
    model.model.embed_tokens = OfRows(model.model.embed_tokens)
    batch = {"input_ids": torch.randint(3, 50, (3, 16), generator=torch.Generator().manual_seed(1))}
    torch.testing.assert_close(over_two(model, batch), alone(model, batch), rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match=r"model.embed_tokens \(OfRows\) does another thing in each row"):
        over_two(model, batch, "balanced")
    model = tiny("LlamaForCausalLM")
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, torch.nn.Dropout2d(0.1))
    assert "(Dropout2d of Sequential) drops whole rows in training, with probability 0.1" in refused(model)


def test_an_adapter_for_each_row() -> None:
    peft = pytest.importorskip("peft", reason="needs peft: pip install '.[test-integrations]'")
    how = {"r": 4, "init_lora_weights": False, "target_modules": ["q_proj", "v_proj"]}
    model = peft.get_peft_model(tiny("LlamaForCausalLM"), peft.LoraConfig(**how))
    model.add_adapter("other", peft.LoraConfig(**how))
    model = model.double().eval()
    batch = {"input_ids": torch.randint(3, 50, (3, 24), generator=torch.Generator().manual_seed(1))}
    names = ["default", "other", "__base__"]
    expected = model(**batch, adapter_names=names).logits.detach()
    torch.testing.assert_close(over_two(model, batch, adapter_names=names), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(
        NotImplementedError, match=r"adapter_names gives .*q_proj an adapter for each row; .* 'balanced'"
    ):
        over_two(model, batch, "balanced", adapter_names=names)
    same = ["other"] * 3
    expected = model(**batch, adapter_names=same).logits.detach()
    torch.testing.assert_close(over_two(model, batch, "balanced", adapter_names=same), expected, rtol=1e-5, atol=1e-6)


def test_a_mask_of_ones_that_a_model_makes_is_none() -> None:
    model = tiny("BioGptForCausalLM").double()
    ids = torch.randint(3, 50, (2, 16), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": (torch.arange(16) < torch.tensor([[16], [11]])).long()}
    there = batch["attention_mask"].bool()
    torch.testing.assert_close(over_two(model, batch)[there], alone(model, batch)[there])


SAID = {
    "LayoutLMForMaskedLM": "of its own, which comes to LayoutLMSelfAttention",
    "xLSTMForCausalLM": "xLSTMForCausalLM never calls its attention by transformers' AttentionInterface",
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_said_of_a_model_is_true(name: str) -> None:
    assert SAID[name] in refused(tiny(name))


def test_the_text_model_in_one_of_images_is_named() -> None:
    assert "prepare(model.text_decoder, cp)" in refused(tiny_model("BlipForConditionalGeneration"))
    text = {"model_type": "gemma", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "image_size": 28}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 4, "patch_size": 14}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=32)
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    for one in (model, model.model.language_model):
        assert "says is_causal=False, and its model builds a mask that is causal" in refused(one)


def test_a_weight_of_size_zero_is_there() -> None:
    model = tiny("LlamaForCausalLM")
    model.model.layers[0].mlp.none = torch.nn.Linear(0, 4)
    cp = cp_fast.ContextParallel(SimGroup(1).run(lambda member: member)[0])
    assert ours.prepare(model, cp) is model
    model.model.layers[0].mlp.up_proj.weight.data = torch.empty(0)
    with pytest.raises(ValueError, match=r"up_proj.weight has no values yet"):
        ours.prepare(model, cp)
