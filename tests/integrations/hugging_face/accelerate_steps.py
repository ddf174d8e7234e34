"""Steps for `test_accelerate`, as `compare_step` takes them: a loop of one's own, Trainer's and SFTTrainer's,
unchanged, with accelerate's context parallelism switched to this package. In one process they are the same without it.

accelerate shards a model by FSDP2 on accelerators alone. `over_gloo` has it take processes on the CPU for such.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from cp_fast.integrations.accelerate import use
from tests.integrations.hugging_face.compressed_model import with_compressed_keys
from tests.integrations.hugging_face.trainer_losses import padded, rows_of
from tests.integrations.hugging_face.trl_losses import TOKENIZER

QUIET: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "bf16": False}
QUIET |= {"gradient_checkpointing": False}
FSDP: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}}


def over_gloo() -> None:
    """Have accelerate take this process for one of several with accelerators."""
    kind: Any = PartialState
    kind._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    AcceleratorState._reset_state(True)


def tiny(**sizes: Any) -> Any:
    """A Llama with two layers."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**given, num_attention_heads=4, num_key_value_heads=2, **sizes))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model


def accelerator_of(cp: Any) -> Any:
    """accelerate's, with FSDP2 and all ranks of a context, switched."""
    over_gloo()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=cp.size), fsdp_plugin=plugin)
    use(accelerator, layout=cp.layout, cp_comm_type=cp.cp_comm_type)
    return accelerator


def batches() -> list[dict[str, torch.Tensor]]:
    """Two batches of rows with padding, of 18 and 23 tokens."""
    rows = rows_of(5)
    return [padded(rows[:3]), padded(rows[3:])]


def hand_written(cp: Any, made: Callable[[], Any] = tiny) -> tuple[Any, Any, Any]:
    """A loop that accumulates two batches, each with the mean of its own loss."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if cp is None:

        def alone(given: list[dict[str, torch.Tensor]]) -> torch.Tensor:
            losses = [model(**batch).loss / 2 for batch in given]
            sum(losses).backward()  # type: ignore[union-attr]
            return torch.stack(losses).sum()

        return model, alone, optimizer
    accelerator = accelerator_of(cp)
    model, prepared = accelerator.prepare(model, optimizer)

    def step(given: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        total = torch.zeros(())
        for batch in given:
            buffers = list(batch.values())
            with accelerator.maybe_context_parallel(
                buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
            ):
                loss = model(**batch).loss / 2
                accelerator.backward(loss)
            total += loss.detach()
        return total / cp.size

    return model, step, prepared.optimizer


def compressed_keys(cp: Any) -> tuple[Any, Any, Any]:
    """The same with a DeepSeek-V4."""
    return hand_written(cp, with_compressed_keys)


def of_trainer(kind: Any, config: Any, cp: Any, more: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Trainer's own preparation, count of labels and training step, unchanged. Several contexts share a step's batches
    out.
    """
    how: dict[str, Any] = {"use_cpu": True}
    contexts = rank = 0
    if cp is not None:
        over_gloo()
        contexts, rank = dist.get_world_size() // cp.size, dist.get_rank() // cp.size
        how = FSDP | {"parallelism_config": ParallelismConfig(cp_size=cp.size, dp_shard_size=contexts)}
    args = config(tempfile.mkdtemp(), **QUIET, **how)
    trainer: Any = kind(tiny(), args, train_dataset=Dataset.from_list(rows_of(4)), **more)
    if cp is not None:
        use(trainer.accelerator, layout=cp.layout, cp_comm_type=cp.cp_comm_type)
    optimizer: Any = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.optimizer, trainer.create_optimizer = optimizer, lambda *_: optimizer
    model, _ = trainer._prepare_for_training(4, trainer.get_train_dataloader(), None)

    def step(given: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        mine = given[rank :: contexts or 1]
        trainer.current_gradient_accumulation_steps = len(mine)
        inputs, count = trainer.get_batch_samples(iter(mine), len(mine), trainer.args.device)
        losses = [trainer.training_step(model, batch, count) for batch in inputs]
        return torch.stack(losses).sum() / dist.get_world_size()

    return model, step, trainer.optimizer.optimizer


def by_trainer(cp: Any) -> tuple[Any, Any, Any]:
    """transformers' Trainer."""
    return of_trainer(Trainer, TrainingArguments, cp, {})


def by_sft_trainer(cp: Any) -> tuple[Any, Any, Any]:
    """TRL's."""
    return of_trainer(SFTTrainer, SFTConfig, cp, {"processing_class": TOKENIZER})
