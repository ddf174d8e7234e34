"""A model of Hugging Face, fine-tuned by their Trainer on sequences that are spread over all processes:

    torchrun --nproc-per-node 2 examples/finetune_transformers.py
    torchrun --nproc-per-node 8 examples/finetune_transformers.py --model NAME --tokens 131072

Without `--model` it is a small Llama with random weights, on bytes. `python examples/finetune_transformers.py` is the
same on one process, with transformers' own attention: the losses are the same but for rounding. The lines with a number
are what context parallelism adds. Rows are of Python's own library; needs transformers and accelerate.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, default_data_collator

import cp_fast as cp
from conformance.runner.processes import device_of_group, own_gpu
from cp_fast.integrations.trainer import ContextParallelMixin


class CpTrainer(ContextParallelMixin, Trainer):  # 1
    """Trainer, whose batches are cut."""


def rows_of(tokens: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Rows of one length: the bytes of source files, for models without a tokenizer of their own."""
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:40])
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long() % vocabulary
    return [{"input_ids": row, "labels": row} for row in ids[: len(ids) // tokens * tokens].view(-1, tokens)]


def model_of(name: str | None) -> Any:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=256, **sizes, **heads, use_cache=False)
    return AutoModelForCausalLM.from_config(config)


def build(context: cp.ContextParallel | None) -> tuple[Any, Any, Any]:
    """One step of the Trainer for `python -m conformance step`; without a context it is transformers' own."""
    model = model_of(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how: dict[str, Any] = {"optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))}

    def step(rows: list[dict[str, torch.Tensor]]) -> float:
        with tempfile.TemporaryDirectory() as folder:
            args = arguments(folder, steps=1, batch=2)
            how["train_dataset"], how["data_collator"] = rows, default_data_collator
            trainer: Any = CpTrainer(model, args, **how, cp=context) if context else Trainer(model, args, **how)
            trainer.train()
        return next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)

    return model, step, optimizer


def batch() -> list[dict[str, torch.Tensor]]:
    """Some rows, the same in all processes."""
    return rows_of(64, 256)[:8]


def arguments(folder: str, steps: int, batch: int) -> TrainingArguments:
    """Trainer's arguments, which also make the process group; in bfloat16 on a GPU."""
    on_gpu = device_of_group().type == "cuda" if dist.is_initialized() else torch.cuda.is_available()
    return TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        learning_rate=3e-3,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a model's name or folder; a small one with random weights by default")
    for name, value in {"steps": 20, "tokens": 512, "batch": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and torch.cuda.is_available():
        own = own_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        os.environ["LOCAL_RANK"] = str(own.index)  # whose number Trainer takes for its GPU's
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, given.steps, given.batch)
        model = model_of(given.model)
        rows = rows_of(given.tokens, model.config.vocab_size)
        how: dict[str, Any] = {"train_dataset": rows[8:], "eval_dataset": rows[:8]}
        how["data_collator"] = default_data_collator
        if several:
            trainer: Any = CpTrainer(model, args, **how, cp=cp.ContextParallel(dist.group.WORLD))  # 2
        else:
            trainer = Trainer(model, args, **how)
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if args.process_index == 0:
        print("losses", *(f"{loss:.4f}" for loss in [*losses, evaluated]))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
