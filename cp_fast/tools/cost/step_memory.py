"""The memory of a rank in a whole training step: weights, gradients, states, what layers save, and the running layer.

The model is a decoder of the Llama and Qwen3 kind: norms that compute in float32, on q and k too; an MLP with a gate;
one matrix for embedding and head. FSDP2 shards its weights, one group a layer; the group of the embedding stays whole
through the backward pass. AdamW has two states of the weights' dtype. The loss is computed by chunks of tokens.

Memory is fullest in the loss, or while a layer's MLP or attention runs in the backward pass: of the last layer, before
which all layers have saved, or of the first one, after which all have gradients. Not counted: CUDA's, NCCL's and the
allocator's own, and peers' staging buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from cp_ref.schedules.problem import Problem
from cp_ref.schedules.values import check_choice
from cp_ref.schedules.verify.costs import ITEM_BYTES

__all__ = ["SAVED", "ModelShape", "StepMemory", "step_memory"]

SAVED = ("offload", "attention", "layers", "all")  # Kept for the backward pass, from least to most.
_FLOAT = 4  # Bytes.
_CHUNK = 2048  # Tokens whose logits exist at once.
_GATHERED = 2  # Layers whose whole weights or gradients are there.
_OFFLOADED = 2  # Layers whose results of attention are on the device.


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes, besides those of its attention.

    >>> ModelShape.read("36,2560,9728,151936").hidden
    2560
    """

    layers: int
    hidden: int
    ffn: int
    vocabulary: int

    @staticmethod
    def read(text: str) -> ModelShape:
        """From "layers,hidden,ffn,vocabulary"; a ValueError for anything else."""
        words = text.split(",")
        if len(words) != 4 or not all(word.strip().isdecimal() and int(word) for word in words):
            raise ValueError(f"a model is layers,hidden,ffn,vocabulary, four numbers of at least 1; got {text!r}")
        return ModelShape(*map(int, words))


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a rank at the time when memory is fullest, by what they are for."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())


def step_memory(
    problem: Problem, attention_bytes: int, model: ModelShape, *, saved: str = "offload", sharded_over: int = 1
) -> StepMemory:
    """Predict the memory of the rank with the most tokens.

    Args:
        problem: the attention of one layer.
        attention_bytes: the most bytes of a call above its inputs, messages included, as `Prediction.peak_bytes`.
        model: the other sizes.
        saved: for the backward pass; "all" activations (no checkpointing), the inputs of "layers" (all of a layer is
            recomputed), also the results of "attention", or these in the host's memory ("offload").
        sharded_over: ranks over which FSDP2 shards the weights; 1: each rank has all.
    """
    check_choice("saved", saved, SAVED)
    item = ITEM_BYTES[problem.dtype]
    slices = [problem.slots.q.of(rank) for rank in range(problem.cp_size)]
    tokens = max(int((own.stop - own.start).sum()) for own in slices)
    hidden, ffn, layers = model.hidden, model.ffn, model.layers
    q, k = problem.heads_q * problem.d_qk, problem.heads_kv * problem.d_qk
    v, out = problem.heads_kv * problem.d_v, problem.heads_q * problem.d_v
    layer = (hidden * (q + k + v + out) + 3 * hidden * ffn) * item
    embedding = model.vocabulary * hidden * item

    norm = _FLOAT + 2 * item  # Of a number: in float32, rounded, and scaled.
    inputs = tokens * hidden * item
    results = tokens * (out * item + problem.heads_q * _FLOAT)
    attention = tokens * ((hidden + q + k) * norm + v * item) + results
    mlp = tokens * (hidden * norm + 4 * ffn * item)  # The gate, its SiLU, the other factor, the product.
    kept, here = {  # By all layers; and by the running one besides.
        "offload": (layers * inputs + min(layers, _OFFLOADED) * results, attention + mlp - results),
        "attention": (layers * (inputs + results), attention + mlp - results),
        "layers": (layers * inputs, attention + mlp),
        "all": (layers * (inputs + attention + mlp), 0),
    }[saved]
    loss = 3 * min(tokens, _CHUNK) * model.vocabulary * _FLOAT + 3 * inputs  # Logits, their logarithms, the gradient.
    times = {
        "running layer": here + tokens * (2 * ffn + hidden) * item,  # Gradients inside the MLP.
        "running attention": here - (mlp if here else 0) + attention_bytes + 2 * inputs,
        "loss": loss,
    }
    busiest = max(times, key=lambda name: times[name])
    gradients = layers * layer // sharded_over
    first_is_fullest = kept >= gradients + kept // layers  # Layers give back what they saved, and leave gradients.
    whole = 2 * embedding + _GATHERED * layer if sharded_over > 1 else embedding
    return StepMemory(
        {
            "weights": (layers * layer + embedding) // sharded_over,
            "AdamW's states": 2 * (layers * layer + embedding) // sharded_over,
            "whole weights and gradients": whole,
            "gradients of layers": 0 if first_is_fullest else gradients,
            "saved by layers": kept if first_is_fullest else kept // layers,
            busiest: times[busiest],
        }
    )
