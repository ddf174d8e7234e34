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
import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.hugging_face.prepared_model import prepared_model
from cp_fast.integrations.hugging_face.router_losses import routing_asked_for
from cp_fast.integrations.shared.drop_in import refuse
from cp_fast.integrations.shared.own_numbers import own_numbers
from cp_fast.integrations.transformers import prepare, shard_batch
from cp_ref.groups.collectives import all_reduce_sum
from cp_ref.problems.call_checks import check_context
from cp_ref.schedules.values import kind_of

__all__ = ["ContextParallelMixin"]

_Trainer: Any = object  # Its methods come behind those of the mixin.
_OWN_LOSS = (
    'Write a compute_loss that calls super().compute_loss, or that takes inputs["shift_labels"], the label that each '
    "token learns, and returns the sum of its losses times self.accelerator.num_processes / num_items_in_batch: the "
    "count is of all ranks, and gradients are averaged over processes"
)


_OF_TRL = ("SFTTrainer", "RewardTrainer")  # Their methods take a rank's part.
_OF_PAIRS = (
    "has losses of whole sequences, and would be given a rank's tokens. Write the loop with "
    "cp_fast.integrations.sequences (token_log_probs, sequence_sum), as examples/preference.py does; of TRL, "
    f"ContextParallelMixin takes {' and '.join(_OF_TRL)}"
)
_ROUTED_BY_TRL = (
    "TRL computes the loss of the routers itself, of a rank's tokens: give it router_aux_loss_coef=0. "
    "Trainer with ContextParallelMixin has that loss"
)


