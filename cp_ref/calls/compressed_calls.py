"""`compress_keys` and `compressed_attention`, declared; and the entries of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

import torch

from cp_ref.batches.tensors import autocast, needs_grad
from cp_ref.calls.layer import Layer, LayerCall, Operand, check_local, check_rows
from cp_ref.calls.plan_arguments import Plan
from cp_ref.calls.sparse_calls import read_sparse_attention
from cp_ref.calls.sparse_checks import check_sparse_plan, needed_rate
from cp_ref.groups.context import ContextParallel
from cp_ref.problems.call_checks import one_a_head
from cp_ref.schedules.values import check_dtype, check_flag, dtype_of

__all__ = [
    "COMPRESSED",
    "COMPRESSION",
    "CompressionCall",
    "compress_keys",
    "compressed_attention",
]


def compress_keys(
    values: torch.Tensor,
    gates: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    cp: ContextParallel,
    plan: Plan,
    rate: int,
    overlap: bool = False,
) -> torch.Tensor:
    """Make one key of each window of `rate` tokens. Collective, forward and backward.

    The windows of a document are its tokens [0, rate), [rate, 2 * rate), ...; a window that is not full gives no key.
    The entry of a window is, in each channel, the mean of the values of its tokens, weighted by the softmax of their
    gates:

        entry = sum over the window's tokens t of softmax(gates[t] + bias[t % rate]) * values[t]

    With overlap the rows have two channels for each one of the entry, and the entry of window w has 2 * rate slots: the
    first halves of the rows of window w - 1, and the second halves of those of window w. Of a document's first window
    only the second halves count.

    An entry belongs to the rank that owns the last token of its window. Rows of other ranks come to it, so a window may
    lie across any number of ranks. Each entry is computed once, in float32 (float64 for float64) and by the same
    operations in the same order on every number of ranks, then rounded to the dtype of values. Norms and RoPE are the
    caller's: `plan.entries(rate)` has the documents and positions of the entries. torch.autocast changes nothing.

    Args:
        values: this rank's slice: bshd [b, s/cp, c], sbhd [s/cp, b, c], thd [t/cp, c] (or longer: the rest is tail).
            float16, bfloat16, float32 or float64. c is the d of the entries, with overlap 2 d.
        gates: logits of the weights, in the shape of values; its dtype or float32.
        bias: [rate, c], float32 or the dtype of values: added to the gates by the place in the window; None for none.
            Its gradient is that of this rank's entries: sum it over the ranks, like that of any other weight.
        cp: the group and the layout; cp_comm_type "all_gather" or "a2a".
        plan: from `make_plan`, for this batch: a causal mask, queries and keys of equal lengths, no areas.
        rate: tokens of a window, at least 1.
        overlap: see above.

    Returns:
        [n, d] in the dtype of values, packed in every format: this rank's entries, by document and then by number.
        n may differ from rank to rank. Differentiable once in values, gates and bias.

    Raises:
        ValueError, TypeError: an argument is wrong, here or, in the first call of these sizes with this plan, on
        another rank; named with its value and the rule, before anything is sent. Unsupported: cp_comm_type "p2p" or
        "a2a+p2p", or a plan that was given a schedule.

    Source: DeepSeek-V4 (DeepSeek-AI, 2026), sections 2.3.1 and 2.3.2.
    """
    raise NotImplementedError


@overload
def compressed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_entries: torch.Tensor,
    v_entries: torch.Tensor,
    indices: torch.Tensor | None = None,
    *,
    cp: ContextParallel,
    plan: Plan,
    rate: int,
    softmax_scale: float | None = None,
    softmax_offset: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def compressed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_entries: torch.Tensor,
    v_entries: torch.Tensor,
    indices: torch.Tensor | None = None,
    *,
    cp: ContextParallel,
    plan: Plan,
    rate: int,
    softmax_scale: float | None = None,
    softmax_offset: torch.Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def compressed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_entries: torch.Tensor,
    v_entries: torch.Tensor,
    indices: torch.Tensor | None = None,
    *,
    cp: ContextParallel,
    plan: Plan,
    rate: int,
    softmax_scale: float | None = None,
    softmax_offset: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def compressed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_entries: torch.Tensor,
    v_entries: torch.Tensor,
    indices: torch.Tensor | None = None,
    *,
    cp: ContextParallel,
    plan: Plan,
    rate: int,
    softmax_scale: float | None = None,
    softmax_offset: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend to tokens and to compressed keys, in one softmax. Collective, forward and backward.

    A row sees the tokens that the plan's mask shows, such as those of a sliding window. It also sees the entries of its
    document that are closed: row t (counted in its document) sees entry w iff (w + 1) * rate <= t + 1. With indices it
    sees those of them alone that its indices name. All of them share one softmax, with the sink in it once.

    Args:
        q, k, v: as in `attention`, in the plan's heads, dims and dtype. v may be k, or a part of it, as in
            `sparse_attention`. Under torch.autocast all tensors are cast to its dtype.
        k_entries, v_entries: this rank's entries, [n, h_kv, d_qk] and [n, h_kv, d_v], as `compress_keys` gives them (an
            axis of heads added). v_entries may be k_entries, or a part of it.
        indices: numbers of entries in the row's document, as `select_keys(..., rate=rate)` gives them, in the forms of
            `sparse_attention`; None for all closed ones.
        cp, softmax_scale, softmax_offset, return_lse: as in `sparse_attention`.
        plan: from `make_plan`, for this batch: a causal mask, which with `window_size=(n - 1, 0)` shows the last n
            tokens; queries and keys of equal lengths, no areas; otherwise as in `sparse_attention`.
        rate: tokens of a window, at least 1.

    Returns:
        out, or (out, lse), as `sparse_attention` returns them. Differentiable once in all tensors but indices, through
        out and lse.

    Raises:
        As `sparse_attention`.

    Source: DeepSeek-V4 (DeepSeek-AI, 2026), sections 2.3.1 and 2.3.2.
    """
    raise NotImplementedError


