"""A program for `test_accelerate`: losses, norms of gradients and metrics of Trainer, SFTTrainer and RewardTrainer,
unchanged, with accelerate's context parallelism switched to this package or, with --alone, without. One line of JSON.

accelerate takes processes on the CPU for such with accelerators (`over_gloo`).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    MistralConfig,
    MistralForCausalLM,
    Trainer,
    TrainingArguments,
)
from trl.data_utils import pack_dataset
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from cp_fast.integrations.accelerate import use
from tests.integrations.hugging_face.accelerate_steps import FSDP, over_gloo, tiny
from tests.integrations.hugging_face.trainer_losses import padded, rows_of
from tests.integrations.hugging_face.trl_losses import SIZES, TOKENIZER

FLAT = {"collator": DataCollatorWithFlattening(return_flash_attn_kwargs=True)}
CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
ADAPTERS = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False)
CASES: dict[str, dict[str, Any]] = {
    "plain": {"num_train_epochs": 2, "eval_strategy": "epoch"},
    "windows": {"model": "Mistral", "layout": "contiguous"},
    "classes of tokens": {"model": "classes"},
    "balanced, accumulated": {"layout": "balanced", "gradient_accumulation_steps": 2},
    "packed": FLAT | {"gradient_accumulation_steps": 2},
    "packed, balanced": {"collator": DataCollatorWithFlattening(), "layout": "balanced"},
    "checkpointed, a2a": CHECKPOINTED | {"cp_comm_type": "a2a"},
    "not averaged": {"average_tokens_across_devices": False},
    "sft": {"sft": True, "gradient_accumulation_steps": 2},
    "sft, padding free": {"sft": True, "padding_free": True, "max_length": None},
    "sft, packed before": {"sft": True, "packed": 24, "padding_free": True, "max_length": None},
    "sft, adapters": {"sft": True, "adapters": True},
    "rewards": {"rewards": True, "max_length": 32},
}


def model_of(kind: str) -> Any:
    """Two layers: a Llama, one with a class for each token, or a Mistral with a window."""
    if kind == "Llama":
        return tiny()
    torch.manual_seed(0)
    if kind == "classes":
        of_tokens: dict[str, Any] = SIZES | {"num_labels": 50, "classifier_dropout": 0.0}
        return LlamaForTokenClassification(LlamaConfig(**of_tokens))
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5))


def metrics(given: Any) -> dict[str, float]:
    """The share of labels that are predicted, and what they are of."""
    counts = given.label_ids[:, 1:] != -100
    right = (given.predictions[:, :-1] == given.label_ids[:, 1:]) & counts
    return {"accuracy": float(right.sum() / counts.sum()), "rows": len(counts), "tokens": int(counts.sum())}


def trained(options: dict[str, Any], alone: bool, dp: int) -> list[float]:
    """What all steps log, and an evaluation of five rows."""
    options = dict(options)
    sft, rewards = (options.pop(name, False) for name in ("sft", "rewards"))
    collator, kind = options.pop("collator", padded), options.pop("model", "Llama")
    how = {name: options.pop(name) for name in ("layout", "cp_comm_type") if name in options}
    peft = ADAPTERS if options.pop("adapters", False) else None
    fixed: dict[str, Any] = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 3e-3}
    fixed |= {"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "num_train_epochs": 1}
    fixed |= {"bf16": False, "gradient_checkpointing": False} if sft or rewards else {}
    if alone:
        fixed["use_cpu"] = True
    else:
        over_gloo()
        of_mesh = ParallelismConfig(cp_size=dist.get_world_size() // dp, dp_shard_size=dp)
        fixed |= FSDP | {"parallelism_config": of_mesh}
    pairs = zip(rows_of(18)[::2], rows_of(18)[1::2], strict=True)
    rows = [{"chosen_ids": a["input_ids"], "rejected_ids": b["input_ids"]} for a, b in pairs]
    data = Dataset.from_list([row | {"margin": 0.5} for row in rows] if rewards else rows_of(9))
    if (length := options.pop("packed", None)) is not None:  # SFTTrainer does not pack for contexts
        data = pack_dataset(data, length, "bfd")
    with tempfile.TemporaryDirectory() as folder:
        config: Any = SFTConfig if sft else RewardConfig if rewards else TrainingArguments
        args: Any = config(folder, **fixed | options)
        given: dict[str, Any] = {"train_dataset": data, "eval_dataset": data.select(range(5))}
        torch.manual_seed(0)
        if sft:
            trainer: Any = SFTTrainer(tiny(), args, processing_class=TOKENIZER, peft_config=peft, **given)
        elif rewards:
            sizes: dict[str, Any] = SIZES | {"num_labels": 1}
            model = LlamaForSequenceClassification(LlamaConfig(**sizes))
            trainer = RewardTrainer(model, args, processing_class=TOKENIZER, **given)
        else:
            given |= {"data_collator": collator, "compute_metrics": metrics if collator is padded else None}
            given["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
            trainer = Trainer(model_of(kind), args, **given)
        if not alone:
            use(trainer.accelerator, **how)
        trainer.train()
        evaluated = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}
    wanted = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "accuracy", "rows", "tokens", "margin")
    # Padding-free rows are filled up, and SFTTrainer counts what they are filled with.
    wanted += () if "padding_free" in options else ("num_tokens",)
    logged = [*(entry for entry in trainer.state.log_history if "loss" in entry), evaluated]
    return [entry[name] for entry in logged for name in wanted if name in entry]


def main() -> None:
    alone, dp = "--alone" in sys.argv, 2 if "--dp" in sys.argv else 1
    if not alone or dp > 1:
        dist.init_process_group("gloo")
    chosen = ("plain", "balanced, accumulated") if dp > 1 else CASES
    found = {name: trained(CASES[name], alone, dp) for name in chosen}
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("losses", json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
