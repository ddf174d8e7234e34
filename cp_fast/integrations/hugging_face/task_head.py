"""The task head: whose token a label belongs to, whether the model computes a rank's part of the mean of their losses,
the losses of spans, and what a model does to the numbers of its output embeddings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from cp_fast.integrations.hugging_face.slice_probe import Seen
from cp_fast.integrations.token_batches import CpBatch
from cp_ref.batches.tensors import wide_dtype
from cp_ref.groups.agreement import merged
from cp_ref.groups.collectives import all_reduce_max
from cp_ref.schedules.values import check_tensor

__all__ = [
    "MARKS",
    "SPANS",
    "Head",
    "LogitsTransform",
    "SpanCall",
    "calling",
    "head_of",
    "part_of_the_mean",
    "same_loss",
    "spans_of",
    "transform_of",
]

IGNORED = -100
_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)  # of a model that is run

# ---- labels of tokens


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
    except _ERRORS as error:
        return f"{name} computes no loss from one label a token: {error}"
    if loss is None:
        return f"{name} computes no loss from one label a token"
    targets = {False: labels, True: F.pad(labels[:, 1:], (0, 1), value=IGNORED)}  # by Head.shifts
    losses = {shifts: part_of_the_mean(logits, x, (x != IGNORED).sum()) for shifts, x in targets.items()}
    found = [shifts for shifts, expected in losses.items() if same_loss(loss, expected)]
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
    places = seen.rows.places
    mine = targets[:, places]
    count = (targets != IGNORED).sum()
    arguments = {**seen.arguments, "position_ids": seen.arguments["position_ids"][:, places]}
    given = {"labels": mine, "shift_labels": mine, "num_items_in_batch": count}
    out = model(input_ids=seen.rows.ids[:, places], **arguments, **given)
    return same_loss(out["loss"], part_of_the_mean(out["logits"], mine, count))


def same_loss(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two losses are equal up to rounding."""
    coarse = x.dtype in (torch.bfloat16, torch.float16)
    return x.dim() == 0 and bool(torch.isclose(x.double(), y.double(), rtol=1e-2 if coarse else 1e-4, atol=1e-7))


# ---- labels that are spans
#
# A question-answering head gives each token two logits, for the first and the last token of an answer. Its loss is a
# cross entropy over the places of a row, which lie on all ranks.


SPANS = ("start_positions", "end_positions")
_OF_SPANS = ("start_logits", "end_logits")


def spans_of(model: nn.Module, seen: Seen) -> bool:
    """Whether the model's loss of start_positions and end_positions is the mean of the two means over rows, without
    positions behind the row.
    """
    if not set(SPANS) <= set(inspect.signature(model.forward).parameters):
        return False
    ids = seen.rows.ids.expand(2, -1)
    given = {n: x.expand(2, -1) if n == "position_ids" else x for n, x in seen.arguments.items()}
    length = ids.shape[1]
    targets = [torch.tensor(x, device=ids.device) for x in ([3, length + 4], [7, 9])]
    try:
        out = model(input_ids=ids, **given, **dict(zip(SPANS, targets, strict=True)))
    except _ERRORS:
        return False
    logits, loss = [_of(out, name) for name in _OF_SPANS], _of(out, "loss")
    if loss is None or any(x is None or x.shape != ids.shape for x in logits):
        return False
    losses = [
        F.cross_entropy(
            cast(torch.Tensor, x).to(wide_dtype(cast(torch.Tensor, x).dtype)), y.clamp(max=length), ignore_index=length
        )
        for x, y in zip(logits, targets, strict=True)
    ]
    return same_loss(loss, (losses[0] + losses[1]) / 2)


