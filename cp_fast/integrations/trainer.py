"""Hugging Face's Trainer: what it takes for batches to be spread over ranks.

    class CpTrainer(ContextParallelMixin, Trainer): ...

    args = TrainingArguments(...)  # which makes the process group
    trainer = CpTrainer(model, args, train_dataset=rows, cp=ContextParallel(dist.group.WORLD))

The model has `attn_implementation="cp_fast"` (`transformers.register`). Trainer's own loader gives every process other
batches; here all ranks of a context get the same one, and `shard_batch` cuts it. DDP or FSDP over all processes average
gradients, which Trainer's count of tokens across devices takes into account. Nothing of transformers is imported.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from cp_fast.context import ContextParallel
from cp_fast.integrations.planned import refuse
from cp_fast.integrations.token_batches import shard_batch
from cp_ref.spec import check_context

__all__ = ["ContextParallelMixin"]


class ContextParallelMixin:
    """To stand before Trainer among the bases of a class.

    Args:
        args: TrainingArguments, by name or as Trainer's second argument.
        cp: the ranks that share a batch, the schedule and the layout.
        data_parallel: (which, of how many) such groups of ranks this is; each gets other batches.
        others: Trainer's. Its data collator makes what `shard_batch` takes, on the CPU.

    Raises:
        NotImplementedError: what would be wrong on a slice, compute_metrics and label_smoothing_factor; loaders with
        processes of their own, dataloader_num_workers, which the ranks could not agree in. ValueError:
        average_tokens_across_devices is off, without which losses are means of means.
    """

    def __init__(
        self, *given: Any, cp: ContextParallel, data_parallel: tuple[int, int] = (0, 1), **others: Any
    ) -> None:
        check_context(cp, ContextParallel)
        args = others["args"] if "args" in others else given[1]
        refused = ("label_smoothing_factor", "dataloader_num_workers")
        refuse("ContextParallelMixin", **{name: getattr(args, name) for name in refused})
        refuse("ContextParallelMixin", compute_metrics=others.get("compute_metrics"))
        if not args.average_tokens_across_devices:
            raise ValueError("average_tokens_across_devices is False; ranks have different numbers of counted tokens")
        self.cp, self.data_parallel = cp, data_parallel
        super().__init__(*given, **others)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The same batches on all ranks of the context, in an order drawn from the arguments' data_seed or seed."""
        trainer: Any = self
        size = trainer.args.per_device_train_batch_size
        return self._loader(trainer.train_dataset, size, shuffle=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The same for the evaluation, in order."""
        trainer: Any = self
        rows = trainer.eval_dataset if eval_dataset is None else eval_dataset
        rows = trainer.eval_dataset[rows] if isinstance(rows, str) else rows
        return self._loader(rows, trainer.args.per_device_eval_batch_size, shuffle=False)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """The loss of a batch alone: logits would be those of a slice."""
        return super().prediction_step(model, inputs, True, ignore_keys)  # type: ignore[misc]

    def _loader(self, rows: Any, batch_size: int, shuffle: bool) -> DataLoader[Any]:
        trainer: Any = self
        seed = trainer.args.seed if trainer.args.data_seed is None else trainer.args.data_seed
        which, of_how_many = self.data_parallel
        sampler = DistributedSampler(rows, of_how_many, which, shuffle=shuffle, seed=seed)
        return DataLoader(rows, batch_size, sampler=sampler, collate_fn=self._collate)

    def _collate(self, rows: Any) -> dict[str, Any]:
        trainer: Any = self
        return shard_batch(dict(trainer.data_collator(rows)), cp=self.cp)
