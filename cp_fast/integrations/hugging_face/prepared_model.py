"""A prepared model, and the checks of its calls: one has a rank's slice with all that belongs to it, or it raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cp_fast.integrations.hugging_face.attention_dropout import shared_seed
from cp_fast.integrations.hugging_face.called_layers import check_layers, forget_layers, models_in
from cp_fast.integrations.hugging_face.image_calls import begin_call, end_call
from cp_fast.integrations.hugging_face.image_models import ImageModel, arguments_of
from cp_fast.integrations.hugging_face.long_positions import give_longest, say_longest
from cp_fast.integrations.hugging_face.model_call import ALONE, ModelCall
from cp_fast.integrations.hugging_face.model_task import Task
from cp_fast.integrations.hugging_face.module_states import drop_state, hook_once, put_state, state_of
from cp_fast.integrations.hugging_face.slice_probe import Numbering, takes_cache
from cp_fast.integrations.hugging_face.task_head import SPANS
from cp_fast.integrations.hugging_face.token_mixers import (
    NAME,
    ROUTER_SWITCH,
    refuse_adapters,
    refuse_caches,
    refuse_switches,
)
from cp_fast.integrations.shared.drop_in import words_for
from cp_fast.integrations.token_batches import CpBatch
from cp_fast.runtime.handles import outside_of_graphs

__all__ = ["PreparedModel", "check_calls", "forget_model", "holder_of_images", "prepared_model"]

_KNOWN = {  # These arguments are checked, or a model takes them token by token.
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "cp_batch", "use_cache"),
    *("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "output_hidden_states", "return_dict"),
    *("output_router_logits", "output_attentions", "fused_lm_head"),
}
_AROUND = ", or call the model around it by its hooks, model(...): PEFT's AdaLoRA does not"


@dataclass(frozen=True, eq=False)
class PreparedModel:
    """A prepared model, or a model inside one: what `prepare` has found of it.

    Args:
        numbering: how the model numbers the positions of a sequence.
        task: what it computes of labels.
        by_row: the name of a module that does another thing in each row of a batch.
        images: how it reads images; None: it reads text alone.
        inner: the model is a part of the one that was prepared, and is called by it or by the user.
        arguments: those of its calls that not all models take, and that are checked elsewhere.
    """

    numbering: Numbering
    task: Task
    by_row: str = ""
    images: ImageModel | None = None
    inner: bool = False
    arguments: frozenset[str] = frozenset()

    def __deepcopy__(self, _: Any) -> PreparedModel:
        return self

    def enter(self, model: Any, by_place: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any] | None:
        """Check a call's arguments, and return them as the model wants them. None for a call without changes: the model
        runs alone, or it is a part of a model, whose own checks the call has passed.

        Raises:
            TypeError, ValueError, NotImplementedError: what is given would be taken for something else.
        """
        name, sequences = type(model).__name__, given.get("cp_batch")
        if isinstance(sequences, ModelCall) or (self.inner and sequences is None):
            return None
        mine = model.config.get_text_config()._attn_implementation  # Some models of images keep their own.
        if mine != NAME:
            if sequences is not None:
                raise ValueError(
                    f"{name} is given cp_batch while its attention is {mine!r}, which "
                    f"would take a slice for the whole; call model.set_attn_implementation({NAME!r}) first"
                )
            return None
        if not isinstance(sequences, CpBatch):
            raise TypeError(f"{name} is given cp_batch={sequences!r}: call it with what shard_batch returns; {ALONE}")
        if by_place:
            raise TypeError(f"{name} is given {len(by_place)} arguments by place; give all by name: **shard_batch(...)")
        for argument in ("input_ids", "inputs_embeds"):
            x, shape = given.get(argument), sequences.shape
            if isinstance(x, torch.Tensor) and shape is not None and x.shape[:2] != shape:
                raise ValueError(
                    f"{name} is given {argument} {list(x.shape)}, and a cp_batch of [b, s/cp] = {list(shape)}: call it "
                    "with all that one shard_batch returned, and without adapters that add tokens"
                )
        refuse_switches(given, model.config)
        if given.get("position_ids") is None:
            raise TypeError(
                f"{name} is given no position_ids, and would number a slice's tokens from its own first: call it with "
                "all that shard_batch returns"
            )
        if (kept := given.get("logits_to_keep")) is not None and (isinstance(kept, torch.Tensor) or kept):
            raise NotImplementedError(
                f"logits_to_keep is {kept!r}, which cp_fast does not support: it would count the tokens of a slice"
            )
        if given.get("attention_mask") is not None:
            _check_mask(name, given["attention_mask"], sequences)
            given = {n: x for n, x in given.items() if n != "attention_mask"}
        given = ({"use_cache": False} if "use_cache" in self.arguments else {}) | given
        if self.task.pools:
            given.pop("margin", None)  # trl's RewardTrainer hands it on, and a model alone ignores it.
        self._refuse_unknown(name, given)
        given["position_ids"] = self._numbered(sequences, given)
        if sequences.mixes_rows:
            self._refuse_by_row(model)
        call = ModelCall(self, sequences)
        given = self.task.begin(model, call, given, _AROUND if self.inner else "")
        draw, seeded = shared_seed, (model, sequences, given["position_ids"].device)
        call.seed = outside_of_graphs(draw, *seeded) if torch.compiler.is_compiling() else draw(*seeded)
        return given | {"cp_batch": call}

    def _numbered(self, sequences: CpBatch, given: dict[str, Any]) -> torch.Tensor:
        """The model's numbers of a slice's positions. A model that leaves out padding by its id does so in rows, and
        reads the positions of a packed batch.
        """
        ids, positions = given.get("input_ids"), given["position_ids"]
        if self.numbering.without is not None and ids is not None and sequences.qkv_format != "thd":
            if torch.compiler.is_compiling():
                return outside_of_graphs(_numbers, self.numbering, sequences, ids, positions)
            return _numbers(self.numbering, sequences, ids, positions)
        return positions + self.numbering.first if self.numbering.first else positions

    def _refuse_by_row(self, model: nn.Module) -> None:
        """Raise for what acts by row, where a slice's row has tokens of several rows."""
        cure = "a row of a slice has tokens of several rows in layout 'balanced': take another layout, or packed rows"
        if self.by_row:
            raise NotImplementedError(f"{self.by_row} does another thing in each row of a batch; {cure}")
        for where, module in model.named_modules():
            for hook in module._forward_pre_hooks.values():
                names = getattr(hook, "keywords", {}).get("adapter_names")  # PEFT gives them to its layers.
                if len(set(names or ())) > 1:
                    raise NotImplementedError(f"adapter_names gives {where} an adapter for each row; {cure}")

    def leave(self, model: nn.Module, call: ModelCall, out: Any) -> Any:
        """The model's outputs, with the loss where the model itself does not see the labels.

        Raises:
            RuntimeError: a layer's attention was not cp_fast's.
        """
        if torch.compiler.is_compiling():
            outside_of_graphs(check_layers, model, call)
        else:
            check_layers(model, call)
        return self.task.end(model, call, out)

    def _refuse_unknown(self, name: str, given: Mapping[str, Any]) -> None:
        refuse_caches(name, given)
        for argument, x in given.items():
            if argument not in _KNOWN and argument not in self.arguments and x is not None and x is not False:
                raise NotImplementedError(
                    f"{argument} is {words_for(x)}, which cp_fast does not know in calls of {name} over ranks: it may "
                    "be what the model computes a loss of, or read by rows and places of the whole batch. Give it to "
                    "shard_batch if that has it; if not, leave it away, and compute what it is for from the outputs: "
                    'part["cp_batch"].unshard(...) makes them whole'
                )


