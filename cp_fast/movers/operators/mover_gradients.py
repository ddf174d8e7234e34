"""Gradients of the movers: each moves them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cp_fast.movers.operators import mover_operators  # noqa: F401  (registers the operators)
from cp_fast.movers.operators.registered import LIBRARY
from cp_ref.contract.tensors import refuse_batched

__all__: list[str] = []

Tensor = torch.Tensor
Grads = Sequence[Tensor | None]


def _spread(grads: Grads, rows: Tensor, axis: int, tokens: int) -> list[Tensor | None]:
    """The gradients of `tokens` rows, of which only `rows` were read."""
    return [
        None
        if grad is None
        else grad.new_zeros(*grad.shape[:axis], tokens, *grad.shape[axis + 1 :]).index_copy_(axis, rows, grad)
        for grad in grads
    ]


def _save_reorder(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, lengths, ctx.cp_size, ctx.to_rank_order = inputs
    ctx.save_for_backward(lengths)


def _reorder_backward(ctx: Any, grads: Grads) -> tuple[Any, ...]:
    given = [grad for grad in grads if grad is not None]
    refuse_batched(*given)
    (lengths,) = ctx.saved_tensors
    moved = iter(torch.ops.cp_attention.reorder(given, lengths, ctx.cp_size, not ctx.to_rank_order) if given else [])
    return [None if grad is None else next(moved) for grad in grads], None, None, None


def _save_partition(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    xs, lengths, ctx.cp_size, ctx.cp_rank = inputs
    ctx.tokens, ctx.device = xs[0].shape[0], xs[0].device
    ctx.save_for_backward(lengths)


def _partition_backward(ctx: Any, grads: Grads) -> tuple[Any, ...]:
    (lengths,) = ctx.saved_tensors
    every_row = torch.arange(ctx.tokens, device=ctx.device)
    rows = torch.ops.cp_attention.partition([every_row], lengths, ctx.cp_size, ctx.cp_rank)[0]
    return _spread(grads, rows, 0, ctx.tokens), None, None, None


def _save_read_half(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    xs, lengths, ctx.half = inputs
    ctx.axis = int(xs[0].ndim == 4)
    ctx.tokens, ctx.device = xs[0].shape[ctx.axis], xs[0].device
    ctx.save_for_backward(lengths)


def _read_half_backward(ctx: Any, grads: Grads) -> tuple[Any, ...]:
    (lengths,) = ctx.saved_tensors
    rows = torch.ops.cp_attention.read_half([torch.arange(ctx.tokens, device=ctx.device)], lengths, ctx.half)[0]
    return _spread(grads, rows, ctx.axis, ctx.tokens), None, None


for _name, _backward, _save in (
    ("reorder", _reorder_backward, _save_reorder),
    ("partition", _partition_backward, _save_partition),
    ("read_half", _read_half_backward, _save_read_half),
):
    torch.library.register_autograd(f"cp_attention::{_name}", _backward, setup_context=_save, lib=LIBRARY)
