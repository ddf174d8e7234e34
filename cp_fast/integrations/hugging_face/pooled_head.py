"""Heads with one row of logits for each sequence: sequence classifiers and reward models that are decoders.

Such a model makes logits of every token, [b, s, n], and keeps those of one token of each row. By transformers' rule
that is the rightmost token whose id is not the padding id, whatever the mask says. So a document whose end token is the
padding token is read at the token before it. The token lies on any rank: the ranks tell each other where it is.
Each adds the logits of the tokens on it. So all ranks have the logits of all sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from cp_fast.integrations.token_batches import CpBatch
from cp_fast.runtime.handles import outside_of_graphs

__all__ = ["PooledCall", "Pooling", "pooling_of"]

_HEADS = ("score", "classifier")  # Models of transformers give the module these names.


@dataclass(frozen=True)
class Pooling:
    """How a model gets the logits [b, n] of sequences from those of their tokens.

    Args:
        head: the name of the module whose outputs [b, s, n] it chooses from.
        by_ids: it reads each row at the rightmost token whose id is not `pad_token_id`, as transformers does. If not,
            at the last one of the mask.
    """

    head: str
    by_ids: bool


class PooledCall:
    """One call of a model whose logits are pooled: where its sequences are read, and the logits of this rank's tokens.

    It begins before the model runs, and may raise then, on all ranks. `pooled` ends it. Collective.

    Args:
        ids: int [b, s/cp], the call's input_ids; None where it has embeddings.

    Raises:
        ValueError: a row would be read at padding. RuntimeError: the model has no module of the head's name any more.
    """

    def __init__(self, model: Any, pooling: Pooling, sequences: CpBatch, ids: torch.Tensor | None) -> None:
        self.model, self.head, self.sequences = type(model).__name__, pooling.head, sequences
        self.of_tokens: Any = None
        if torch.compiler.is_compiling():
            outside_of_graphs(PooledCall._begin, self, model, pooling, ids)
        else:
            self._begin(model, pooling, ids)

    def _begin(self, model: Any, pooling: Pooling, ids: torch.Tensor | None) -> None:
        head = getattr(model, pooling.head, None)
        if not isinstance(head, nn.Module):
            raise RuntimeError(self._lost("has no module"))
        padding = model.config.get_text_config().pad_token_id if pooling.by_ids and ids is not None else None
        self.read = self._last_tokens(pooling, ids, padding)

        def keep(_: Any, __: Any, out: Any) -> None:
            handle.remove()
            self.of_tokens = out

        # For one call: the module may be another one at the next, as when adapters come or go.
        handle = head.register_forward_hook(keep)

    def pooled(self) -> torch.Tensor:
        """The logits of all sequences, on all ranks: [documents or rows, n]. Collective, also in the backward pass."""
        x = self.of_tokens
        if not isinstance(x, torch.Tensor) or x.shape[:2] != self.read.shape:
            shape = f", which returned {list(x.shape)}" if isinstance(x, torch.Tensor) else ""
            raise RuntimeError(self._lost(f"does not take the logits of each token from its module{shape}:"))
        self.of_tokens = None
        return self.sequences.sum_over(self.read, x).to(x.dtype)

    def _last_tokens(self, pooling: Pooling, ids: torch.Tensor | None, padding: int | None) -> torch.Tensor:
        """int64 [b, s/cp] on the CPU: the number of the sequence that is read at this token, else -1."""
        if not pooling.by_ids:
            return self.sequences.last_tokens()
        wanted = torch.ones(self.sequences.documents.shape, dtype=torch.bool, device="cpu")
        if ids is not None and padding is not None:
            wanted = (ids != padding).cpu()
        read, odd = self.sequences.rightmost(wanted)
        if odd is None:
            return read
        if ids is None:
            raise ValueError(
                f"{self.model} is given inputs_embeds, and so reads each row at its end, which is padding in row "
                f"{odd}; give it input_ids, or rows without padding"
            )
        how = "config.pad_token_id is None" if padding is None else f"id that is not config.pad_token_id ({padding})"
        raise ValueError(
            f"{self.model} would read row {odd} at padding: {how if padding is None else f'it has an {how} there'}. "
            "Fill padding with the id that model.config.pad_token_id has, or set that entry"
        )

    def _lost(self, what: str) -> str:
        return f"{self.model} {what} {self.head}, where prepare saw its logits of tokens; it needs another prepare"


def pooling_of(model: nn.Module) -> Pooling | None:
    """How the model pools the logits of tokens; None where it does not. It is run on three rows: a plain one, one with
    padding behind its tokens, and one whose mask calls a padding id a token.
    """
    heads = [name for name in _HEADS if isinstance(getattr(model, name, None), nn.Module)]
    size = cast(Any, model).config.get_text_config().vocab_size if heads else 0
    if size < 2:
        return None
    padding = min(6, size - 1)
    plain = [token % padding for token in range(6)]
    rows = [plain, [*plain[:4], padding, padding], [*plain[:5], padding]]
    ids = torch.tensor(rows, device=next(model.parameters()).device)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    found: dict[str, list[Any]] = {name: [] for name in heads}
    handles = [
        getattr(model, name).register_forward_hook(lambda _, __, out, name=name: found[name].append(out))
        for name in heads
    ]
    try:
        with _padded_with(model, padding):
            out = model(input_ids=ids, attention_mask=mask)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return None  # Later runs report any such error for the whole model.
    finally:
        for handle in handles:
            handle.remove()
    logits = out.get("logits") if isinstance(out, Mapping) else None
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2:
        return None
    for by_ids, last in ((True, [5, 3, 4]), (False, [5, 3, 5])):
        for name, outs in found.items():
            if len(outs) != 1 or not isinstance(outs[0], torch.Tensor) or outs[0].shape[:-1] != ids.shape:
                continue
            if torch.equal(logits, outs[0][[0, 1, 2], last].to(logits.dtype)):
                return Pooling(name, by_ids)
    return None


@contextmanager
def _padded_with(model: Any, padding: int) -> Iterator[None]:
    """The model with this padding id in its configuration."""
    some = {id(c): c for c in (model.config, model.config.get_text_config())}.values()
    configs = [config for config in some if hasattr(config, "pad_token_id")]  # Models of images have it in the latter.
    before = [config.pad_token_id for config in configs]
    try:
        for config in configs:
            config.pad_token_id = padding
        yield
    finally:
        for config, one in zip(configs, before, strict=True):
            config.pad_token_id = one
