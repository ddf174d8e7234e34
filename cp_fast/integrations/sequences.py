"""Numbers of whole sequences, from tokens that are spread over ranks: what losses of preference are made of.

    part = shard_batch(batch, cp=context, fill={"reference": 0.0})
    chosen = token_log_probs(model, part)                    # one a token of this rank
    scores = sequence_sum(chosen - part.pop("reference"), part)  # one a document, the same on all ranks
    (loss_of(scores) / context.size).backward()

DPO (Rafailov et al. 2023), KTO (Ethayarajh et al. 2024) and GRPO (Shao et al. 2024) are functions of these.
`examples/preference.py` has each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cp_fast.integrations.hugging_face.module_states import state_of
from cp_fast.integrations.hugging_face.prepared_model import PreparedModel, prepared_model
from cp_fast.integrations.hugging_face.task_head import MARKS, LogitsTransform, calling
from cp_fast.integrations.shared.drop_in import check_floats
from cp_fast.integrations.token_batches import CpBatch
from cp_ref.batches.tensors import wide_dtype
from cp_ref.groups.agreement import merged
from cp_ref.schedules.values import kind_of, read_number

__all__ = ["sequence_sum", "token_log_probs", "token_log_probs_and_entropy"]

_IGNORED = -100
_CHUNK_BYTES = 2**29  # Of one chunk's logits and their gradients.
_COPIES = 5  # A logit and its gradient take this many float32 numbers.
_COPIES_WITH_ENTROPY = 8


def sequence_sum(values: torch.Tensor, part: Any) -> torch.Tensor:
    """Sum values over each sequence, over all ranks that have its tokens. Collective, forward and backward.

    Args:
        values: [b, s/cp], one for each of this rank's tokens, of a floating dtype. Those of padding are left out.
        part: what `shard_batch` returned, or its `cp_batch`.

    Returns:
        float32 [n] (float64 of float64), one for each document of a packed batch, else for each row: the same on all
        ranks. Its gradients are those of the sum of all ranks' losses. So a loss that every rank computes from these
        sums is divided by cp_size before `backward`, like each rank's part of a mean. Every rank's loss has to depend
        on them.

    Raises:
        ValueError, TypeError: values are not one a token, here or on another rank.

    >>> from cp_fast import ContextParallel
    >>> from cp_fast.integrations.token_batches import shard_tokens
    >>> from cp_ref import SimGroup
    >>> batch = {"input_ids": torch.arange(5)[None], "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    >>> def one(member):
    ...     part = shard_tokens(batch, cp=ContextParallel(member))
    ...     return sequence_sum(part["input_ids"].float(), part)  # 0 + 1 + 2 and 3 + 4
    >>> SimGroup(2).run(one)
    [tensor([3., 7.]), tensor([3., 7.])]
    """
    sequences = _sequences(part)

    def read() -> torch.Tensor:
        check_floats("values", values)
        documents = sequences.documents
        if values.shape != documents.shape:
            raise ValueError(
                f"values has shape {list(values.shape)}; it must be [b, s/cp] = {list(documents.shape)}, one for each "
                "of this rank's tokens"
            )
        return documents

    merged(sequences.cp, "a sum over sequences", lambda: read() is None, any)
    return sequences.sum_over(read(), values)


def token_log_probs(model: torch.nn.Module, part: Mapping[str, Any], *, temperature: float = 1.0) -> torch.Tensor:
    """Compute the log-probability that a causal language model gives to the label of each of this rank's tokens.

    The model's head computes a few hundred tokens at a time, and again in the backward pass. So logits of all tokens
    never exist. In addition to hidden states and weights it takes half a gibibyte, and up to three gradients of the
    head's weight where that is trained. Every other keyword of `part` reaches the model as it stands.

    Args:
        model: that `prepare` has prepared, also inside DDP, FSDP or PEFT.
        part: what `shard_batch` returned for a batch with labels, without entries that the model does not take.
        temperature: what the model's logits are divided by before the softmax, as where the tokens were sampled.

    Returns:
        float32 [b, s/cp] (float64 of a float64 model): at each token the log-probability of its `shift_labels`, the
        token behind it; 0 where that is -100. Differentiable.

    Raises:
        TypeError, ValueError: the part has no labels; the model has no head that gives logits of a vocabulary; a
        wrapper rounds the model's outputs (`output_dtype` of FSDP's MixedPrecisionPolicy); a temperature that is not a
        positive number.
        NotImplementedError: the model changes logits otherwise than by a scale and a cap, or than it did at `prepare`;
        its name is in the error.
    """
    return _of_labels(model, part, temperature, entropy=False)[0]


def token_log_probs_and_entropy(
    model: torch.nn.Module, part: Mapping[str, Any], *, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `token_log_probs`, and the entropy of the distribution that each label is drawn from, in one pass.

    Args:
        model, part, temperature: as of `token_log_probs`.

    Returns:
        Two of float32 [b, s/cp] (float64 of a float64 model), both 0 where the label is -100: the log-probabilities,
        and the entropies in nats, -sum(p * log(p)) over the vocabulary, of the logits divided by the temperature. Both
        are differentiable. Chunks are smaller than those of `token_log_probs`, in the same memory.

    Raises:
        As `token_log_probs`.
    """
    found = _of_labels(model, part, temperature, entropy=True)
    return found[0], found[1]


