"""Numbers of whole sequences, from tokens that are spread over ranks: what losses of preference are made of.

    part = shard_batch(batch, cp=context, fill={"reference": 0.0})
    chosen = token_log_probs(model, part)                    # one a token of this rank
    scores = sequence_sum(chosen - part.pop("reference"), part)  # one a document, the same on all ranks
    (loss_of(scores) / context.size).backward()

DPO (Rafailov et al. 2023), KTO (Ethayarajh et al. 2024) and GRPO (Shao et al. 2024) are functions of these.
`examples/preference.py` has each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cp_fast.integrations.hugging_face.model_edge import edge_of
from cp_fast.integrations.shared.drop_in import check_floats
from cp_fast.integrations.token_batches import CpBatch
from cp_ref.contract.collectives import together
from cp_ref.contract.tensors import wide_dtype
from cp_ref.schedules.values import kind_of

__all__ = ["sequence_sum", "token_log_probs"]

_IGNORED = -100
_CHUNK_BYTES = 2**29  # Of one chunk's logits and their gradients.
_COPIES = 5  # A logit and its gradient take this many float32 numbers.
# Entries of configurations. Models multiply logits by them, to this power.
_SCALES = {"logits_scaling": -1, "logit_scale": 1, "lm_head_multiplier": 1}
_OF_MODELS = {"hyperclovax": {"logits_scaling": 1}}  # By model_type. Granite's entry of this name divides.
_CAP = "final_logit_softcapping"
_MARK = -64.0  # It follows each log-probability, and shows how a model changes its logits.


def sequence_sum(values: torch.Tensor, part: Any) -> torch.Tensor:
    """The sums of values over each sequence, over all ranks that have its tokens. Collective, forward and backward.

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
    >>> from cp_fast.integrations.token_batches import shard_batch
    >>> from cp_ref import SimGroup
    >>> batch = {"input_ids": torch.arange(5)[None], "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    >>> def one(member):
    ...     part = shard_batch(batch, cp=ContextParallel(member))
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

    with sequences.cp.naming_errors("a sum over sequences"):
        together([sequences.cp.comm], lambda: read() is None, any)
    return sequences.sum_over(read(), values)


def token_log_probs(model: torch.nn.Module, part: Mapping[str, Any]) -> torch.Tensor:
    """The log-probability that a causal language model gives to the label of each of this rank's tokens.

    The model's head computes a few hundred tokens at a time, and again in the backward pass. So logits of all tokens
    never exist. In addition to hidden states and weights it takes half a gibibyte, and up to three gradients of the
    head's weight where that is trained. Every other keyword of `part` reaches the model as it stands.

    Args:
        model: that `prepare` has prepared, also inside DDP, FSDP or PEFT.
        part: what `shard_batch` returned for a batch with labels, without entries that the model does not take.

    Returns:
        float32 [b, s/cp] (float64 of a float64 model): at each token the log-probability of its `shift_labels`, the
        token behind it; 0 where that is -100.

    Raises:
        TypeError, ValueError: the part has no labels; the model has no head that gives logits of a vocabulary; a
        wrapper rounds the model's outputs (`output_dtype` of FSDP's MixedPrecisionPolicy).
        NotImplementedError: the model changes logits in a way that is not known here; its name is in the error.
    """
    _sequences(part)
    targets = part.get("shift_labels")
    if targets is None:
        raise ValueError("part has no shift_labels; give shard_batch a batch with labels, -100 where nothing counts")
    edge_of(model)
    inner: Any = next(m for m in model.modules() if m.__dict__.get("_cp_fast_edge") is not None)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if head is None:
        raise TypeError(f"{type(inner).__name__} has no output embeddings, so it gives no logits of a vocabulary")
    given = {n: x for n, x in part.items() if n not in ("labels", "shift_labels", "num_items_in_batch")}
    with _log_probs_for_logits(inner, head, targets) as (factor, seen):
        out = model(**given)
    logits = out["logits"] if isinstance(out, Mapping) else out[0]
    if not seen or logits.shape != (*targets.shape, 2):
        raise NotImplementedError(
            f"{type(inner).__name__} does not call its output embeddings ({type(head).__name__}) on each token once; "
            "compute log-probabilities from model(**part).logits"
        )
    if logits.dtype != wide_dtype(logits.dtype):
        raise TypeError(
            f"the model's outputs are {logits.dtype}, which would round log-probabilities; give FSDP's "
            "MixedPrecisionPolicy no output_dtype, or torch.float32"
        )
    found, marks = logits.unbind(-1)
    rounding = 4 * torch.finfo(logits.dtype).eps
    if not torch.allclose(marks.detach(), torch.full_like(marks, _MARK * factor), rtol=rounding, atol=0):
        raise NotImplementedError(
            f"{type(inner).__name__} changes logits behind its output embeddings in a way that token_log_probs does "
            "not know; compute log-probabilities from model(**part).logits"
        )
    return found / factor


@contextmanager
def _log_probs_for_logits(inner: Any, head: Any, targets: torch.Tensor) -> Iterator[tuple[float, list[None]]]:
    """Have a model's head return log-probabilities in place of logits, each with a mark: [b, s/cp, 2].

    Yields:
        What the model multiplies its head's results by afterwards, and a list with an entry for each call of the head.
    """
    config = getattr(inner.config, "get_text_config", lambda: inner.config)()
    scales = _SCALES | _OF_MODELS.get(config.model_type, {})
    powers = [(getattr(config, name, None), power) for name, power in scales.items()]
    factor = 1.0
    for value, power in powers:
        factor *= 1.0 if value is None else float(value) ** power
    cap, seen, forward = getattr(config, _CAP, None), list[None](), head.forward

    def of_tokens(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = forward(hidden)
        logits = logits.to(wide_dtype(logits.dtype)) * factor
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return -F.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="none")

    def log_probs(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[:-1] != targets.shape:
            raise ValueError(f"the head is given {list(hidden.shape[:-1])} tokens; labels are {list(targets.shape)}")
        chunk = max(1, _CHUNK_BYTES // (4 * _COPIES * head.weight.shape[0]))
        pieces = zip(hidden.flatten(0, -2).split(chunk), targets.flatten().to(hidden.device).split(chunk), strict=True)
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        found = torch.cat([checkpoint(of_tokens, x, labels, **how) for x, labels in pieces]).view(targets.shape)
        seen.append(None)
        return torch.stack([found, torch.full_like(found, _MARK)], dim=-1)

    had = vars(head).get("forward")
    head.forward = log_probs
    if cap is not None:
        setattr(config, _CAP, None)
    try:
        yield factor, seen
    finally:
        if had is None:
            del head.forward
        else:
            head.forward = had
        if cap is not None:
            setattr(config, _CAP, cap)


def _sequences(part: Any) -> CpBatch:
    sequences = part.get("cp_batch") if isinstance(part, Mapping) else part
    if not isinstance(sequences, CpBatch):
        raise TypeError(f"part is {kind_of(part)}; it must be what shard_batch returned, or its cp_batch")
    return sequences
