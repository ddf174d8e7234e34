"""A program for `test_trl`: losses, norms of gradients and metrics of TRL's SFTTrainer and RewardTrainer and of Trainer
with metrics, over all processes or, with --alone, without context parallelism. One line of JSON.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import json
import sys
import tempfile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    CLIPImageProcessor,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import cp_fast as cp
from cp_fast.integrations.trainer import ContextParallelMixin
from tests.integrations.hugging_face.image_families import tiny_images
from tests.integrations.hugging_face.trainer_losses import padded, rows_of


class CpTrainer(ContextParallelMixin, Trainer):
    """Trainer, whose batches are cut."""


class CpSFTTrainer(ContextParallelMixin, SFTTrainer):
    """TRL's trainer for fine-tuning, whose batches are cut."""


class CpRewardTrainer(ContextParallelMixin, RewardTrainer):
    """TRL's trainer for reward models, whose batches are cut."""


SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
WORDS = Tokenizer(models.WordLevel({f"{i}": i for i in range(50)}, unk_token="0"))
WORDS.pre_tokenizer = WhitespaceSplit()
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=WORDS, eos_token="1", pad_token="0")
TOKENIZER.chat_template = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] + ' ' }}{% endif %}{% endfor %}"
)
QUIET: dict[str, Any] = {"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
QUIET |= {"use_cpu": True, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 3e-3}
NO_KERNELS: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False, "num_train_epochs": 1}
ADAPTERS = {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False)}

SFT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # arguments, and the trainer's
    "plain": ({}, {}),
    "packing": ({"packing": True}, {}),
    "padding free": ({"padding_free": True, "max_length": None}, {}),
    "completions": ({"completion_only_loss": True, "gradient_accumulation_steps": 2}, {}),
    "assistant": ({"assistant_only_loss": True}, {}),
    "dft": ({"loss_type": "dft"}, {}),
    "smoothed": ({"label_smoothing_factor": 0.2, "packing": True}, {}),
    "adapters": ({"gradient_accumulation_steps": 2}, ADAPTERS),
}


def fine_tuned(name: str, group: Any) -> list[float]:
    """Losses, norms of gradients and TRL's metrics of all steps, and those of the evaluation."""
    options, more = SFT[name]
    rows: Any = [{"input_ids": row["input_ids"]} for row in rows_of(9)]
    if name == "completions":
        rows = [row | {"completion_mask": [0] * 4 + [1] * (len(row["input_ids"]) - 4)} for row in rows]
    if name == "assistant":
        words = [" ".join(map(str, row["input_ids"])).split(" ", 4) for row in rows]
        said = [(("user", " ".join(first)), ("assistant", last)) for *first, last in words]
        rows = [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in said]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    found = _trained(SFTTrainer, CpSFTTrainer, SFTConfig, model, rows, group, options, more)
    return _numbers(found, ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"))


def with_images(group: Any) -> list[float]:
    """The same of a model of images, by TRL's own collator and a processor of transformers."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    side = {"height": 12, "width": 12}
    pictures: Any = CLIPImageProcessor(size={"shortest_edge": 12}, crop_size=side)
    how: dict[str, Any] = {"patch_size": 4, "vision_feature_select_strategy": "default"}
    processor = LlavaProcessor(pictures, tokenizer, **how, num_additional_image_tokens=1, image_token="<image>")
    noise = np.random.RandomState(0).randint(0, 255, (9, 12, 12, 3), dtype=np.uint8)
    words = [" ".join(map(str, row["input_ids"])) for row in rows_of(9)]
    rows = [
        {"text": f"{text[: 7 * (i % 3)]} <image> {text}", "images": [Image.fromarray(noise[i])]}
        for i, text in enumerate(words)
    ]
    model = tiny_images("LlavaForConditionalGeneration", image_token_id=50)
    model.resize_token_embeddings(51)
    options = {"max_length": None, "remove_unused_columns": False, "gradient_accumulation_steps": 2}
    more = {"processing_class": processor}
    found = _trained(SFTTrainer, CpSFTTrainer, SFTConfig, model, rows, group, options, more)
    return _numbers(found, ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"))


def rewarded(margin: bool, group: Any) -> list[float]:
    """The same of a reward model, whose last batch has one pair."""
    pairs = zip(rows_of(18)[::2], rows_of(18)[1::2], strict=True)
    rows = [{"chosen_ids": a["input_ids"], "rejected_ids": b["input_ids"]} for a, b in pairs]
    if margin:
        rows = [row | {"margin": float(i % 3)} for i, row in enumerate(rows)]
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES | {"num_labels": 1}
    model = LlamaForSequenceClassification(LlamaConfig(**sizes))
    options = {"max_length": 32, "gradient_accumulation_steps": 2, "center_rewards_coefficient": 0.1}
    found = _trained(RewardTrainer, CpRewardTrainer, RewardConfig, model, rows, group, options, {})
    return _numbers(found, ("loss", "grad_norm", "accuracy", "margin", "num_tokens", "mean_reward"))


def measured(layout: Any, group: Any) -> list[float]:
    """The loss and metrics of an evaluation of an odd number of rows, and the predictions of all tokens."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    rows: Any = Dataset.from_list(rows_of(5))

    def metrics(given: Any) -> dict[str, float]:
        counts = given.label_ids[:, 1:] != -100
        right = (given.predictions[:, :-1] == given.label_ids[:, 1:]) & counts
        return {"accuracy": float(right.sum() / counts.sum()), "rows": len(counts), "tokens": int(counts.sum())}

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, **QUIET)
        how: dict[str, Any] = {"compute_metrics": metrics, "data_collator": padded}
        how["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
        kind: Any = Trainer if group is None else CpTrainer
        cut: dict[str, Any] = {} if group is None else {"cp": cp.ContextParallel(group, layout=layout)}
        evaluated = kind(model, args, **how, **cut).evaluate(rows)
        found = kind(model, args, data_collator=padded, **cut).predict(rows)
    mine = torch.from_numpy(found.predictions)[torch.from_numpy(found.label_ids) != -100]
    return [evaluated[f"eval_{name}"] for name in ("loss", "accuracy", "rows", "tokens")] + mine[
        :, :3
    ].flatten().tolist()


def _trained(
    theirs: Any, ours: Any, config: Any, model: Any, rows: Any, group: Any, options: dict[str, Any], more: Any
) -> list[dict[str, float]]:
    data = Dataset.from_list(rows)
    how = {"train_dataset": data, "eval_dataset": data.select(range(5)), "processing_class": TOKENIZER, **more}
    kind: Any = theirs if group is None else ours
    cut: dict[str, Any] = {} if group is None else {"cp": cp.ContextParallel(group)}
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(model, config(folder, **{"max_length": 32} | QUIET | NO_KERNELS | options), **how, **cut)
        trainer.train()
        evaluated = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}
    return [*(entry for entry in trainer.state.log_history if "loss" in entry), evaluated]


def _numbers(found: list[dict[str, float]], names: tuple[str, ...]) -> list[float]:
    return [entry[name] for entry in found for name in names if name in entry]


def main() -> None:
    group = None
    if "--alone" not in sys.argv:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    found = {name: fine_tuned(name, group) for name in SFT}
    found["images"] = with_images(group)
    found |= {f"rewards, margin {margin}": rewarded(margin, group) for margin in (False, True)}
    found |= {f"metrics, {layout}": measured(layout, group) for layout in ("dual_chunk", "balanced")}
    if group is None or dist.get_rank() == 0:
        print("losses", json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
