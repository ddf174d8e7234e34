"""Hugging Face's Trainer: what it takes for batches to be spread over ranks.

    class CpTrainer(ContextParallelMixin, Trainer): ...

    args = TrainingArguments(...)  # which makes the process group
    trainer = CpTrainer(model, args, train_dataset=rows, cp=ContextParallel(dist.group.WORLD))

The loader stays Trainer's own (samplers, workers, streaming, epochs). accelerate prepares it so that the ranks of a
context get the same batch. Each rank then keeps its part. DDP or FSDP over all processes average gradients, which
Trainer's count of tokens across devices takes into account. Nothing of transformers is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.shared.shared_arguments import refuse
from cp_fast.integrations.transformers import prepare, shard_batch
from cp_ref.common.groups.collectives import all_reduce_sum
from cp_ref.spec import check_context

__all__ = ["ContextParallelMixin"]

_Trainer: Any = object  # whose methods come behind those of the mixin


class ContextParallelMixin(_Trainer):
    """To stand before Trainer among the bases of a class. The model is prepared (`transformers.prepare`).

    Args:
        args: TrainingArguments, by name or as Trainer's second argument.
        cp: the ranks that share a batch, the schedule and the layout. They are consecutive processes. Other such groups
            of ranks get other batches.
        others: Trainer's.

    Raises:
        NotImplementedError: what would be wrong on a slice: compute_metrics, compute_loss_func, label_smoothing_factor,
        neftune_noise_alpha (its noise depends on the length), train_sampling_strategy "batch_rebalance", tensor
        parallelism, DataParallel, accelerate's own context or sequence parallelism; what `prepare` refuses of the
        model. ValueError: ranks that are not consecutive; average_tokens_across_devices is off, without which losses
        are means of means.
    """

    def __init__(self, *given: Any, cp: ContextParallel, **others: Any) -> None:
        check_context(cp, ContextParallel)
        args = others["args"] if "args" in others else given[1]
        _refuse_arguments(args, others)
        super().__init__(*given, **others)
        _refuse_parallelism(self, args)
        self.cp, self._mesh = cp, _mesh(self, cp)
        prepare(self.model, cp)
        if not self.model_accepts_loss_kwargs:
            raise NotImplementedError(f"{type(self.model).__name__} takes no num_items_in_batch for its loss")

    def get_cp_size(self) -> int:
        """How many processes share a batch, for Trainer's count of rows in a step."""
        return self.cp.size

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Trainer's, with the same batches on all ranks of the context."""
        with self._same_batches():
            return super().get_train_dataloader()

    def get_eval_dataloader(self, *given: Any, **named: Any) -> DataLoader[Any]:
        """The same for the evaluation."""
        with self._same_batches():
            return super().get_eval_dataloader(*given, **named)

    def get_test_dataloader(self, *given: Any, **named: Any) -> DataLoader[Any]:
        """The same for a test."""
        with self._same_batches():
            return super().get_test_dataloader(*given, **named)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[dict[str, Any]], torch.Tensor | None]:
        """This rank's parts of the next batches, and the counted tokens of all ranks in them."""
        parts = [self._part(batch) for batch in islice(epoch_iterator, num_batches)]
        return parts, self._count(parts, device)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """The loss of a batch alone, the same on all ranks of the context: logits would be those of a slice."""
        part = self._prepare_inputs(self._part(inputs))
        count = self._count([part], self.args.device)
        if count is None:
            return None, None, None
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, part, num_items_in_batch=count)
        return all_reduce_sum(self.cp.comm, loss.detach()) / self.cp.size, None, None

    def evaluation_loop(self, *given: Any, **named: Any) -> Any:
        """Trainer's, over losses that each context gives once."""
        self.gather_function = self._gather
        return super().evaluation_loop(*given, **named)

    def _part(self, batch: Any) -> dict[str, Any]:
        return shard_batch(dict(batch), cp=self.cp, model=self.model)

    def _count(self, parts: list[dict[str, Any]], device: Any) -> torch.Tensor | None:
        if not parts or "labels" not in parts[0]:
            return None
        mine = torch.stack([(part["labels"] != -100).sum() for part in parts]).sum()
        return self.accelerator.gather(mine.to(device)).sum()

    def _gather(self, losses: torch.Tensor) -> torch.Tensor:
        """Every context's losses once, without the rows that accelerate added to the last batch."""
        state, size = self.accelerator.gradient_state, self.cp.size
        found = self.accelerator.gather(losses)
        found = found.view(-1, size, len(losses))[:, 0].flatten()
        return found[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else found

    @contextlib.contextmanager
    def _same_batches(self) -> Iterator[None]:
        """accelerate prepares loaders by a mesh with the context's ranks in it, and leaves batches on the CPU."""
        accelerator = self.accelerator
        before = accelerator.state.device_mesh, accelerator.device_placement
        accelerator.state.device_mesh, accelerator.device_placement = self._mesh, False
        try:
            yield
        finally:
            accelerator.state.device_mesh, accelerator.device_placement = before


def _refuse_arguments(args: Any, others: dict[str, Any]) -> None:
    where = "ContextParallelMixin"
    refuse(where, label_smoothing_factor=args.label_smoothing_factor, neftune_noise_alpha=args.neftune_noise_alpha)
    refuse(where, **{name: others.get(name) for name in ("compute_metrics", "compute_loss_func")})
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        raise NotImplementedError(
            f"train_sampling_strategy is 'batch_rebalance', by which every process of {where} gets another batch"
        )
    if not args.average_tokens_across_devices:
        raise ValueError("average_tokens_across_devices is False; ranks have different numbers of counted tokens")


def _refuse_parallelism(trainer: Any, args: Any) -> None:
    theirs = trainer.accelerator.parallelism_config
    if theirs is not None and (theirs.cp_size > 1 or theirs.sp_size > 1):
        raise NotImplementedError(
            f"ParallelismConfig has cp_size={theirs.cp_size}, sp_size={theirs.sp_size}, accelerate's own; "
            "leave both at 1 and give ContextParallelMixin cp=ContextParallel(...)"
        )
    refuse("ContextParallelMixin", n_gpu=max(0, args.n_gpu - 1), tp_size=trainer.get_tp_size() - 1)


def _mesh(trainer: Any, cp: ContextParallel) -> Any:
    """A mesh with an axis "cp", by which accelerate counts loaders' shards; None for one process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    ranks, world = cp.comm.all_gather_object(dist.get_rank()), dist.get_world_size()
    if world % cp.size or ranks != list(range(ranks[0], ranks[0] + cp.size)) or ranks[0] % cp.size:
        raise ValueError(
            f"cp is of processes {ranks} of {world}; accelerate gives consecutive processes the same batch: take "
            f'init_device_mesh(..., ({world // cp.size}, {cp.size}), mesh_dim_names=("dp", "cp"))["cp"]'
        )
    axes = ("dp_replicate", "cp")
    return init_device_mesh(trainer.accelerator.device.type, (world // cp.size, cp.size), mesh_dim_names=axes)