class ContextParallelMixin(_Trainer):
    """A Trainer over ranks: the base of a class, before Trainer. The model is prepared (`transformers.prepare`).

    `compute_metrics`, `preprocess_logits_for_metrics` and `predict` get the logits and labels of whole rows, in their
    order, on every rank: b * s * vocabulary numbers for a batch, as without ranks.

    In a training step the ranks of a context draw different random numbers, so no two tokens share a dropout mask. All
    that is drawn outside (orders of rows, masks of a collator) is the same on all of them.

    Args:
        args: TrainingArguments, by name or as Trainer's second argument.
        cp: the ranks that share a batch, the schedule and the layout. They are consecutive processes. Other such groups
            of ranks get other batches.
        fill: further tensors [b, s, ...] of the batches, and the value of each on padding, as of `shard_batch`; a
            `compute_loss` of your own takes a rank's part of each. Without it token_type_ids of text have 0 there.
        others: Trainer's.

    Raises:
        NotImplementedError: what would be wrong on a slice: compute_loss_func, a `compute_loss` that
        neither calls Trainer's nor reads "shift_labels" (a rank's labels are shifted already),
        neftune_noise_alpha (its noise depends on the length), train_sampling_strategy "batch_rebalance",
        dispatch_batches, predict_with_generate of Seq2SeqTrainer, tensor parallelism, DataParallel, accelerate's own
        context or sequence parallelism; what `prepare` refuses of the model. ValueError: ranks that are not
        consecutive; average_tokens_across_devices is off, without which losses are means of means.
    """

    def __init__(
        self, *given: Any, cp: ContextParallel, fill: Mapping[str, float] | None = None, **others: Any
    ) -> None:
        check_context(cp, ContextParallel)
        if fill is not None and not isinstance(fill, Mapping):
            raise TypeError(f"fill is {kind_of(fill)}; it must be a dict from an entry's name to its value on padding")
        args = others["args"] if "args" in others else next(iter(given[1:]), None)
        if args is None:
            raise TypeError("args is None; give TrainingArguments, which makes the process group that cp is of")
        _refuse_arguments(args, others)
        _refuse_methods(type(self))
        self.cp, self._fill = cp, fill
        self._batches: list[tuple[Any, Any]] = []  # This step's: a part, and the whole batch.
        self._drawn = 0  # The number of batches that this step has trained on.
        super().__init__(*given, **others)
        _refuse_parallelism(self, args)
        self._mesh = _mesh(self, cp)
        prepare(self.model, cp)
        if _is_of_trl(type(self)):
            routing_asked_for(_ROUTED_BY_TRL, {}, self.model.config)
        self._pools = prepared_model(self.model).task.pools
        if not self._pools:
            prepared_model(self.model).task.labels_head(type(self.model).__name__)
        elif not _is_of_trl(type(self)):
            raise NotImplementedError(
                f"{type(self.model).__name__} has labels of whole sequences, whose loss Trainer would take for a "
                "rank's part. Let trl's RewardTrainer be the class behind ContextParallelMixin, or compute the loss of "
                "model(**part).logits, which is the same on all ranks, in a loop of your own"
            )
        if self.label_smoother is not None:
            self.label_smoother = _SmootherOfParts(self.label_smoother)
        # A prepared model divides by the labels of all ranks. The model's use of the number is irrelevant.
        self.model_accepts_loss_kwargs = self.model_accepts_loss_kwargs or not self._pools

    def call_model_init(self, trial: Any = None) -> Any:
        """The model of `model_init`, prepared: `train` makes a new one."""
        return prepare(super().call_model_init(trial), self.cp)

    def get_cp_size(self) -> int:
        """How many processes share a batch, for Trainer's count of rows in a step."""
        return self.cp.size

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Trainer's, with the same batches on all ranks of the context. Its workers draw by the context's number."""
        with self._same_batches():
            loader = super().get_train_dataloader()
        inner: Any = getattr(loader, "base_dataloader", loader)
        seeds = getattr(inner, "worker_init_fn", None)
        if isinstance(seeds, partial) and "rank" in seeds.keywords:  # Trainer's: by the process's number
            inner.worker_init_fn = partial(seeds, rank=self.args.process_index // self.cp.size)
        return loader

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
        self._drawn = 0
        self._batches = [(self._part(batch), batch) for batch in islice(epoch_iterator, num_batches)]
        parts = [part for part, _ in self._batches]
        return parts, self._count(parts, device)

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        """Trainer's. Its numbers for metrics come from all ranks. accelerate would leave ranks out where the last batch
        is short.
        """
        accelerator = self.accelerator
        accelerator.gather_for_metrics = lambda x, *_: accelerator.gather(x)
        try:
            return super().compute_loss(*given, **named)
        finally:
            del accelerator.gather_for_metrics

    def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
        """Trainer's, with random numbers of this rank's own."""
        with self._own_numbers():
            return super().training_step(*given, **named)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """The loss of a batch, the same on all ranks of the context, and the logits and labels of its whole rows."""
        part = self._prepare_inputs(self._part(inputs))
        count = self._count([part], self.args.device)
        loss = logits = labels = out = None
        with torch.no_grad(), self.compute_loss_context_manager():
            if count is not None or self._pools:
                how = {"return_outputs": not prediction_loss_only, "num_items_in_batch": count}
                found = self.compute_loss(model, dict(part), **how)
                mine, out = (found, None) if prediction_loss_only else found
                loss = all_reduce_sum(self.cp.comm, mine.detach()) / self.cp.size
            elif not prediction_loss_only:
                out = model(**part)
            if out is not None:
                logits = out["logits"].detach() if isinstance(out, Mapping) else out[0].detach()
                logits = logits if self._pools else part["cp_batch"].unshard(logits)
                labels = None if inputs.get("labels") is None else inputs["labels"].to(logits.device)
        return loss, logits, labels

    def evaluation_loop(self, *given: Any, **named: Any) -> Any:
        """Trainer's, over losses that each context gives once."""
        self.gather_function = self._gather
        prepares = not self.accelerator._models and not self.is_fsdp_enabled and not self.is_deepspeed_enabled
        found = super().evaluation_loop(*given, **named)
        if prepares:  # accelerate marks the model as prepared, and so `train` would not wrap it in DDP
            self.accelerator._models.clear()
            vars(self.model).pop("_is_accelerate_prepared", None)
            self.model_wrapped = self.model
        return found

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Trainer's count, of the whole batch that a part is of: each context counts it once."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(next((whole for part, whole in self._batches if part is inputs), inputs))
        of_all_ranks = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + of_all_ranks // self.cp.size

    @contextlib.contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Random numbers of this rank's own, for the step and batch."""
        if self.cp.size == 1:
            yield
            return
        self._drawn += 1
        with own_numbers(self.args.device, self.state.global_step, self._drawn, self.cp.rank):
            yield

    def _part(self, batch: Any) -> dict[str, Any]:
        of_rows = {}
        if _is_of_trl(type(self)):
            of_rows = {name: x for name, x in batch.items() if name == "margin"}  # RewardTrainer's, [b / 2]
        fill = self._fill
        if fill is None:
            fill = {} if prepared_model(self.model).images else {"token_type_ids": 0}
        rows = {name: x for name, x in batch.items() if name not in of_rows}
        fill = {name: value for name, value in fill.items() if name in rows}
        part = shard_batch(rows, cp=self.cp, model=self.model, fill=fill) | of_rows
        # A compute_loss of the user's may hand on no count. The mean of the ranks' losses is then that of the batch.
        count, routing = part.pop("num_items_in_batch", None), prepared_model(self.model).task.routing
        if count is not None and routing_asked_for(routing, {}, self.model.config) is None:
            part["num_items_in_batch"] = count / self.cp.size
        if not _is_of_trl(type(self)):
            return part
        tokens = part["cp_batch"].documents >= 0  # TRL counts them.
        return part | {"attention_mask": tokens.long().to(part["input_ids"].device)}

    def _count(self, parts: list[dict[str, Any]], device: Any) -> torch.Tensor | None:
        if not parts or "labels" not in parts[0]:
            return None
        mine = torch.stack([(part["labels"] != -100).sum() for part in parts]).sum()
        return self.accelerator.gather(mine.to(device)).sum()

    def _gather(self, of_rows: torch.Tensor) -> torch.Tensor:
        """Return each value of the contexts' rows once. Leave out the rows that accelerate added to the last batch."""
        state, size = self.accelerator.gradient_state, self.cp.size
        found = self.accelerator.gather(of_rows)
        found = found.view(-1, size, *of_rows.shape)[:, 0].flatten(0, 1)
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


