"""Whole models, batches and ways to train them, as tables: what `benchmarks.whole_models` plays.

Models are small and have random weights. The embedding of a token and the weights of the
routers share directions. So the token alone chooses the experts, with a margin that no rounding removes, and all
experts are compared.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = [
    "BATCHES",
    "CORE",
    "GPTS",
    "GPT_WAYS",
    "MODELS",
    "WAYS",
    "Case",
    "alone",
    "batch_of",
    "cases",
    "compile_blocks",
    "gpt_of",
    "lengths_of",
    "model_of",
]

VOCABULARY, EXPERTS = 512, 4

SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 768, "head_dim": 64}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
ON_CPU = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
ROUTED: dict[str, Any] = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
ROUTED |= {"moe_intermediate_size": 256, "norm_topk_prob": True}
LATENT: dict[str, Any] = {"num_key_value_heads": 8, "kv_lora_rank": 128, "q_lora_rank": 128, "qk_rope_head_dim": 64}
LATENT |= {"qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": EXPERTS, "n_shared_experts": 1}
LATENT |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT_ON_CPU = {"num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8}
LATENT_ON_CPU |= {"qk_nope_head_dim": 16, "v_head_dim": 16}
WINDOWS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 200}
WINDOW_ON_CPU = {"sliding_window": 7}
GATED: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4}
GATED |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64}
GATED |= {"linear_value_head_dim": 64, "shared_expert_intermediate_size": 256}
GATED_ON_CPU = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "shared_expert_intermediate_size": 32}


@dataclass(frozen=True)
class Family:
    """A class of transformers, its sizes in addition to `SIZES`, and those on a CPU."""

    kind: str
    sizes: dict[str, Any]
    on_cpu: dict[str, Any]


MODELS: dict[str, Family] = {  # the most used first
    "Llama": Family("LlamaForCausalLM", {}, {}),
    "gpt-oss": Family("GptOssForCausalLM", WINDOWS | ROUTED, WINDOW_ON_CPU),
    "DeepSeek-V3": Family("DeepseekV3ForCausalLM", ROUTED | LATENT, LATENT_ON_CPU),
    "Gemma 3": Family("Gemma3ForCausalLM", WINDOWS | {"query_pre_attn_scalar": 64}, WINDOW_ON_CPU),
    "Qwen3-MoE": Family("Qwen3MoeForCausalLM", ROUTED, {}),
    "Qwen3": Family("Qwen3ForCausalLM", {}, {}),
    "Gemma 2": Family(
        "Gemma2ForCausalLM",
        WINDOWS | {"query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0},
        WINDOW_ON_CPU,
    ),
    "Qwen3-Next": Family("Qwen3NextForCausalLM", ROUTED | GATED, GATED_ON_CPU),
    "Mistral": Family("MistralForCausalLM", {"sliding_window": 200}, WINDOW_ON_CPU),
}
GPTS: dict[str, dict[str, Any]] = {  # the arguments of attention that a hand-written GPT gives
    "ALiBi, softcap, dropout": {"alibi": True, "softcap": 5.0, "dropout_p": 0.1},
    "ALiBi": {"alibi": True},
    "dropout": {"dropout_p": 0.1},
    "softcap": {"softcap": 5.0},
}
BATCHES: dict[str, tuple[str, str]] = {  # schedule and layout
    "packed": ("p2p", "balanced"),
    "one": ("p2p", "dual_chunk"),
    "padded": ("a2a", "dual_chunk"),
}
CORE = ("checkpointed", "plain", "save_attention", "offload", "FSDP2")  # what the most important runs have
WAYS = (*CORE, "FSDP2, offload", "compiled", "compiled, checkpointed")
GPT_WAYS = (*WAYS, "compiled whole, save_attention")


@dataclass(frozen=True)
class Case:
    """One training step. model: of MODELS, or "GPT: " and one of GPTS, where plan says whether attention has one."""

    model: str
    batch: str
    way: str
    plan: bool = False

    def __str__(self) -> str:
        planned = f", {'a' if self.plan else 'no'} plan" if self.of_gpt else ""
        return f"{self.model}{planned}, {self.batch}, {self.way}"

    @property
    def of_gpt(self) -> bool:
        return self.model.startswith("GPT: ")


def cases() -> list[list[Case]]:
    """All cases, in parts that have the same kernels and references: the most important part first."""
    names = [f"GPT: {name}" for name in GPTS]
    compiled = tuple(way for way in WAYS if way not in CORE)
    parts = [[Case(name, batch, way) for way in CORE] for batch in BATCHES for name in MODELS]
    planned = [
        [Case(name, "packed", way, plan) for plan in (False, True) for way in ways]
        for ways in (CORE, [way for way in GPT_WAYS if way not in CORE])
        for name in names
    ]
    later = [[Case(name, batch, way) for way in compiled] for batch in BATCHES for name in MODELS]
    first = len(MODELS)
    return [*parts[:first], *planned[: len(names)], *parts[first:], *planned[len(names) :], *later]


def lengths_of(batch: str, device: str) -> list[int]:
    """Tokens of the sequences of a batch."""
    lengths = {"packed": [700, 2, 301, 21, 500], "one": [1024], "padded": [700, 301, 1]}[batch]
    return lengths if device == "cuda" else [-(-n // 16) for n in lengths]


def batch_of(batch: str, device: str) -> dict[str, Tensor]:
    """As a data loader gives it: labels are not shifted, and padding is behind."""
    lengths, chance = lengths_of(batch, device), torch.Generator().manual_seed(1)
    if batch == "padded":
        ids = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=chance)
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        ids = ids * mask
        return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    ids = torch.randint(3, VOCABULARY, (1, sum(lengths)), generator=chance)
    labels = ids.clone()
    labels[:, 5 : sum(lengths) // 3] = -100  # a prompt: the ranks have unequal numbers of labels
    if batch == "one":
        return {"input_ids": ids, "labels": labels}
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"input_ids": ids, "labels": labels.masked_fill(positions == 0, -100), "position_ids": positions}


def model_of(name: str, place: str | torch.device, dtype: torch.dtype, **how: Any) -> Any:
    """A model of transformers; the same weights, rounded to bfloat16, on every device and in every dtype.

    how: attn_implementation and others of `from_config`.
    """
    theirs, family = importlib.import_module("transformers"), MODELS[name]
    on_cpu = torch.device(place).type == "cpu"
    kind = getattr(theirs, family.kind)
    config = kind.config_class(**(SIZES | family.sizes | (ON_CPU | family.on_cpu if on_cpu else {})))
    torch.manual_seed(0)
    model = theirs.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **how)
    routers = [w for n, w in model.named_parameters() if w.shape == (EXPERTS, config.hidden_size) and _routes(n)]
    assert bool(routers) == ("num_experts" in family.sizes), f"{name} has {len(routers)} routers"
    draw(model, model.get_input_embeddings().weight, routers)
    return rounded(model, place, dtype)


def rounded(model: Any, place: str | torch.device, dtype: torch.dtype) -> Any:
    """A model on a device, its weights rounded to bfloat16 and then in a dtype; buffers do not change."""
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().to(dtype)
    return model.to(place).train()


def _routes(name: str) -> bool:
    return name.endswith(("gate.weight", "router.weight"))


@torch.no_grad()
def draw(model: nn.Module, embedding: Tensor, routers: list[Tensor]) -> None:
    """Random weights under which attention, sinks, biases and experts all matter, from one generator on the CPU."""
    chance = torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=chance)
        if name.endswith("sinks"):
            weight.copy_(drawn)
        elif weight.dim() == 1 and name.endswith("bias"):
            weight.copy_(0.1 * drawn)
        elif weight.dim() == 2 and weight is not embedding:
            weight.copy_(drawn / math.sqrt(weight.shape[1]))
        elif weight.dim() > 2:  # all experts in one
            weight.copy_(drawn / math.sqrt(max(weight.shape[1:])))
    width = embedding.shape[1]
    directions = torch.linalg.qr(torch.randn(width, EXPERTS, generator=chance))[0].t()
    own = directions[torch.arange(len(embedding)) % EXPERTS]
    embedding.copy_(torch.randn(embedding.shape, generator=chance) + (1.5 * math.sqrt(width) * own if routers else 0.0))
    for weight in routers:  # a token's own expert and the one behind it
        weight.copy_((4.0 * directions + 2.0 * directions.roll(1, 0)) / math.sqrt(width))


def alone(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """One process's loss, on which `backward` was called. Sequences go one by one: some models of transformers let
    packed documents see each other, and eager attention makes NaN of padding.
    """
    rows = [batch]
    if "position_ids" in batch:
        starts = [*(batch["position_ids"][0] == 0).nonzero()[:, 0].tolist(), batch["input_ids"].shape[1]]
        rows = [{n: x[:, a:b] for n, x in batch.items()} for a, b in pairwise(starts)]
    elif (mask := batch.get("attention_mask")) is not None:
        real = {n: x for n, x in batch.items() if n != "attention_mask"}
        rows = [{n: x[i : i + 1, :length] for n, x in real.items()} for i, length in enumerate(mask.sum(dim=1))]
    count = sum((row["labels"][:, 1:] != -100).sum() for row in rows)
    losses = []
    for row in rows:
        logits = model(input_ids=row["input_ids"], use_cache=False).logits[0].float()
        labels = F.pad(row["labels"][0, 1:], (0, 1), value=-100)
        losses.append(F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / count)
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.detach()


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int, heads: tuple[int, int]) -> None:
        super().__init__()
        self.heads = heads
        dim = width // heads[0]
        self.norm, self.qkv = nn.RMSNorm(width), nn.Linear(width, (heads[0] + 2 * heads[1]) * dim, bias=False)
        self.out, self.mlp_norm = nn.Linear(width, width, bias=False), nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor, int], Tensor], layer: int) -> Tensor:
        heads_q, heads_kv = self.heads
        qkv = self.qkv(self.norm(x)).unflatten(-1, (heads_q + 2 * heads_kv, -1))
        q, k, v = qkv.split([heads_q, heads_kv, heads_kv], dim=1)
        x = x + self.out(attend(q, k, v, layer).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Packed ids [t] and positions [t] to logits [t, words]; attend(q, k, v, layer) is the attention of a layer."""

    def __init__(self, width: int, heads: tuple[int, int]) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(2048, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.checkpointing: dict[str, Any] | None = None

    def forward(self, ids: Tensor, positions: Tensor, attend: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> Any:
        x = self.embed(ids) + self.places(positions)
        for layer, block in enumerate(self.blocks):
            if self.checkpointing is None:
                x = block(x, attend, layer)
            else:
                x = checkpoint(block, x, attend, layer, use_reentrant=False, **self.checkpointing)
        return self.head(self.norm(x))


def gpt_of(place: str | torch.device, dtype: torch.dtype) -> GPT:
    """The same weights, rounded to bfloat16, on every device and in every dtype."""
    on_cpu = torch.device(place).type == "cpu"
    model = GPT(*((64, (4, 2)) if on_cpu else (512, (8, 2))))
    draw(model, model.embed.weight, [])
    torch.nn.init.normal_(model.places.weight, generator=torch.Generator().manual_seed(4))  # positions matter
    return rounded(model, place, dtype)


def compile_blocks(blocks: nn.ModuleList, device: str) -> None:
    """torch.compile of each layer."""
    for block in blocks:
        block.compile(backend="inductor" if device == "cuda" else "aot_eager")