def _numbers(numbering: Numbering, sequences: CpBatch, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return sequences.shard(numbering.of(sequences.unshard(ids))).to(positions.dtype)


def _check_mask(name: str, mask: torch.Tensor, sequences: CpBatch) -> None:
    """Raise unless a mask is the slice that says what cp_batch says already."""
    if not torch.equal(mask.cpu() != 0, sequences.documents >= 0):
        raise NotImplementedError(
            f"{name} is given attention_mask {list(mask.shape)}, which is not that of this rank's tokens; give it to "
            "shard_batch, which makes cp_batch of it"
        )


def check_calls(model: Any, prepared: PreparedModel) -> None:
    """Check the calls of a prepared model, and direct calls of the models in it, which have no task."""
    for where, module in models_in(model):
        hook_once(module, _before, _after, first=True)
        give_longest(module)
        inner, images = module is not model, None if prepared.images is None else prepared.images.within(where)
        task = Task() if inner else prepared.task
        arguments = {*(SPANS if task.spans else ()), *(("use_cache",) if takes_cache(module) else ())}
        arguments |= set() if images is None else arguments_of(module, images)
        mine = replace(prepared, task=task, images=images, inner=inner, arguments=frozenset(arguments))
        put_state(module, mine)


def forget_model(model: nn.Module) -> None:
    """Check the model's calls no longer."""
    forget_layers(model)
    for module in model.modules():
        drop_state(module, PreparedModel)
        say_longest(module, None)


def prepared_model(model: nn.Module) -> PreparedModel:
    """Return what `prepare` has found of a model, also through wrappers (DDP, FSDP, PEFT).

    Raises:
        ValueError: the model was not prepared. NotImplementedError: an adapter that came later mixes tokens.
    """
    refuse_adapters(model)
    found = _found(model)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} was not prepared; call cp_fast.integrations.transformers.prepare(model, cp)"
        )
    return found[1]


def _found(model: nn.Module) -> tuple[nn.Module, PreparedModel] | None:
    states = ((module, state_of(module, PreparedModel)) for module in model.modules())
    return next(((module, prepared) for module, prepared in states if prepared is not None), None)


def holder_of_images(model: nn.Module) -> nn.Module | None:
    """The module of a prepared model that has its functions of images. None: it reads text alone."""
    found = _found(model)
    if found is None or found[1].images is None:
        return None
    return found[0].get_submodule(found[1].images.where)


def _before(model: Any, by_place: tuple[Any, ...], given: dict[str, Any]) -> Any:
    prepared = state_of(model, PreparedModel)
    if prepared is not None and not isinstance(given.get("cp_batch"), ModelCall):
        say_longest(model, None)
        end_call(model)
    handed_on = None if prepared is None else prepared.enter(model, by_place, given)
    if handed_on is not None:
        say_longest(model, given["cp_batch"].longest - 1, given["position_ids"].device)
        by_place, given = (), handed_on
    call = given.get("cp_batch")
    if prepared is not None and isinstance(call, ModelCall):
        given = given | {ROUTER_SWITCH: True} if prepared.inner and call.routing is not None else given
        if prepared.images is not None and not prepared.images.where:
            begin_call(model, prepared.images, call.sequences, given)
    return by_place, given


def _after(model: Any, _: tuple[Any, ...], given: dict[str, Any], out: Any) -> Any:
    prepared, call = state_of(model, PreparedModel), given.get("cp_batch")
    if prepared is None or not isinstance(call, ModelCall) or call.prepared is not prepared:
        return out
    say_longest(model, None)
    end_call(model)
    return prepared.leave(model, call, out)
