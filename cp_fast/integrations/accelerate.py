"""accelerate's own switch, `ParallelismConfig(cp_size=n)`, on this package.

    from cp_fast.integrations import accelerate as cp_accelerate

    trainer = Trainer(...)  # or SFTTrainer, or accelerator = Accelerator(...)
    cp_accelerate.use(trainer.accelerator, layout="balanced")  # before train(), or before accelerator.prepare

Some methods of that one accelerator become ours: the step of `prepare` for PyTorch's context parallelism,
`maybe_context_parallel`, and the methods that gather metrics. Inside of a context the model has a rank's slices.
Outside it is the model that it was. accelerate itself is not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.hugging_face.image_models import find_images
from cp_fast.integrations.hugging_face.model_batches import FLAT, positions_said
from cp_fast.integrations.hugging_face.model_call import ModelCall
from cp_fast.integrations.hugging_face.model_task import with_output
from cp_fast.integrations.hugging_face.prepared_model import prepared_model
from cp_fast.integrations.hugging_face.router_losses import routing_asked_for
from cp_fast.integrations.hugging_face.token_mixers import refuse_adapters
from cp_fast.integrations.shared.own_numbers import own_numbers
from cp_fast.integrations.shared.unnamed_buffers import (
    check_buffers,
    check_filled,
    padding_of,
    put,
    rows_of,
    said_by,
)
from cp_fast.integrations.token_batches import CpBatch, shard_tokens
from cp_fast.integrations.transformers import NAME, attention_layers, prepare
from cp_ref.groups.agreement import agreed, merged
from cp_ref.groups.collectives import all_reduce_sum
from cp_ref.schedules.values import kind_of

__all__ = ["use"]

_METHODS = ("maybe_context_parallel", "pad_across_processes", "gather", "gather_for_metrics", "_prepare_cp")
_OWN_LOSS = (
    "is given shift_labels without labels: label smoothing and compute_loss_func take the labels away, and would shift "
    "those of a slice. Leave both off, or write a compute_loss that takes inputs['shift_labels']"
)
_MEANS = (  # This says why there is no loss of routers.
    "the loss of the routers is a sum of ranks' parts, and accelerate's contexts have means; "
    "ContextParallelMixin has it for Trainer"
)


def use(accelerator: Any, *, layout: Any = "dual_chunk", cp_comm_type: Any = "p2p") -> ContextParallel:
    """Switch an accelerator's context parallelism to this package.

    `accelerator.prepare` then prepares the model (`transformers.prepare`), and `accelerator.maybe_context_parallel`
    cuts its buffers by our layout. All else stays accelerate's: meshes, loaders, FSDP2, `backward`, clipping.

    Args:
        accelerator: with `ParallelismConfig(cp_size=n)`, n > 1, and without a prepared model.
        layout, cp_comm_type: as of `ContextParallel`, in place of `TorchContextParallelConfig`. "balanced" shares
            packed documents, and rows with padding, out by their work.

    Returns:
        The context: the ranks that share a batch.

    Raises:
        ValueError: cp_size is 1, FSDP2 is not on, or `use` was called before. RuntimeError: the accelerator has
        prepared a model. NotImplementedError: tensor parallelism, compilation by accelerate. TypeError: no Accelerator.
        Others: as `ContextParallel`.

    >>> from types import SimpleNamespace
    >>> use(SimpleNamespace(parallelism_config=None, **dict.fromkeys(_METHODS)))
    Traceback (most recent call last):
        ...
    ValueError: the accelerator has cp_size = 1; give it parallelism_config=ParallelismConfig(cp_size=n)
    """
    if missing := [name for name in _METHODS if not hasattr(accelerator, name)]:
        what = f"accelerator is {kind_of(accelerator)}, without {missing[0]}"
        raise TypeError(f"{what}; it must be accelerate's Accelerator, 1.15 or newer")
    config = accelerator.parallelism_config
    if config is None or config.cp_size == 1:
        raise ValueError("the accelerator has cp_size = 1; give it parallelism_config=ParallelismConfig(cp_size=n)")
    if not accelerator.is_fsdp2:
        raise ValueError(
            f"ParallelismConfig has cp_size = {config.cp_size} without FSDP2, which adds up the ranks' gradients; give "
            "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if config.tp_size > 1:
        raise NotImplementedError(f"ParallelismConfig has tp_size = {config.tp_size}; cp_fast has cp_size without it")
    if (compiler := accelerator.state.dynamo_plugin.backend.value) != "NO":
        raise NotImplementedError(f"dynamo_plugin has backend {compiler!r}; leave accelerate's compilation off")
    if isinstance(getattr(accelerator.maybe_context_parallel, "__self__", None), _Switch):
        raise ValueError("use was called with this accelerator before; its layout and cp_comm_type stay")
    if accelerator._models or hasattr(accelerator, "_cp_context"):
        raise RuntimeError(
            "the accelerator has prepared a model for PyTorch's context parallelism; call use before "
            "accelerator.prepare, and before train() of a Trainer"
        )
    switch = _Switch(accelerator, ContextParallel(accelerator.torch_device_mesh["cp"], cp_comm_type, layout=layout))
    accelerator._prepare_cp = switch.prepare
    for name in _METHODS[:-1]:
        setattr(accelerator, name, getattr(switch, name))
    return switch.cp


@dataclass(frozen=True, eq=False)
class _Batch:
    """The batch that a context has cut.

    Attributes:
        shape: of the whole batch's tokens, [b, s].
        filled: bool [b, s/cp] on the CPU: the tokens that the cut has added.
        positions: [b, s/cp] on the CPU, inside each document.
        said: the documents or the padding that the buffers say.
    """

    shape: tuple[int, int]
    filled: torch.Tensor
    positions: torch.Tensor
    sequences: CpBatch
    said: Mapping[str, torch.Tensor]


class _Switch:
    """The methods of an accelerator, and the batch of the context that it is in."""

    def __init__(self, accelerator: Any, cp: ContextParallel) -> None:
        self.accelerator, self.cp = accelerator, cp
        self.models: dict[Any, Any] = {}  # Each has this attention outside.
        self.waiting: list[Any] = []  # These models have no hooks yet.
        self.batch: _Batch | None = None
        self.evaluated: _Batch | None = None  # The last context without gradients. Its outputs are still there.
        self.entered = 0

    # ---- the model

    def prepare(self, *args: Any) -> tuple[Any, ...]:
        """In place of accelerate's hooks, which drop masks: each model is prepared. Collective."""
        for model in args:
            if isinstance(model, nn.Module):
                merged(self.cp, "accelerator.prepare", lambda model=model: self._prepare(model), any)
        return args

    def _prepare(self, model: Any) -> None:
        refuse_adapters(model)
        model = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
        if model in self.models:
            return
        if any(weight.is_meta for weight in model.parameters()):
            raise ValueError(
                f"{type(model).__name__} has weights on the first rank alone; set the FSDP plugin's "
                "cpu_ram_efficient_loading to False"
            )
        if find_images(model) is not None:
            raise NotImplementedError(
                f"{type(model).__name__} takes images, and accelerate's buffers are of text; leave cp_size at 1, and "
                "use ContextParallelMixin, or shard_batch(batch, cp=cp, model=model) in a loop of your own"
            )
        before = getattr(getattr(model, "config", None), "_attn_implementation", None)
        prepare(model, self.cp)
        for layer in attention_layers(model):
            layer.register_forward_pre_hook(_refuse_outside, with_kwargs=True)
        self.models[model] = "sdpa" if before == NAME else before
        self.waiting.append(model)
        model.set_attn_implementation(self.models[model])

    def _hook(self) -> None:
        """Before the hooks of FSDP, which would round the number of labels to a narrow dtype, and behind them."""
        for model in self.waiting:
            model.register_forward_pre_hook(self._enter_model, with_kwargs=True, prepend=True)
            model.register_forward_hook(self._leave_model, with_kwargs=True)
        self.waiting.clear()

    def _enter_model(self, model: Any, by_place: tuple[Any, ...], given: dict[str, Any]) -> Any:
        batch = self.batch
        if batch is None:
            return None
        count = merged(self.cp, "a count of labels", lambda: _read_call(model, batch, given), sum)
        labels, targets = given.get("labels"), given.get("shift_labels")
        if labels is not None:
            if targets is None and prepared_model(model).task.labels_head(type(model).__name__).shifts:
                given["shift_labels"] = targets = self._shifted(batch, labels)
                count = int(all_reduce_sum(self.cp.comm, (targets != -100).sum()))
            said = given.get("num_items_in_batch")
            # By default the mean of all ranks' losses is that of the batch.
            given["num_items_in_batch"] = max(count, 1) / self.cp.size if said is None else float(said)
        return by_place, given | {"cp_batch": batch.sequences}

    def _shifted(self, batch: _Batch, labels: torch.Tensor) -> torch.Tensor:
        """The target of each token of a slice, from the labels of all slices. Collective."""
        whole = F.pad(batch.sequences.unshard(labels)[:, 1:], (0, 1), value=-100)
        if "position_ids" in batch.said and batch.sequences.cu_seqlens is not None:
            whole[0, (batch.sequences.cu_seqlens[1:] - 1).long().to(whole.device)] = -100
        return batch.sequences.shard(whole, -100)

    def _leave_model(self, model: Any, _: tuple[Any, ...], given: dict[str, Any], out: Any) -> Any:
        """The mean of all ranks' losses is that of the batch. Without gradients a loss is the batch's, the same on all
        ranks. An evaluation may end with a short batch, and then accelerate leaves ranks out of its means.
        """
        if self.batch is None:
            return out
        call, evaluated = given.get("cp_batch"), not torch.is_grad_enabled()
        if evaluated:
            self.evaluated = None if prepared_model(model).task.pools else self.batch
        loss = out.get("loss") if isinstance(out, Mapping) else out[0]
        if loss is None or loss.dim():
            return out
        if isinstance(call, ModelCall) and call.spans is not None:  # a rank's part, and all parts are equal
            return with_output(out, "loss", loss * self.cp.size)
        return with_output(out, "loss", all_reduce_sum(self.cp.comm, loss) / self.cp.size) if evaluated else out

    # ---- the buffers

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """accelerate's: the buffers are this rank's slices until the context ends, and models know it. Collective."""
        training = torch.is_grad_enabled()
        batch, slices = self._cut(list(buffers or []), list(buffer_seq_dims or []), no_restore_buffers)
        kept = {id(x) for x in no_restore_buffers or ()} if training else set[int]()  # metrics are of whole rows
        wholes = [(x, x.detach()) for x in slices if id(x) not in kept]
        for x, mine in slices.items():
            put(x, mine)
        self._hook()
        self.evaluated, self.entered = None, self.entered + 1
        device = next(iter(slices)).device
        try:
            self.batch = batch
            for model in self.models:
                model.set_attn_implementation(NAME)
            with own_numbers(device, self.entered, self.cp.rank) if training else nullcontext():
                yield
        finally:
            self.batch = None
            for model, before in self.models.items():
                model.set_attn_implementation(before)
            for x, whole in wholes:
                put(x, whole)

    def _cut(self, buffers: list[Any], dims: list[int], kept: Any) -> tuple[_Batch, dict[torch.Tensor, torch.Tensor]]:
        """The batch, and the slice of each buffer. Collective."""

        def read() -> tuple[Any, ...]:
            self._check_free()
            shape = check_buffers(buffers, dims, kept)
            said = said_by(buffers, dims, shape)
            named = {f"buffers[{i}]": x for i, x in enumerate(buffers) if dims[i] == 1 and x.shape[:2] == shape}
            others = [i for i in range(len(buffers)) if f"buffers[{i}]" not in named]
            if others and self.cp.layout == "balanced" and shape[0] > 1:
                raise ValueError(
                    f"buffers[{others[0]}] has shape {list(buffers[others[0]].shape)}; with layout 'balanced', which "
                    f"cuts each row in another way, all buffers must be [{shape[0]}, {shape[1]}, ...]"
                )
            return shape, said, named, others, {name: padding_of(x) for name, x in named.items()}

        shape, said, named, others, fill = agreed(self.cp, "an agreement on buffers", read)
        numbers = torch.arange(shape[1], device="cpu").expand(shape).contiguous()
        batch = {"input_ids": numbers, **said, **named}
        part = shard_tokens(batch, cp=self.cp, pad_token_id=-1, fill=fill)
        places = part["input_ids"]
        if places.numel() * self.cp.size > numbers.numel():
            check_filled(named, said.get("attention_mask"), self.cp.size)
        cut = {
            x: part[f"buffers[{i}]"] if i not in others else rows_of(x, dims[i], places[0])
            for i, x in enumerate(buffers)
        }
        return _Batch(shape, places < 0, part["position_ids"].cpu(), part["cp_batch"], said), cut

    def _check_free(self) -> None:
        if self.batch is not None:
            raise RuntimeError("maybe_context_parallel is called inside of another one; contexts do not nest")
        if str(F.scaled_dot_product_attention.__module__).startswith("torch.distributed"):
            raise RuntimeError("PyTorch's context_parallel is active; leave it before maybe_context_parallel")
        if not self.models:
            raise RuntimeError("no model was prepared, and would take a slice for the whole; call accelerator.prepare")

    # ---- metrics

    def pad_across_processes(self, tensor: Any, *given: Any, **named: Any) -> Any:
        """accelerate's, of whole rows: what has a slice's shape is put together. Collective."""
        theirs = type(self.accelerator).pad_across_processes
        return theirs(self.accelerator, self._whole(tensor), *given, **named)

    def gather(self, tensor: Any) -> Any:
        """accelerate's. Called by `gather_for_metrics`, each context gives its rows once: its ranks have the same.

        Raises:
            ValueError: they have other values, on all ranks.
        """
        accelerator = self.accelerator
        theirs = type(accelerator)
        # Trainer keeps the method gather_for_metrics that it found before `use`, so its own code is recognised.
        if self.batch is not None or sys._getframe(1).f_code is not theirs.gather_for_metrics.__code__:
            return theirs.gather(accelerator, tensor)
        contexts = accelerator.num_processes // self.cp.size

        def once(found: torch.Tensor) -> torch.Tensor:
            ranks = found.unflatten(0, (contexts, self.cp.size, -1))
            if not all(_same(mine, ranks[:, 0]) for mine in ranks.unbind(1)):
                raise ValueError(
                    f"gather_for_metrics is given a tensor {list(ranks.shape[2:])} whose values differ between the "
                    "ranks of a context, such as losses of their slices; give it accelerator.reduce(loss.detach(), "
                    '"mean"), which is of the whole batch'
                )
            return ranks[:, 0].flatten(0, 1)

        return tree_map(once, theirs.gather(accelerator, self._whole(tensor)))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """accelerate's. In a context it gathers from all ranks, whose values are parts of a batch."""
        accelerator = self.accelerator
        tensors = all(isinstance(x, torch.Tensor) for x in tree_leaves(input_data)) and not use_gather_object
        if self.batch is not None and tensors:
            return accelerator.gather(input_data)
        if not tensors and self.cp.rank:
            input_data = []
        return type(accelerator).gather_for_metrics(accelerator, input_data, not tensors)

    def _whole(self, data: Any) -> Any:
        """The data with slices of the last evaluated batch, [b, s/cp, ...], put together."""
        batch = self.evaluated
        if batch is None:
            return data

        def whole(x: Any) -> Any:
            cut = isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[:2] == batch.filled.shape
            return batch.sequences.unshard(x) if cut and x.shape[:2] != batch.shape else x

        return tree_map(whole, data)


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two ranks have the same values, up to rounding."""
    return torch.equal(x, y) or (x.is_floating_point() and torch.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True))


# ---- what a model is given


def _read_call(model: Any, batch: _Batch, given: dict[str, Any]) -> int:
    """Check a call's arguments, and put them right in place; returns how many labels count on this rank. Sends nothing.

    Raises:
        ValueError, NotImplementedError: arguments that are no slices of the batch, that say other sequences than its
        buffers did, or of which a slice would come out wrong.
    """
    routing_asked_for(_MEANS, given, model.config)
    name, width, there = type(model).__name__, batch.filled.shape, batch.sequences.documents >= 0
    flat = {argument: given.pop(argument) for argument in FLAT if argument in given}
    if any(x is not None for x in flat.values()):
        positions = batch.said.get("position_ids", torch.arange(batch.shape[1], device="cpu")[None])
        positions_said({"input_ids": positions, "position_ids": positions, **flat}, 0)
    for argument, x in given.items():
        odd = isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[:2] != width
        if odd and (argument in ("input_ids", "inputs_embeds") or x.shape[:2] == batch.shape):
            raise ValueError(
                f"{name} is given {argument} {list(x.shape)} in a context whose slices are {list(width)}: give it to "
                "maybe_context_parallel as a buffer, or leave it away"
            )
    mask, positions = given.pop("attention_mask", None), given.get("position_ids")
    if mask is None and "attention_mask" in batch.said:
        raise ValueError(f"a buffer is a mask of padding, but {name} is given no attention_mask; give it to both")
    if mask is not None and not (mask.shape == width and torch.equal(mask.cpu() != 0, there)):
        raise NotImplementedError(
            f"{name} is given attention_mask {list(mask.shape)}, which is not a buffer [b, s] with padding behind the "
            "tokens (padding_side='right'); accelerate's own context parallelism would drop it"
        )
    if positions is not None and not (
        positions.shape == width and torch.equal(positions.cpu()[there], batch.positions[there])
    ):
        raise ValueError(
            f"{name} is given position_ids {list(positions.shape)} that do not count 0, 1, 2 in each row, or in each "
            "document of one packed row that was a buffer"
        )
    noise = getattr(model.get_input_embeddings(), "neftune_noise_alpha", None)
    if noise is not None and model.training:
        raise NotImplementedError(f"neftune_noise_alpha is {noise}: its noise would depend on the length of a slice")
    device = next((x.device for x in given.values() if isinstance(x, torch.Tensor)), None)
    given["position_ids"] = batch.positions.to(device)
    for argument, value in {"input_ids": 0, "labels": -100, "shift_labels": -100}.items():
        if given.get(argument) is not None and given[argument].shape == width:
            given[argument] = given[argument].masked_fill(batch.filled.to(device), value)
    if given.get("labels") is None:
        if given.get("shift_labels") is not None:
            raise NotImplementedError(f"{name} {_OWN_LOSS}")
        return 0
    if not prepared_model(model).task.labels_head(name).shifts:
        given.pop("shift_labels", None)  # which Trainer makes for every model
    return int((given.get("shift_labels", given["labels"]) != -100).sum())


def _refuse_outside(layer: Any, _: tuple[Any, ...], given: dict[str, Any]) -> None:
    """A pre-hook of attention: a checkpointed layer runs again in the backward pass."""
    if isinstance(given.get("cp_batch"), ModelCall) and layer.config._attn_implementation != NAME:
        raise RuntimeError(
            f"{type(layer).__name__} runs again, for the backward pass, outside of maybe_context_parallel, where its "
            "attention is that of whole sequences; call accelerator.backward inside"
        )