def _of_labels(
    model: torch.nn.Module, part: Mapping[str, Any], temperature: float, *, entropy: bool
) -> tuple[torch.Tensor, ...]:
    """The log-probability of each token's label and, where asked for, the entropy: one or two of [b, s/cp]."""
    _sequences(part)
    divisor = read_number("temperature", temperature, positive=True)
    targets = part.get("shift_labels")
    if targets is None:
        raise ValueError("part has no shift_labels; give shard_batch a batch with labels, -100 where nothing counts")
    prepared_model(model)
    inner: Any = next(m for m in model.modules() if state_of(m, PreparedModel) is not None)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if head is None:
        raise TypeError(f"{type(inner).__name__} has no output embeddings, so it gives no logits of a vocabulary")
    transform, cure = prepared_model(inner).task.transform, "compute log-probabilities from model(**part).logits"
    if isinstance(transform, str):
        raise NotImplementedError(f"{transform}; {cure}")
    given = {n: x for n, x in part.items() if n not in ("labels", "shift_labels", "num_items_in_batch")}
    kept: list[torch.Tensor] = []
    with calling(head, _chunked(head, targets, transform, divisor, entropy, kept)):
        out = model(**given)
    marks = out["logits"] if isinstance(out, Mapping) else out[0]
    if len(kept) != 1 or marks.shape != (*targets.shape, len(MARKS)):
        raise NotImplementedError(
            f"{type(inner).__name__} does not call its output embeddings ({type(head).__name__}) on each token once; "
            f"{cure}"
        )
    if marks.dtype != wide_dtype(marks.dtype):
        raise TypeError(
            f"the model's outputs are {marks.dtype}, which would round log-probabilities; give FSDP's "
            "MixedPrecisionPolicy no output_dtype, or torch.float32"
        )
    if not transform.gives(marks):
        raise NotImplementedError(
            f"{type(inner).__name__} changes logits behind its output embeddings otherwise than when it was prepared; "
            f"call prepare(model, cp) again, or {cure}"
        )
    found: torch.Tensor = cast(Any, _Behind).apply(kept[0], marks)
    return found.unbind(-1)


def _chunked(
    head: Any, targets: torch.Tensor, transform: LogitsTransform, temperature: float, entropy: bool, kept: list[Any]
) -> Callable[..., torch.Tensor]:
    """A forward for a model's head. It keeps the values asked for, [b, s/cp, 1 or 2], and returns `MARKS` for each
    token. They show what the model does to logits.
    """
    forward, copies = head.forward, _COPIES_WITH_ENTROPY if entropy else _COPIES

    def of_tokens(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = forward(hidden)
        logits = transform(logits.to(wide_dtype(logits.dtype)))
        logits = logits if temperature == 1 else logits / temperature
        if not entropy:
            return -F.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="none")[:, None]
        logs = logits.log_softmax(-1)
        found = logs.gather(-1, labels.clamp(min=0)[:, None]), -(logs.exp() * logs).sum(-1, keepdim=True)
        return torch.cat(found, dim=-1).masked_fill((labels == _IGNORED)[:, None], 0)

    def chunks(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[:-1] != targets.shape:
            raise ValueError(f"the head is given {list(hidden.shape[:-1])} tokens; labels are {list(targets.shape)}")
        chunk = max(1, _CHUNK_BYTES // (4 * copies * head.weight.shape[0]))
        pieces = zip(hidden.flatten(0, -2).split(chunk), targets.flatten().to(hidden.device).split(chunk), strict=True)
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        found = torch.cat([checkpoint(of_tokens, x, labels, **how) for x, labels in pieces])
        kept.append(found.unflatten(0, targets.shape))
        marks = torch.tensor(MARKS, dtype=found.dtype, device=found.device).expand(*targets.shape, -1)
        return cast(Any, _Behind).apply(marks, kept[-1])

    return chunks


class _Behind(torch.autograd.Function):
    """The first of two tensors. The backward pass also goes through the other one, with zeros, before what made it: so
    the hooks that a wrapper has on a model's outputs run first, as always.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.other = other.shape, other.dtype, other.device
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        shape, dtype, device = ctx.other
        return grad, torch.zeros(shape, dtype=dtype, device=device)


def _sequences(part: Any) -> CpBatch:
    sequences = part.get("cp_batch") if isinstance(part, Mapping) else part
    if not isinstance(sequences, CpBatch):
        raise TypeError(f"part is {kind_of(part)}; it must be what shard_batch returned, or its cp_batch")
    return sequences