class _SmootherOfParts:
    """Trainer's label smoother, for a rank's logits and labels, which are shifted already."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def __call__(self, outputs: Any, labels: Any, shift_labels: bool = False, num_items_in_batch: Any = None) -> Any:
        if num_items_in_batch is None:
            raise ValueError(
                "num_items_in_batch is None with label_smoothing_factor, and a rank's mean is not the batch's: have "
                "your compute_loss, or training_step, hand num_items_in_batch on"
            )
        return self.theirs(outputs, labels, num_items_in_batch=num_items_in_batch)


def _refuse_arguments(args: Any, others: dict[str, Any]) -> None:
    where = "ContextParallelMixin"
    if args.neftune_noise_alpha is not None:
        raise NotImplementedError(
            f"neftune_noise_alpha is {args.neftune_noise_alpha}, and {where} would draw noise by the length of a "
            "rank's slice; leave it None"
        )
    if others.get("compute_loss_func") is not None:
        raise NotImplementedError(
            f"compute_loss_func is {_named(others['compute_loss_func'])}, which {where} would give a rank's slice. "
            f"{_OWN_LOSS}"
        )
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        raise NotImplementedError(
            f"train_sampling_strategy is 'batch_rebalance', by which every process of {where} gets another batch"
        )
    if args.accelerator_config.dispatch_batches:
        raise NotImplementedError(
            f"accelerator_config has dispatch_batches True, by which one process loads for all; {where} has each load "
            "its own rows: leave it None or False"
        )
    if getattr(args, "predict_with_generate", False):
        raise NotImplementedError(
            f"predict_with_generate is True, and metrics would get logits: {where} evaluates slices. Leave it off, or "
            'generate in a loop of your own, after model.set_attn_implementation("sdpa")'
        )
    if not args.average_tokens_across_devices:
        raise ValueError("average_tokens_across_devices is False; ranks have different numbers of counted tokens")


def _named(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _refuse_methods(kind: type[Any]) -> None:
    """Raise for a method that takes what it is given for a whole batch, of a class of the user's."""
    behind = shadowed = False  # shadowed: a compute_loss does not call the ones behind it.
    for one in kind.__mro__:
        behind = behind or one is ContextParallelMixin
        if one in (ContextParallelMixin, object) or one.__module__.partition(".")[0] == "transformers":
            continue
        if one.__module__.startswith("trl."):
            if one.__name__.endswith("Trainer") and one.__name__ not in ("_BaseTrainer", *_OF_TRL):
                raise NotImplementedError(f"{one.__name__} {_OF_PAIRS}")
            continue
        name, loss = f"{one.__name__}.compute_loss", None if shadowed else vars(one).get("compute_loss")
        if loss is not None and _words(loss).isdisjoint(("shift_labels", "compute_loss")):
            raise NotImplementedError(
                f"{name} computes a loss of its own, and would be given a rank's part of a batch. {_OWN_LOSS}"
            )
        shadowed = shadowed or (loss is not None and "compute_loss" not in _words(loss))
        for name in ("prediction_step", "get_batch_samples"):
            if behind and name in vars(one):
                raise NotImplementedError(
                    f"{one.__name__}.{name} would not be called: ContextParallelMixin, which stands before it, has its "
                    "own. Let transformers' Trainer be the class behind the mixin, class CpTrainer("
                    f"ContextParallelMixin, Trainer), with rows of token ids and labels. A {name} of CpTrainer is "
                    "called, with whole batches, and super() is the mixin's"
                )


def _is_of_trl(kind: type[Any]) -> bool:
    return any(one.__module__.startswith("trl.") for one in kind.__mro__)


def _words(method: Any) -> set[Any]:
    """The names and constants in a method's code."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return set() if code is None else {*code.co_names, *code.co_consts}


def _refuse_parallelism(trainer: Any, args: Any) -> None:
    theirs = trainer.accelerator.parallelism_config
    if theirs is not None and (theirs.cp_size > 1 or theirs.sp_size > 1):
        raise NotImplementedError(
            f"ParallelismConfig has cp_size={theirs.cp_size}, sp_size={theirs.sp_size}, accelerate's own; "
            "leave both at 1 and give ContextParallelMixin cp=ContextParallel(...), or leave the mixin away and call "
            "cp_fast.integrations.accelerate.use(trainer.accelerator)"
        )
    sizes = {"n_gpu": args.n_gpu, "tp_size": trainer.get_tp_size()}
    refuse("ContextParallelMixin", **{name: size for name, size in sizes.items() if size > 1})


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
