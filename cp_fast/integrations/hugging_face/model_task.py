"""The task of a model over ranks: its labels on the way in, its loss on the way out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cp_fast.integrations.hugging_face.model_call import ModelCall
from cp_fast.integrations.hugging_face.pooled_head import PooledRows, Pooling, RowPooling, begin_pooling
from cp_fast.integrations.hugging_face.router_losses import Routing, routing_asked_for, with_router_loss
from cp_fast.integrations.hugging_face.task_head import SPANS, Head, LogitsTransform, SpanCall, part_of_the_mean
from cp_fast.integrations.hugging_face.token_mixers import ROUTER_SWITCH

__all__ = ["Task", "with_output"]

_LABELS = ("labels", "shift_labels", "num_items_in_batch")


@dataclass(frozen=True, eq=False)
class Task:
    """A model's computation with labels, as `prepare` has found it. By default it has none, as a model without a head.

    Args:
        head: what the model makes of labels; None where it takes none; a text: why it can take none.
        pools: how its logits are those of sequences; None where they are of all tokens; a text: why it is not called.
        spans: it computes a loss of start_positions and end_positions.
        transform: what it does to the numbers of its output embeddings; a text: why that is not known.
        routing: how it adds a loss of its routers to that of its labels; a text: why that is not known.
    """

    head: Head | str | None = None
    pools: Pooling | RowPooling | str | None = None
    spans: bool = False
    transform: LogitsTransform | str = "it has no logits of tokens"
    routing: Routing | str = "it has no loss of labels"

    def labels_head(self, name: str, around: str = "") -> Head:
        """The head that takes the labels.

        Args:
            name: the model's, for the error.
            around: what the error says of a model around it.

        Raises:
            TypeError, NotImplementedError: it takes no labels over ranks.
        """
        if self.head is None:
            raise TypeError(f"{name} takes no labels; cp_fast.integrations.loss has losses of what it returns{around}")
        if isinstance(self.head, str):
            raise NotImplementedError(
                f"{self.head}. Leave labels away, and compute the loss from what the model returns "
                "(cp_fast.integrations.loss)"
            )
        return self.head

    def begin(self, model: Any, call: ModelCall, given: dict[str, Any], around: str) -> dict[str, Any]:
        """A call's arguments as the model is to see them. The call keeps what the model does not see. Collective.

        Raises:
            TypeError, ValueError, NotImplementedError: labels that the model would take for others.
        """
        name = type(model).__name__
        call.routing = routing_asked_for(self.routing, given, model.config)
        if any(given.get(labels) is not None for labels in ("labels", "shift_labels")):
            given = self._without_labels(name, call, given, self.labels_head(name, around))
        if call.routing is not None:
            given = given | {ROUTER_SWITCH: False}  # `end` computes it from the results of the model inside.
        if isinstance(self.pools, str):
            raise NotImplementedError(self.pools)
        if self.pools:
            call.pooled = begin_pooling(model, self.pools, call.sequences, given.get("input_ids"))
        if self.spans:
            spans = {argument: given.get(argument) for argument in SPANS}
            given = {argument: x for argument, x in given.items() if argument not in SPANS}
            if any(x is not None for x in spans.values()):
                call.spans = SpanCall(name, call.sequences, given, **spans)
        return given

    def _without_labels(self, name: str, call: ModelCall, given: dict[str, Any], head: Head) -> dict[str, Any]:
        """The arguments without labels, unless the model's own loss is this rank's part of the mean."""
        shifted = given.get("shift_labels")
        if (shifted is not None) != head.shifts:
            how, other = ("shifted", "own") if shifted is not None else ("each token's own", "next")
            raise ValueError(
                f"labels are {how}, but {name} learns each token's {other}: call "
                "shard_batch(batch, cp=..., model=model)"
            )
        if given.get("num_items_in_batch") is None:
            raise ValueError(
                f"{name} is given labels without num_items_in_batch; shard_batch returns both, and Trainer gives the "
                "number to compute_loss, which hands it on"
            )
        if head.native:
            return given
        call.targets = shifted if head.shifts else given["labels"]
        call.count = torch.as_tensor(given["num_items_in_batch"])
        return {argument: x for argument, x in given.items() if argument not in _LABELS}

    def end(self, model: Any, call: ModelCall, out: Any) -> Any:
        """The model's outputs, with what the call has kept for them. Collective."""
        if isinstance(call.pooled, PooledRows):
            call.pooled.end()
        elif call.pooled is not None:
            out = with_output(out, "logits", call.pooled.pooled())
        elif call.spans is not None:
            out = _with_loss(out, call.spans.loss(out))
        elif call.targets is not None and call.count is not None:
            logits = out["logits"] if isinstance(out, Mapping) else out[0]
            out = _with_loss(out, part_of_the_mean(logits, call.targets, call.count))
        return out if call.routing is None else with_router_loss(model, call.routing, call.sequences, out)


def with_output(out: Any, name: str, x: torch.Tensor) -> Any:
    """A model's outputs with another one of this name, which is the first of a tuple."""
    if not isinstance(out, Mapping):
        return (x, *out[1:])
    kind: Any = type(out)
    return kind(**{one: x if one == name else other for one, other in out.items()})


def _with_loss(out: Any, loss: torch.Tensor) -> Any:
    if not isinstance(out, Mapping):
        return (loss, *out)
    kind: Any = type(out)
    return kind(loss=loss, **{name: x for name, x in out.items() if name != "loss"})
