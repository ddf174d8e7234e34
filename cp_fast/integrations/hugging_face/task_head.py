"""The task head's loss: whose token a label belongs to, and whether the model computes a rank's part of the mean."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from cp_fast.integrations.hugging_face.slice_probe import Seen

__all__ = ["Head", "head_of", "part_of_the_mean", "pools_last_tokens"]

IGNORED = -100


@dataclass(frozen=True)
class Head:
    """How a model uses labels.

    Args:
        shifts: a label is that of the token before it, as in a language model.
        native: the model's own loss, of a rank's tokens, is their part of the mean over all ranks' tokens.
    """

    shifts: bool
    native: bool


def head_of(model: nn.Module, seen: Seen) -> Head | str | None:
    """The head, found by its loss. None for a model without an argument `labels`. A text says why a loss is not the
    mean cross entropy of tokens: such a model takes no labels over ranks.
    """
    if "labels" not in inspect.signature(model.forward).parameters:
        return None
    name, ids = type(model).__name__, seen.rows.ids
    logits = _of(model(input_ids=ids, **seen.arguments), "logits")
    if logits is None or logits.dim() != 3:
        shape = None if logits is None else list(logits.shape)
        return f"{name}'s loss is not of logits [b, s, classes] (logits are {shape})"
    labels = logits.argmax(-1)  # A token's own label costs little, the next one's more. The first label costs much.
    labels[:, 0], labels[:, 4] = logits[:, 0].argmin(-1), IGNORED
    try:
        loss = _of(model(input_ids=ids, labels=labels, **seen.arguments), "loss")
    except (ValueError, RuntimeError, TypeError, IndexError, KeyError) as error:
        return f"{name} computes no loss from one label a token: {error}"
    if loss is None:
        return f"{name} computes no loss from one label a token"
    targets = {False: labels, True: F.pad(labels[:, 1:], (0, 1), value=IGNORED)}  # by Head.shifts
    losses = {shifts: part_of_the_mean(logits, x, (x != IGNORED).sum()) for shifts, x in targets.items()}
    found = [shifts for shifts, expected in losses.items() if _same(loss, expected)]
    if len(found) == 2 and logits.shape[-1] > 1:
        errors = {shifts: float((loss - expected).abs()) for shifts, expected in losses.items()}
        found = [shifts for shifts in found if 10 * errors[shifts] < errors[not shifts]]
        if not found:
            return f"{name} gives all classes the same logits, so its labels may be those of the next tokens or not"
    if found:  # every loss of one class is 0: its labels stay where they are
        return Head(found[0], _is_native(model, seen, targets[found[0]]))
    return (
        f"{name}'s loss ({float(loss.mean()):.4f}) is not the mean cross entropy of its tokens; cp_fast cannot tell "
        "the ranks' parts of it"
    )


def pools_last_tokens(model: nn.Module) -> bool:
    """Whether the model's logits [b, n] are those that its module `score` gives to each row's last token, as those of
    sequence classifiers and reward models that are decoders. It is run on two rows, of which the second ends with
    padding, or on one where it has no padding.
    """
    score, config = getattr(model, "score", None), cast(Any, model).config.get_text_config()
    if not isinstance(score, nn.Module):
        return False
    plain = [token for token in range(min(config.vocab_size, 20)) if token != config.pad_token_id][:6]
    rows = [plain] if config.pad_token_id is None else [plain, [*plain[:4], *[config.pad_token_id] * 2]]
    ids = torch.tensor(rows, device=next(model.parameters()).device)
    of_tokens: list[torch.Tensor] = []
    handle = score.register_forward_hook(lambda _, __, out: of_tokens.append(cast(Any, out)))
    try:
        logits = _of(model(input_ids=ids, attention_mask=(ids != config.pad_token_id).long()), "logits")
    finally:
        handle.remove()
    if logits is None or logits.dim() != 2 or len(of_tokens) != 1 or of_tokens[0].shape[:2] != ids.shape:
        return False
    last = torch.tensor([5, 3][: len(rows)], device=ids.device)
    return torch.equal(logits, of_tokens[0][torch.arange(len(rows), device=ids.device), last])


def _of(out: Any, name: str) -> torch.Tensor | None:
    return out.get(name) if isinstance(out, Mapping) else None


def part_of_the_mean(logits: torch.Tensor, targets: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """The summed cross entropy of these tokens over `count`, as a scalar of float32 or wider.

    Args:
        logits: [b, s, classes].
        targets: [b, s], int64, -100 where nothing is to be learnt.
        count: the counted tokens of all ranks.

    >>> part_of_the_mean(torch.zeros(1, 3, 2), torch.tensor([[0, 1, -100]]), 4)  # two tokens of four, ln 2 each
    tensor(0.3466)
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.flatten().to(wide.device)
    total = F.cross_entropy(wide.flatten(0, -2), targets, ignore_index=IGNORED, reduction="sum")
    return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)


def _is_native(model: nn.Module, seen: Seen, targets: torch.Tensor) -> bool:
    kept = seen.rows.kept
    mine = targets[:, kept]
    count = (targets != IGNORED).sum()
    arguments = {**seen.arguments, "position_ids": seen.arguments["position_ids"][:, kept]}
    given = {"labels": mine, "shift_labels": mine, "num_items_in_batch": count}
    out = model(input_ids=seen.rows.ids[:, kept], **arguments, **given)
    return _same(out["loss"], part_of_the_mean(out["logits"], mine, count))


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    coarse = x.dtype in (torch.bfloat16, torch.float16)
    return x.dim() == 0 and bool(torch.isclose(x.double(), y.double(), rtol=1e-2 if coarse else 1e-4, atol=1e-7))
