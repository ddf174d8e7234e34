"""One call of a prepared model, as its layers see it."""

from __future__ import annotations

from typing import Any

import torch

from cp_fast.integrations.hugging_face.pooled_head import PooledCall
from cp_fast.integrations.hugging_face.router_losses import Routing
from cp_fast.integrations.hugging_face.slice_probe import Probe
from cp_fast.integrations.hugging_face.task_head import SpanCall
from cp_fast.integrations.token_batches import CpBatch

__all__ = ["ALONE", "SILENT", "ModelCall", "sequences_of"]

ALONE = 'for generate() and for whole sequences call model.set_attn_implementation("sdpa") first'
SILENT = {  # Keywords that models pass on and that do not change attention or linear layers.
    *("position_ids", "cache_position", "use_cache", "num_items_in_batch", "shift_labels", "labels", "logits_to_keep"),
    *("output_hidden_states", "output_router_logits", "return_dict", "position_embeddings", "past_key_values"),
}


class ModelCall:
    """One call of a prepared model: what reaches its layers as `cp_batch`. Layers leave it behind as a mark.

    It is no dataclass, for the reason of `CpBatch`.

    Args:
        prepared: of the model that was called, which ends the call.
        sequences: of the batch.

    Attributes:
        targets, count: where the loss is computed outside of the model: the targets, and how many all ranks have.
        pooled, spans: of a head that pools the logits of tokens, and of one whose labels are spans.
        routing: where the task adds the loss of the routers.
        seed: of attention's dropout, int64 [].
    """

    def __init__(self, prepared: object, sequences: CpBatch) -> None:
        self.prepared, self.sequences = prepared, sequences
        self.targets: torch.Tensor | None = None
        self.count: torch.Tensor | None = None
        self.pooled: PooledCall | None = None
        self.spans: SpanCall | None = None
        self.routing: Routing | None = None
        self.seed: torch.Tensor | None = None

    def __deepcopy__(self, _: Any) -> ModelCall:
        return self


def sequences_of(name: str, cp_batch: Any) -> CpBatch | Probe:
    """The sequences that reach a layer as the keyword `cp_batch`; name: of the layer or function, for the error.

    Raises:
        TypeError: there are none.
    """
    sequences = cp_batch.sequences if isinstance(cp_batch, ModelCall) else cp_batch
    if sequences is None and Probe.now() is not None:
        raise NotImplementedError(
            f"{name} is not given cp_batch: its model does not hand its keywords on to its layers, which cannot know "
            "the sequences of a batch"
        )
    if not isinstance(sequences, CpBatch | Probe):
        raise TypeError(f"{name} is given cp_batch={cp_batch!r}: call the model with what shard_batch returns; {ALONE}")
    return sequences
