"""A program for `test_trainer`: Trainer's losses, norms of gradients and counts of tokens under several arguments, over
all processes or, with --alone, without context parallelism. One line of JSON.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from datasets import Dataset, IterableDataset
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

import cp_fast as cp
from cp_fast.integrations.trainer import ContextParallelMixin
from tests.integrations.hugging_face.compressed_model import with_compressed_keys
from tests.integrations.hugging_face.image_families import images_batch, tiny_images


class CpTrainer(ContextParallelMixin, Trainer):
    """Trainer, whose batches are cut."""


class WithoutCount(Trainer):
    """Trainer of a user whose method hands no count of tokens on: a batch's loss is its own mean."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs)


class OwnLoss(Trainer):
    """Trainer of a user with a loss of his own, as the error of the mixin describes it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels, shifted = inputs.pop("labels"), inputs.pop("shift_labels", None)
        shifted = F.pad(labels[:, 1:], (0, 1), value=-100) if shifted is None else shifted
        out = model(**inputs)
        total = F.cross_entropy(out.logits.flatten(0, 1), shifted.flatten(), reduction="sum")
        loss = total * self.accelerator.num_processes / num_items_in_batch
        return (loss, out) if return_outputs else loss


def rows_of(count: int) -> list[dict[str, Any]]:
    """Rows of 8 to 23 tokens."""
    lengths = [8 + 5 * i % 16 for i in range(count)]
    return [
        {"input_ids": ids, "labels": ids}
        for ids in ([(i * 7 + j * 3) % 47 + 1 for j in range(n)] for i, n in enumerate(lengths))
    ]


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch with padding behind."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def streamed() -> Any:
    """A stream of rows without a length."""
    yield from rows_of(40)


def noised(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows of one length with tokens that are drawn anew each time, as a collator for masked language models draws."""
    ids = torch.tensor([row["input_ids"][:8] for row in rows])
    ids = torch.where(torch.rand(ids.shape) < 0.3, torch.randint(1, 48, ids.shape), ids)
    return {"input_ids": ids, "labels": ids}


CASES: dict[str, dict[str, Any]] = {
    "two epochs": {"num_train_epochs": 2},
    "drop_last": {"num_train_epochs": 2, "dataloader_drop_last": True, "per_device_train_batch_size": 4},
    "group_by_length": {"train_sampling_strategy": "group_by_length", "num_train_epochs": 2},
    "workers, accumulated": {"dataloader_num_workers": 1, "gradient_accumulation_steps": 2, "collator": noised},
    "no count": {"base": WithoutCount, "gradient_accumulation_steps": 2, "max_steps": 2},
    "own loss": {"base": OwnLoss, "gradient_accumulation_steps": 2, "max_steps": 2},
    "streamed": {"streamed": True, "max_steps": 5, "accelerator_config": {"dispatch_batches": False}},
    "packed": {"collator": DataCollatorWithFlattening(return_flash_attn_kwargs=True)},
    "packed, balanced": {"collator": DataCollatorWithFlattening(), "layout": "balanced"},
    "padded, balanced": {"layout": "balanced", "gradient_accumulation_steps": 2},
    "smoothed": {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2},
    "smoothed, packed": {"label_smoothing_factor": 0.2, "collator": DataCollatorWithFlattening(), "layout": "balanced"},
    "evaluated first": {"evaluated_first": True, "include_num_input_tokens_seen": "non_padding", "max_steps": 3},
    "model_init": {"model_init": True, "max_steps": 3},
    "experts": {"experts": True, "gradient_accumulation_steps": 2},
    "compressed keys": {"compressed": True, "gradient_accumulation_steps": 2, "max_steps": 2},
    "images": {"images": "LlavaForConditionalGeneration", "remove_unused_columns": False},
    "images, accumulated": {"images": "Qwen2_5_VLForConditionalGeneration", "remove_unused_columns": False}
    | {"gradient_accumulation_steps": 2},
}
# how rows are dealt out, and what is divided by the tokens of all contexts
OF_TWO_CONTEXTS = ("two epochs", "drop_last", "group_by_length", "streamed", "smoothed, packed", "experts")