@dataclass(frozen=True)
class CompressionCall(LayerCall):
    """A checked call of `compress_keys`. `channels` are those of the rows; `bias` is its dtype, "" without."""

    channels: int
    dtype: str
    gates: str
    bias: str
    rate: int
    overlap: bool
    requires_grad: bool

    @property
    def width(self) -> int:
        """The channels of an entry."""
        return self.channels // 2 if self.overlap else self.channels


def _read_compression(
    cp: ContextParallel,
    plan: Any,
    package_plan: type,
    /,
    *,
    values: Any,
    gates: Any,
    bias: Any,
    rate: Any,
    overlap: Any,
) -> CompressionCall:
    check_sparse_plan(cp, plan, package_plan, "compress_keys")
    rate = needed_rate(plan, rate)
    check_flag("overlap", overlap)
    check_rows(plan, "values", values, "c")
    channels = values.shape[-1]
    if channels < 1 or (overlap and channels % 2):
        raise ValueError(
            f"values has {channels} channels; it must have {'an even number' if overlap else 'at least 1'}"
            f"{' with overlap' if overlap else ''}"
        )
    check_rows(plan, "gates", gates, "c", values, wide=True, first_name="values")
    if gates.shape != values.shape:
        raise ValueError(f"gates has shape {list(gates.shape)} and values {list(values.shape)}; they must be equal")
    if bias is not None:
        check_local("bias", bias, "values", values)
        check_dtype("bias", bias, dtype_of(values), "float32")
        if tuple(bias.shape) != (rate, channels):
            raise ValueError(f"bias has shape {list(bias.shape)}; it must be [rate, c] = {[rate, channels]}")
    kinds = dtype_of(values), dtype_of(gates), "" if bias is None else dtype_of(bias)
    return CompressionCall("compress_keys", channels, *kinds, rate, overlap, needs_grad(values, gates, bias))


COMPRESSION = Layer(
    "compress_keys",
    (Operand("values"), Operand("gates"), Operand("bias", optional=True)),
    {"rate": "int", "overlap": "bool"},
    _read_compression,
)


COMPRESSED = Layer(
    "compressed_attention",
    (
        *(Operand(name, autocast) for name in ("q", "k", "v", "k_entries", "v_entries")),
        Operand("indices", constant=True, optional=True),
        Operand("softmax_offset", one_a_head, optional=True),
    ),
    {"rate": "int", "softmax_scale": "float?", "return_lse": "bool"},
    read_sparse_attention,
    second="return_lse",
)
