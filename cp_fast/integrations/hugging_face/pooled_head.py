"""Heads with one row of logits for each sequence: decoders and encoders that classify sequences, and reward models.

A decoder makes logits of every token, [b, s, n], and keeps those of one token of each row. By transformers' rule
that is the rightmost token whose id is not the padding id, whatever the mask says. So a document whose end token is the
padding token is read at the token before it. The token lies on any rank: the ranks tell each other where it is.
Each adds the logits of the tokens on it. So all ranks have the logits of all sequences.

An encoder's head reads the first token of each sequence, or the mean of its tokens, and computes logits of that. Here
the ranks add up those rows before the head, which each of them runs on the rows of all sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from cp_fast.integrations.hugging_face.module_states import drop_state, hook_once, put_state, state_of
from cp_fast.integrations.hugging_face.slice_probe import trial_rows
from cp_fast.integrations.hugging_face.token_mixers import NAME
from cp_fast.integrations.token_batches import CpBatch
from cp_fast.runtime.handles import outside_of_graphs

__all__ = ["PooledCall", "PooledRows", "Pooling", "RowPooling", "begin_pooling", "pooling_of", "put_pooling"]

_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)  # of a model that is run
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


@dataclass(frozen=True)
class RowPooling:
    """How a model makes the logits [b, n] of sequences of what it knows of their tokens.

    Args:
        body: the name of the module whose first output, [b, s, d], its head reads.
        mean: it reads the mean of a sequence's tokens; if not, the first one.
    """

    body: str
    mean: bool

    def within(self, where: str) -> str | None:
        """Why a model inside, by its name, is not called by itself; None where its outputs are those of tokens."""
        if not self.body.startswith(f"{where}."):
            return None
        return f"{where} would pool a rank's slice if it is called by itself; call the model around it"


class PooledRows:
    """One call of such a model: the output of its body becomes that of one token for each sequence. Collective.

    Args:
        model: its class's name.
    """

    def __init__(self, model: str, pooling: RowPooling, sequences: CpBatch) -> None:
        self.model, self.pooling, self.sequences, self.done = model, pooling, sequences, False
        read = _all_tokens if pooling.mean else CpBatch.first_tokens
        self.read = outside_of_graphs(read, sequences) if torch.compiler.is_compiling() else read(sequences)

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s/cp, d] -> [documents or rows, 1, d]."""
        sequences = self.sequences
        if x.shape[:2] != sequences.shape:
            raise RuntimeError(
                f"{self.model}: {self.pooling.body} returned {list(x.shape)} for {sequences.shape} tokens"
            )
        self.done = True
        rows = sequences.sum_over(self.read, x)
        if self.pooling.mean:
            rows = rows / sequences.lengths.to(x.device)[:, None].clamp(min=1)
        return rows.to(x.dtype)[:, None]

    def end(self) -> None:
        """Raise where the model did not call its body."""
        if not self.done:
            raise RuntimeError(f"{self.model} did not call {self.pooling.body}; it needs another prepare")


def _all_tokens(sequences: CpBatch) -> torch.Tensor:
    return sequences.documents


def begin_pooling(
    model: Any, pooling: Pooling | RowPooling, sequences: CpBatch, ids: torch.Tensor | None
) -> PooledCall | PooledRows:
    """What a call has to do for its logits."""
    if isinstance(pooling, Pooling):
        return PooledCall(model, pooling, sequences, ids)
    call = PooledRows(type(model).__name__, pooling, sequences)
    put_state(model.get_submodule(pooling.body), call)
    return call


def put_pooling(model: nn.Module, pooling: Pooling | RowPooling | None) -> None:
    """Have the model's body look whether a call pools its output."""
    if isinstance(pooling, RowPooling):
        put_state(model, pooling)
        hook_once(model, _nothing, _forget, always=True)
        hook_once(model.get_submodule(pooling.body), _nothing, _pool, named=False)


def _nothing(*_: Any) -> None:
    return None


def _forget(model: nn.Module, *_: Any) -> None:
    """Forget a call that has raised before its body ran."""
    if (pooling := state_of(model, RowPooling)) is not None:
        drop_state(model.get_submodule(pooling.body), PooledRows)


def _pool(body: nn.Module, _: Any, out: Any) -> Any:
    call = state_of(body, PooledRows)
    if call is None:
        return None
    drop_state(body, PooledRows)
    return _with_first(out, call.pooled)


def _with_first(out: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An output with another first tensor."""
    if isinstance(out, Mapping):
        first, kind = next(iter(out)), cast(Any, type(out))
        return kind(**{name: change(x) if name == first else x for name, x in out.items()})
    return (change(out[0]), *out[1:]) if isinstance(out, tuple | list) else change(out)


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


def pooling_of(model: nn.Module) -> Pooling | RowPooling | None:
    """How the model pools; None where it does not, or in another way. It is run with its own attention."""
    with _with_own_attention(model):
        return _of_logits(model) or _of_rows(model)


def _of_rows(model: Any) -> RowPooling | None:
    """The last module whose output may become one token's, or the mean of a row's tokens, without a change of the
    logits [b, n]: the others behind it see that alone.
    """
    if "ForSequenceClassification" not in type(model).__name__ or model.base_model is model:
        return None
    ids = trial_rows(model, next(model.parameters()).device).ids
    names: list[str] = []
    inside = {module: where for where, module in model.named_modules() if where}

    def run(where: str = "", change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor | None:
        def look(module: nn.Module, _: Any, out: Any) -> Any:
            if change is not None:
                return _with_first(out, change)
            first = next(iter(out.values()), None) if isinstance(out, Mapping) else out
            first = first[0] if isinstance(first, tuple | list) and first else first
            if isinstance(first, torch.Tensor) and first.is_floating_point() and first.shape[:2] == ids.shape:
                names.append(inside[module])
            return None

        modules = [model.get_submodule(where)] if where else [*inside]
        handles = [module.register_forward_hook(look) for module in modules]
        try:
            out = model(input_ids=ids)
        except _ERRORS:
            return None
        finally:
            for handle in handles:
                handle.remove()
        return out.get("logits") if isinstance(out, Mapping) else None

    logits = run()
    if logits is None or logits.dim() != 2 or len(logits) != len(ids):
        return None
    near = 5e-2 if torch.finfo(logits.dtype).bits < 32 else 1e-4

    def same(other: torch.Tensor | None) -> bool:
        return other is not None and other.shape == logits.shape and torch.allclose(other, logits, near, near)

    for where in reversed(dict.fromkeys(names)):
        if same(run(where, lambda x: x.flip(-1))):
            continue  # The head does not read it.
        for mean in (False, True):
            if same(run(where, lambda x, mean=mean: x.mean(1, keepdim=True) if mean else x[:, :1])):
                return RowPooling(where, mean)
        return None
    return None


@contextmanager
def _with_own_attention(model: Any) -> Iterator[None]:
    """The model with an attention of transformers, where it was prepared before."""
    config, text = model.config, model.config.get_text_config()
    before = {"": config._attn_implementation, "text_config": text._attn_implementation}
    if NAME not in before.values():
        yield
        return
    model.set_attn_implementation({name: "eager" if x == NAME else x for name, x in before.items()})
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _of_logits(model: nn.Module) -> Pooling | None:
    """How the model chooses logits of tokens. It is run on three rows: a plain one, one with padding behind its tokens,
    and one whose mask calls a padding id a token.
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
    except _ERRORS:
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