def with_images(name: str, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of rows with an image each, at another place, which may straddle a cut."""
    lengths = [len(row["input_ids"]) + 12 for row in rows]
    return images_batch(name, [[n % 7] for n in lengths], lengths, seed=sum(lengths))


def tiny_with_images(name: str) -> Any:
    """A model whose loss is a mean over the tokens of all batches of a step, as over ranks, also where Trainer alone
    would take the mean of each batch's mean.
    """
    model = tiny_images(name)
    model.accepts_loss_kwargs = True
    return model


def losses(group: Any, options: dict[str, Any]) -> list[float]:
    """The losses of all steps and more that they log, and the loss of the evaluation of an odd number of rows."""
    options = dict(options)
    evaluated_first = options.pop("evaluated_first", False)
    rows: Any = (
        IterableDataset.from_generator(streamed) if options.pop("streamed", False) else Dataset.from_list(rows_of(9))
    )
    base = options.pop("base", Trainer)
    collator, layout = options.pop("collator", padded), options.pop("layout", "dual_chunk")
    model: Any = {"model_init": tiny} if options.pop("model_init", False) else {"model": tiny()}
    if options.pop("experts", False):
        model = {"model": with_experts()}
    comm: Any = "p2p"
    if options.pop("compressed", False):
        model, comm = {"model": with_compressed_keys()}, "all_gather"
    if (images := options.pop("images", None)) is not None:
        model = {"model": tiny_with_images(images) if group is None else tiny_images(images)}
        collator = partial(with_images, images)
    common: dict[str, Any] = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 3e-3}
    common |= {"include_num_input_tokens_seen": "all", "num_train_epochs": 1}
    quiet: dict[str, Any] = {"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, use_cpu=True, **common | quiet | options)
        given = {"train_dataset": rows, "eval_dataset": Dataset.from_list(rows_of(5)), "data_collator": collator}
        if group is None:
            trainer: Any = base(args=args, **model, **given)
        else:
            kind: Any = type("CpOfUser", (ContextParallelMixin, base), {})
            trainer = kind(args=args, **model, **given, cp=cp.ContextParallel(group, comm, layout=layout))
        # Trainer alone, on several processes, would not train them together after this.
        if evaluated_first and group is not None:
            trainer.evaluate()
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [entry[name] for entry in logged for name in ("loss", "grad_norm", "num_input_tokens_seen")] + [evaluated]


def dropped(group: Any) -> list[list[bool]]:
    """The dropout masks of three steps on this rank."""
    sizes: dict[str, Any] = {"vocab_size": 50, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.5, embd_pdrop=0.0))
    found: list[list[bool]] = []
    model.transformer.h[0].mlp.dropout.register_forward_hook(
        lambda module, _, out: found.append((out == 0).flatten().tolist()) if module.training else None
    )
    rows = Dataset.from_list(rows_of(12))
    with tempfile.TemporaryDirectory() as folder:
        quiet: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
        args = TrainingArguments(folder, use_cpu=True, max_steps=3, per_device_train_batch_size=2, **quiet)
        given = {"train_dataset": rows, "data_collator": noised, "cp": cp.ContextParallel(group)}
        CpTrainer(model, args, **given).train()
    return found


def check_dropout(group: Any) -> None:
    """Ranks of a context drop other elements, and each the same ones in another run; what a collator draws is equal."""
    masks = dropped(group)
    assert len(masks) == 3
    assert masks == dropped(group)
    everyone: list[Any] = [None] * dist.get_world_size(group.get_group())
    dist.all_gather_object(everyone, masks, group=group.get_group())
    same = [sum(a == b for a, b in zip(x, y, strict=True)) / len(x) for x, y in zip(*everyone, strict=True)]
    assert all(0.4 < share < 0.6 for share in same), same


def tiny() -> Any:
    """One layer."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def with_experts() -> Any:
    """Two layers, with a loss of their routers."""
    torch.manual_seed(0)
    routed: dict[str, Any] = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.3}
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **routed, num_attention_heads=4, num_key_value_heads=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--dp", action="store_true", help="two data parallel ranks, and the cases that see them")
    given = parser.parse_args()
    group = None
    if not given.alone:
        dist.init_process_group("gloo")
        mesh = init_device_mesh(
            "cpu", (1 + given.dp, dist.get_world_size() // (1 + given.dp)), mesh_dim_names=("dp", "cp")
        )
        group = mesh["cp"]
    found = {name: losses(group, CASES[name]) for name in (OF_TWO_CONTEXTS if given.dp else CASES)}
    if group is not None:
        check_dropout(group)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("losses", json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