class SpanCall:
    """One call's spans, whose loss is computed of the logits of all ranks. Collective.

    Args:
        name: of the model.
        given: the call's other arguments.
        start_positions, end_positions: int [b], or [b, 1], places in the rows of the batch; the same on all ranks. One
            behind its row does not count.

    Raises:
        ValueError, TypeError, NotImplementedError: on all ranks: no such tensors, or of other values on another rank;
        rows with padding, whose logits enter the loss of one process.
    """

    def __init__(
        self, name: str, sequences: CpBatch, given: Mapping[str, Any], start_positions: Any, end_positions: Any
    ) -> None:
        self.name, self.sequences = name, sequences
        rows, length = sequences.whole_shape

        def read() -> list[list[int]]:
            found = []
            for argument, x in zip(SPANS, (start_positions, end_positions), strict=True):
                check_tensor(argument, x, "a tensor [b]; give start_positions and end_positions, or none of them")
                if x.is_floating_point() or list(x.shape) not in ([rows], [rows, 1]):
                    raise ValueError(f"{argument} is {x.dtype} {list(x.shape)}; it must be of integers, [b] = [{rows}]")
                found.append(x.flatten().clamp(0, length).tolist())
            if sequences.has_padding:
                raise NotImplementedError(
                    f"{name} is given start_positions for rows with padding, whose logits enter the loss of one "
                    "process, and which have none over ranks. Give rows of one length, or compute the loss of "
                    'part["cp_batch"].unshard(out.start_logits), without its padding'
                )
            if given.get("num_items_in_batch") is not None:
                raise NotImplementedError(
                    f"{name} is given num_items_in_batch with start_positions; its loss is the mean over rows: leave "
                    "num_items_in_batch away"
                )
            return found

        def same(everyone: list[list[list[int]]]) -> list[list[int]]:
            for argument, *each in zip(SPANS, *everyone, strict=True):
                if any(one != each[0] for one in each):
                    raise ValueError(f"{argument} is not the same on all ranks; give each the spans of whole rows")
            return everyone[0]

        self.targets = merged(sequences.cp, "an agreement on spans", read, same)

    def loss(self, out: Any) -> torch.Tensor:
        """This rank's part of the loss: all parts are equal, and add up to it. Collective, also in the backward pass.

        Args:
            out: what the model returned: start_logits and end_logits [b, s/cp].
        """
        pair = [out[name] for name in _OF_SPANS] if isinstance(out, Mapping) else [*out[:2]]
        logits = torch.stack([x.to(wide_dtype(x.dtype)) for x in pair], dim=-1)  # [b, s/cp, 2]
        rows, places = (x.to(logits.device) for x in self.sequences.places)
        count, length = self.sequences.whole_shape
        there = (rows >= 0)[..., None]
        low = logits.detach().masked_fill(~there, -torch.inf).flatten(0, 1)
        row_of = (rows.flatten() % (count + 1))[:, None].expand_as(low)
        most = low.new_full((count + 1, 2), -torch.inf).scatter_reduce(0, row_of, low, "amax")
        most = all_reduce_max(self.sequences.cp.comm, most[:count])  # of each row: exp of what is above it overflows
        above = logits - most[rows.clamp(min=0)]
        targets = torch.tensor(self.targets, device=logits.device).T  # [b, 2]
        hit = places[..., None] == targets[rows.clamp(min=0)]
        sums = torch.cat([above.exp(), above.masked_fill(~hit, 0)], dim=-1).masked_fill(~there, 0)
        total, chosen = self.sequences.sum_over(rows, sums)[:count].split(2, dim=-1)
        losses, counted = total.log() - chosen, targets < length
        means = losses.masked_fill(~counted, 0).sum(0) / counted.sum(0)
        return means.mean() / self.sequences.cp.size


# ---- behind the output embeddings
#
# A model may multiply what its output embeddings return, and cap it by a tanh. Numbers in their place show how.


MARKS = (0.0, 2.0**-20, 1.0, -8.0, 64.0, 2.0**20)
_ROUNDINGS = 64  # of the largest number, that a transform may be off


@dataclass(frozen=True)
class LogitsTransform:
    """How a model makes logits of the numbers that its output embeddings return: scale * x, or, with a cap,
    cap * tanh(scale * x / cap).
    """

    scale: float
    cap: float | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        return x if self.cap is None else self.cap * torch.tanh(x / self.cap)

    def gives(self, marks: torch.Tensor) -> bool:
        """Whether these are its results, [..., n], for `MARKS`."""
        expected = self(torch.tensor(MARKS, dtype=torch.float64, device=marks.device)).to(marks.dtype)
        return torch.allclose(marks.detach(), expected.expand_as(marks), rtol=_ROUNDINGS * torch.finfo(marks.dtype).eps)


def transform_of(model: nn.Module, seen: Seen) -> LogitsTransform | str:
    """The transform that the model applies, or a text that says why none is known here."""
    name, head = type(model).__name__, _output_embeddings(model)
    if head is None:
        return f"{name} has no output embeddings, so it gives no logits of a vocabulary"
    dtype = wide_dtype(next(head.parameters()).dtype)

    def marks(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.tensor(MARKS, dtype=dtype, device=x.device).expand(*x.shape[:-1], -1)

    odd = f"{name} changes logits behind its output embeddings in a way that cp_fast does not know"
    try:
        with calling(head, marks):
            logits = _of(model(input_ids=seen.rows.ids, **seen.arguments), "logits")
    except _ERRORS as error:
        return f"{odd}: {error}"
    if logits is None or logits.shape != (*seen.rows.ids.shape, len(MARKS)):
        return f"{name} does not call its output embeddings ({type(head).__name__}) on each token once"
    found = logits.flatten(0, -2)[0].double().tolist()
    scale = found[1] / MARKS[1]
    tried = [LogitsTransform(scale)] if scale and not found[0] else []
    tried += [LogitsTransform(scale, found[-1])] if tried and found[-1] else []
    return next((one for one in tried if one.gives(logits)), odd)


def _output_embeddings(model: Any) -> nn.Module | None:
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


@contextmanager
def calling(head: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The module with another forward."""
    had = vars(head).get("forward")
    vars(head)["forward"] = forward
    try:
        yield
    finally:
        if had is None:
            del vars(head)["forward"]
        else:
            vars(head)["forward"] = had
