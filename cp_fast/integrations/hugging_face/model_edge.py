"""The checks around a prepared model's calls. A call has a rank's slice with all that belongs to it, or raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.hugging_face.longest_position import give_longest, say_longest
from cp_fast.integrations.hugging_face.slice_probe import Probe
from cp_fast.integrations.hugging_face.task_head import Head, part_of_the_mean
from cp_fast.integrations.hugging_face.token_mixers import NAME
from cp_fast.integrations.token_batches import CpBatch

__all__ = ["ALONE", "SILENT", "Edge", "Labelled", "edge_of", "put_around", "sequences_of", "take_off"]

SILENT = {  # Keywords that models pass on and that do not change attention or linear layers.
    *("position_ids", "cache_position", "use_cache", "num_items_in_batch", "shift_labels", "labels", "logits_to_keep"),
    *("output_hidden_states", "output_router_logits", "return_dict", "position_embeddings", "past_key_values"),
}
ALONE = 'for generate() and for whole sequences call model.set_attn_implementation("sdpa") first'


@dataclass(frozen=True, eq=False)
class Labelled:
    """A batch's sequences on their way through a model, with targets that its edge computes the loss of."""

    sequences: CpBatch
    targets: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True, eq=False)
class Edge:
    """The findings of `prepare` about a model.

    Args:
        cp: the context that its batches have.
        head: what the model makes of labels; None where it takes none.
        first_position: the number that the model gives to the first position of a sequence.
        caches: its calls have an argument `use_cache`.
    """

    cp: ContextParallel
    head: Head | None
    first_position: int
    caches: bool

    def __deepcopy__(self, _: Any) -> Edge:
        return self

    def enter(self, model: Any, by_place: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any] | None:
        """Check a call's arguments, and return them as the model wants them; None where it runs alone.

        Raises:
            TypeError, ValueError, NotImplementedError: what is given would be taken for something else.
        """
        name, sequences = type(model).__name__, given.get("cp_batch")
        if model.config._attn_implementation != NAME:
            if sequences is not None:
                raise ValueError(
                    f"{name} is given cp_batch while its attention is {model.config._attn_implementation!r}, which "
                    f"would take a slice for the whole; call model.set_attn_implementation({NAME!r}) first"
                )
            return None
        if not isinstance(sequences, CpBatch):
            raise TypeError(f"{name} is given cp_batch={sequences!r}: call it with what shard_batch returns; {ALONE}")
        if sequences.cp.group != self.cp.group:
            raise ValueError(f"cp_batch is of another group of ranks than the one that {name} was prepared for")
        if by_place:
            raise TypeError(f"{name} is given {len(by_place)} arguments by place; give all by name: **shard_batch(...)")
        if given.get("output_router_logits"):
            raise NotImplementedError(
                "output_router_logits is True, which cp_fast does not support: a router's auxiliary loss is not a sum "
                "over tokens"
            )
        if given.get("position_ids") is None:
            raise TypeError(
                f"{name} is given no position_ids, and would number a slice's tokens from its own first: call it with "
                "all that shard_batch returns"
            )
        if (kept := given.get("logits_to_keep")) is not None and (isinstance(kept, torch.Tensor) or kept):
            raise NotImplementedError(
                f"logits_to_keep is {kept!r}, which cp_fast does not support: it would count the tokens of a slice"
            )
        given = ({"use_cache": False} if self.caches else {}) | given
        if self.first_position:
            given["position_ids"] = given["position_ids"] + self.first_position
        return self._with_labels(name, sequences, given)

    def leave(self, given: dict[str, Any], out: Any) -> Any:
        """The model's outputs, with the loss where its edge has the labels."""
        sequences = given.get("cp_batch")
        if not isinstance(sequences, Labelled):
            return out
        logits = out["logits"] if isinstance(out, Mapping) else out[0]
        loss = part_of_the_mean(logits, sequences.targets, sequences.count)
        if not isinstance(out, Mapping):
            return (loss, *out)
        kind: Any = type(out)
        return kind(loss=loss, **{name: x for name, x in out.items() if name != "loss"})

    def _with_labels(self, name: str, sequences: CpBatch, given: dict[str, Any]) -> dict[str, Any]:
        labels, shifted = given.get("labels"), given.get("shift_labels")
        if labels is None and shifted is None:
            return given
        if self.head is None:
            raise TypeError(f"{name} takes no labels; cp_fast.integrations.loss has losses of what it returns")
        if (shifted is not None) != self.head.shifts:
            how, other = ("shifted", "own") if shifted is not None else ("each token's own", "next")
            raise ValueError(
                f"labels are {how}, but {name} learns each token's {other}: call "
                "shard_batch(batch, cp=..., model=model)"
            )
        if given.get("num_items_in_batch") is None:
            raise ValueError(f"{name} is given labels without num_items_in_batch; shard_batch returns both")
        if self.head.native:
            return given
        targets: Any = shifted if self.head.shifts else labels
        count = torch.as_tensor(given["num_items_in_batch"])
        rest = {n: x for n, x in given.items() if n not in ("labels", "shift_labels", "num_items_in_batch")}
        return rest | {"cp_batch": Labelled(sequences, targets, count)}


def sequences_of(name: str, cp_batch: Any) -> CpBatch | Probe:
    """The sequences that reach a layer as the keyword `cp_batch`; name: of the layer or function, for the error.

    Raises:
        TypeError: there are none.
    """
    sequences = cp_batch.sequences if isinstance(cp_batch, Labelled) else cp_batch
    if not isinstance(sequences, CpBatch | Probe):
        raise TypeError(
            f"{name} is given cp_batch={cp_batch!r}: call the model with what shard_batch returns; a model that does "
            f"not hand its keywords on to its attention cannot be run under context parallelism; {ALONE}"
        )
    return sequences


def put_around(model: nn.Module, edge: Edge) -> None:
    """Have the model's calls pass this edge."""
    if "_cp_fast_edge" not in model.__dict__:
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, with_kwargs=True)
    give_longest(model)
    model.__dict__["_cp_fast_edge"] = edge


def take_off(model: nn.Module) -> None:
    """Check the model's calls no longer."""
    if "_cp_fast_edge" in model.__dict__:
        model.__dict__["_cp_fast_edge"] = None
        say_longest(model, None)


def edge_of(model: nn.Module) -> Edge:
    """A prepared model's edge, also through wrappers (DDP, FSDP, PEFT).

    Raises:
        ValueError: the model was not prepared.
    """
    edges = (module.__dict__.get("_cp_fast_edge") for module in model.modules())
    found = next((edge for edge in edges if edge is not None), None)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} was not prepared; call cp_fast.integrations.transformers.prepare(model, cp)"
        )
    return found


def _before(model: Any, by_place: tuple[Any, ...], given: dict[str, Any]) -> Any:
    edge = model.__dict__["_cp_fast_edge"]
    say_longest(model, None)
    handed_on = None if edge is None else edge.enter(model, by_place, given)
    if handed_on is None:
        return None
    say_longest(model, given["cp_batch"].longest - 1, given["position_ids"].device)
    return (), handed_on


def _after(model: Any, _: tuple[Any, ...], given: dict[str, Any], out: Any) -> Any:
    edge = model.__dict__["_cp_fast_edge"]
    say_longest(model, None)
    return out if edge is None else edge.leave(given, out)
