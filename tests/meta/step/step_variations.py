"""Training steps that are right, in the ways in which frameworks write them."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import cp_fast
from cp_fast.integrations.loss import loss_for_backward, token_mean

__all__ = ["Wrapped", "ids_of", "rows_of", "wrapped_step"]

WORDS, HEADS, DIM = 40, 4, 8
WIDTH = HEADS * DIM


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, cp: Any, plan: Any) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, DIM)).unbind(-3)
        x = x + self.out(cp_fast.attention(q, k, v, cp=cp, plan=plan).flatten(-2))
        return x + self.mlp(x)


class Wrapped(nn.Module):
    """[b, s/cp] -> logits; positions are embedded."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.wpe, self.head = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, ids: Tensor, positions: Tensor, cp: Any, plan: Any) -> Tensor:
        x = self.embed(ids) + self.wpe(positions)
        for block in self.blocks:
            x = block(x, cp, plan)
        return self.head(x)


def ids_of() -> Tensor:
    """Four sequences."""
    return torch.randint(0, WORDS, (4, 32), generator=torch.Generator().manual_seed(3))


def wrapped_step(cp: Any, wrapper: str = "", accumulate: int = 1, clip: float = 0.0) -> Any:
    """A step of `Wrapped` under DDP ("ddp"), FSDP2 over all ranks ("fsdp") or over a mesh of two axes ("hsdp"), with
    activation checkpointing ("checkpoint") or torch.compile ("compile"); also of several, with a space between them.
    """
    kinds = wrapper.split()
    torch.manual_seed(0)
    plain = Wrapped()
    world = dist.get_world_size()
    context = cp or cp_fast.ContextParallel(dist.group.WORLD)
    if "checkpoint" in kinds:
        apply_activation_checkpointing(plain, check_fn=lambda module: isinstance(module, Block))
    if "compile" in kinds:
        for block in plain.blocks:
            block.compile(backend="aot_eager")
    mesh = init_device_mesh("cpu", (world // context.size, context.size), mesh_dim_names=("dp", "cp"))
    model: Any = plain
    over: Any = None
    if "fsdp" in kinds or "hsdp" in kinds:
        over = mesh._flatten("dp_cp") if "fsdp" in kinds else mesh
        for block in plain.blocks:
            fully_shard(block, mesh=over)
        model = over = fully_shard(plain, mesh=over)
    elif "ddp" in kinds:
        model = over = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(ids: Tensor) -> Tensor:
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        rank, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
        mine = slice(rank * len(ids) // size, (rank + 1) * len(ids) // size)
        total = torch.zeros(())
        sizes: dict[str, Any] = {"heads_q": HEADS, "heads_kv": HEADS, "d_qk": DIM, "d_v": DIM}
        sizes |= {"dtype": torch.float32, "device": "cpu", "seqlen_q": ids.shape[1]}
        for some_ids, some_labels in zip(ids[mine].chunk(accumulate), labels[mine].chunk(accumulate), strict=True):
            plan = cp_fast.make_plan(cp=context, batch_size=len(some_ids), **sizes)
            local, targets = (cp_fast.shard(x, cp=context, plan=plan) for x in (some_ids, some_labels))
            logits = model(local, plan.position_ids.expand_as(local), context, plan)
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            part = token_mean(losses, targets.flatten() != -100, over=dist.group.WORLD) / accumulate
            (part if over is None else loss_for_backward(part, averaged_over=over)).backward()
            total += part.detach()
        if over is None:
            for weight in model.parameters():
                dist.all_reduce(weight.grad)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        dist.all_reduce(total)
        return total

    return model, step, optimizer


def llama() -> Any:
    """A small Llama of transformers."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads, use_cache=False))


def transformers_batch() -> dict[str, Tensor]:
    """Rows of odd lengths, padded behind."""
    ids = ids_of()[:2, :29]
    mask = (torch.arange(29) < torch.tensor([[29], [17]])).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed_batch() -> dict[str, Tensor]:
    """Documents behind one another, as DataCollatorWithFlattening makes them."""
    positions = torch.cat([torch.arange(n) for n in (11, 3, 18)])[None]
    ids = ids_of()[:1]
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


def transformers_step(cp: Any, accelerated: bool = False) -> Any:
    """A model of transformers in a loop of one's own; with accelerate, whose DDP averages gradients."""
    from cp_fast.integrations import transformers as cp_transformers

    plain = llama()
    if cp is not None:
        plain = cp_transformers.prepare(plain, cp)
    model: Any = plain
    accelerator: Any = None
    if accelerated:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(plain)

    def step(batch: dict[str, Tensor]) -> Tensor:
        given = batch if cp is None else cp_transformers.shard_batch(batch, cp=cp)
        part = model(**given).loss
        if accelerator is not None and cp is not None:
            accelerator.backward(loss_for_backward(part, averaged_over=model))
        else:
            part.backward()
        if cp is not None:
            if accelerator is None:
                for weight in plain.parameters():
                    dist.all_reduce(weight.grad)
            dist.all_reduce(part := part.detach())
        return part

    return plain, step, torch.optim.SGD(plain.parameters(), lr=0.1)


class Rows(Dataset[Any]):
    """Rows of one length for Trainer."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": ids_of()[number], "labels": ids_of()[number]}


def rows_of() -> Rows:
    """The data set of `trainer_step`."""
    return Rows()


def trainer_step(cp: Any) -> Any:
    """transformers' Trainer, whose optimizer steps and clears gradients."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    from cp_fast.integrations.trainer import ContextParallelMixin

    class CpTrainer(ContextParallelMixin, Trainer):
        pass

    folder = tempfile.mkdtemp()
    args = TrainingArguments(
        output_dir=folder,
        max_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=0.5,
    )
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how: dict[str, Any] = {"data_collator": default_data_collator}
    how["optimizers"] = (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))

    def step(rows: Rows) -> float:
        given: dict[str, Any] = how | {"train_dataset": rows}
        trainer: Any = Trainer(model, args, **given) if cp is None else CpTrainer(model, args, **given, cp=cp)
        trainer.train()
        return next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)

    return model, step, optimizer


def megatron_batch() -> dict[str, Tensor]:
    """Activations [s, b, width] and their targets."""
    chance = torch.Generator().manual_seed(1)
    return {name: torch.randn(32, 2, WIDTH, generator=chance) for name in ("x", "y")}


def megatron_step(cp: Any) -> Any:
    """A TransformerLayer of megatron-core, with a loss of squares."""
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from cp_fast.integrations.megatron import use_cp_fast

    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": WIDTH, "num_attention_heads": HEADS}
    config = TransformerConfig(
        **sizes,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        use_cpu_initialization=True,
        context_parallel_size=dist.get_world_size(),
        cp_comm_type="p2p" if cp is None else cp.cp_comm_type,
    )
    torch.manual_seed(0)
    spec: Any = use_cp_fast(get_gpt_layer_local_spec())
    layer = TransformerLayer(config, spec.submodules, layer_number=1)

    def step(batch: dict[str, Tensor]) -> Tensor:
        whole = batch["x"].numel()
        if cp is not None:
            batch = {name: cp_fast.shard(x, cp=cp, qkv_format="sbhd") for name, x in batch.items()}
        loss = (layer(batch["x"], attention_mask=None)[0] - batch["y"]).square().sum() / whole
        loss.backward()
        for weight in layer.parameters():
            assert weight.grad is not None
            dist.all_reduce(weight.grad)
        dist.all_reduce(loss := loss.detach())
        return loss

    return layer, step, torch.optim.AdamW(layer.parameters(), lr=1e-3)
