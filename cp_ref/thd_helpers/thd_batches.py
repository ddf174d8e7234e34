"""Preparing a training batch: pad each sequence so that it divides, then give every rank its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cp_ref.batches.tensors import read_fill
from cp_ref.calls.declared import declare
from cp_ref.calls.plan_arguments import Plan
from cp_ref.groups.context import ContextParallel
from cp_ref.schedules.values import check_choice
from cp_ref.schedules.words import QKV_FORMATS
from cp_ref.thd_helpers.thd_checks import (
    MOST_ROWS,
    check_chunk_lengths,
    check_count,
    check_divisible,
    check_lengths,
    check_tensor,
    device_of,
)

__all__ = [
    "check_padding",
    "cut_entries",
    "get_batch_on_this_cp_rank",
    "pad_thd_sequences_for_cp",
]


@declare
def pad_thd_sequences_for_cp(
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
    padded_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad each sequence of a packed batch, at its end, to the next multiple of a factor.

    Args:
        input_ids: token ids, [t] or [1, t], any integer dtype.
        labels: any integer dtype, of input_ids' shape.
        cu_seqlens: GLOBAL cumulative lengths of the real tokens, int32 or int64 [b + 1]. Rows behind cu_seqlens[-1] are
            tail, and follow the last padded sequence unchanged.
        divisibility_factor: every padded length is a multiple of it: 2 * cp_size for layout dual_chunk, 1 for one rank.
        padding_token_id, padding_label_id: the values in padding (-100: no loss there).
        padded_tokens: the size t' of the results, at least that of all padded sequences. The rest holds the tail, cut
            if it is longer, and padding if it is shorter. None: exactly as many rows. With lengths on a GPU it must be
            given: their sum is unknown until the GPU has been waited for.

    Returns:
        (input_ids, labels, cu_seqlens_padded): the ids and labels [t'] of the dtypes given, [1, t'] if they came as
        [1, t]; and the GLOBAL cumulative lengths with padding, of cu_seqlens' dtype and device. A sequence of length 0
        stays so.

    Raises:
        ValueError, TypeError: another shape, fewer tokens than lengths, a factor below 1, padded_tokens too few or
            missing.

    TransformerEngine: `pad_thd_sequences_for_cp`, for tensors on the CPU and without padded_tokens.

    >>> ids, labels = torch.tensor([1, 1, 1, 2, 2]), torch.tensor([11, 12, 13, 21, 22])
    >>> ids, labels, cu_seqlens_padded = pad_thd_sequences_for_cp(ids, labels, torch.tensor([0, 3, 5]), 4)
    >>> ids.tolist(), labels.tolist()
    ([1, 1, 1, 0, 2, 2, 0, 0], [11, 12, 13, -100, 21, 22, -100, -100])
    >>> cu_seqlens_padded.tolist()
    [0, 4, 8]
    """
    raise NotImplementedError


@declare
def get_batch_on_this_cp_rank(
    batch: Mapping[str, Any],
    *,
    cp: ContextParallel,
    qkv_format: str = "bshd",
    cu_seqlens_padded: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> dict[str, Any]:
    """Cut this rank's part out of a batch: ids, labels, positions and loss mask, as `shard` cuts q, k and v.

    These rules apply to each entry, in this order:

    1. No tensor (None, a number, a string): passed on.
    2. Its name begins with "cu_seqlens": passed on. Attention takes global lengths.
    3. A tensor [n] that may be positions without a batch axis or one value per sequence is refused: in bshd if n is
       the sequence length, in sbhd if it is also the batch size.
    4. Its name ends with "position_ids" and the format's axes are its last: [..., b, s] in bshd, [..., s, b] in
       sbhd, [..., t] in thd (mRoPE's [3, b, s] and [1, t]): cut along the sequence axis.
    5. A tensor without the format's sequence axis (axis 1 of bshd [b, s, ...]; axis 0 of sbhd [s, ...] and thd
       [t, ...]): passed on. In thd the tokens may have an axis of one batch in front, [1, t, ...], which the slice
       has too. (Only if the sequences have a single token together, [1, ...] is that token.)
    6. Every other tensor is cut, along that axis alone. Their sizes there must agree. If they do not (an attention
       mask [b, 1, s, s], lengths [b] in thd), the sequences are unknown, and the batch is refused. Take such entries
       out, and put them back yourself.

    Rows of a slice without a token get -100 if the entry's name ends with "labels", else 0.

    Args:
        batch: the global batch, whole on every rank.
        cp: the group and its layout.
        qkv_format: "bshd" for [b, s, ...], "sbhd" for [s, b, ...], "thd" for [t, ...] or [1, t, ...].
        cu_seqlens_padded: thd only: GLOBAL cumulative lengths with padding, int32 or int64 [b + 1], multiples of 2 *
            cp_size in layout dual_chunk, their sum one of cp_size in contiguous; any lengths on one rank.
        plan: gives format, lengths (of any size) and layout instead; layout "balanced" needs it.

    Returns:
        A new dict with the same keys in the same order.

    Raises:
        ValueError, TypeError: rules 3 and 6, a length that does not divide, lengths that are not the format's; labels
        of a dtype without -100 where a slice needs it.

    Megatron-LM: `get_batch_on_this_cp_rank`; TransformerEngine has a function of this name for thd.

    >>> from cp_ref import SimGroup
    >>> batch = {"tokens": torch.tensor([[10, 11, 12, 13]]), "loss_mask": torch.tensor([[1, 1, 1, 0]]), "epoch": 3}
    >>> for part in SimGroup(2).run(lambda member: get_batch_on_this_cp_rank(batch, cp=ContextParallel(member))):
    ...     print({name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in part.items()})
    {'tokens': [[10, 13]], 'loss_mask': [[1, 0]], 'epoch': 3}
    {'tokens': [[11, 12]], 'loss_mask': [[1, 1]], 'epoch': 3}
    """
    raise NotImplementedError


def check_padding(
    input_ids: Any,
    labels: Any,
    cu_seqlens: Any,
    divisibility_factor: Any,
    padding_token_id: Any,
    padding_label_id: Any,
    padded_tokens: Any,
) -> None:
    """The arguments of `pad_thd_sequences_for_cp`."""
    check_count("divisibility_factor", divisibility_factor, 1)
    for name, x in (("input_ids", input_ids), ("labels", labels)):
        check_tensor(name, x)
        if (x.ndim != 1 and (x.ndim != 2 or len(x) != 1)) or x.shape != input_ids.shape:
            raise ValueError(f"{name} has shape {list(x.shape)}; input_ids and labels must both be [t] or [1, t]")
    check_lengths("cu_seqlens", cu_seqlens, input_ids.device)
    if padded_tokens is not None:
        check_count("padded_tokens", padded_tokens, 0, at_most=MOST_ROWS)
    elif cu_seqlens.device.type != "cpu":
        raise ValueError(f"padded_tokens is None, and cu_seqlens is on {cu_seqlens.device}; such lengths need it")
    _check_integers(input_ids=input_ids, labels=labels)
    _check_fill("padding_token_id", padding_token_id, input_ids)
    _check_fill("padding_label_id", padding_label_id, labels)


def check_lengths_divide(cp: ContextParallel, cu_seqlens_padded: torch.Tensor) -> None:
    """Raise ValueError where a length leaves a remainder: without a plan ranks have equal chunks, as in Megatron-LM and
    TransformerEngine.
    """
    check_lengths("cu_seqlens_padded", cu_seqlens_padded, cu_seqlens_padded.device)
    if cp.layout == "dual_chunk":
        check_chunk_lengths(cu_seqlens_padded.diff(), cp.size)
    else:
        end = cu_seqlens_padded[-1:]
        check_divisible(end, cp.size, f"layout {cp.layout!r} at cp_size {cp.size}")


def cut_entries(
    batch: Any,
    qkv_format: Any,
    cp: ContextParallel,
    plan: Any,
    cu_seqlens_padded: Any,
    cut: Callable[[list[torch.Tensor], list[int]], Sequence[torch.Tensor]],
) -> dict[str, Any]:
    """The batch with the parts that `cut` gives of the entries that have the sequence axis, by the rules of
    `get_batch_on_this_cp_rank`.

    Args:
        cut: from tensors, and the values of rows without a token, to their slices.
    """
    _check_mapping(batch)
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    data = {name: x for name, x in batch.items() if _is_data(name, x)}
    for name, x in data.items():
        check_tensor(f"batch[{name!r}]", x)
    in_front = {name: _axes_in_front(name, x, qkv_format) for name, x in data.items()}
    if qkv_format == "thd" and any(in_front.values()) and _is_one_row(data, plan, cu_seqlens_padded):
        in_front |= {name: 0 for name in in_front if not _is_positions(name)}
    entries = _entries_to_cut(batch, qkv_format, in_front)
    fills = [_LABEL if _is_labels(name) and _holds_label(x) else 0 for name, x in entries.items()]
    parts = dict(zip(entries, cut(list(entries.values()), fills), strict=True))
    axis = 1 if qkv_format == "bshd" else 0
    for (name, x), fill in zip(entries.items(), fills, strict=True):
        if _is_labels(name) and fill == 0 and parts[name].shape[axis] * cp.size > x.shape[axis]:
            raise ValueError(
                f"batch[{name!r}] has dtype {x.dtype}, which has no {_LABEL} for the rows of a slice without a token; "
                "cast it to int64"
            )
    return dict(batch) | {name: _tokens_last(part, in_front[name], batch[name].ndim) for name, part in parts.items()}


_LABEL = -100  # what cross entropy ignores


def _is_labels(name: object) -> bool:
    return str(name).endswith("labels")


def _holds_label(x: torch.Tensor) -> bool:
    try:
        return read_fill("padding", _LABEL, x.dtype) == _LABEL
    except ValueError:
        return False


_AXES = {"bshd": 2, "sbhd": 2, "thd": 1}  # of tokens


def _is_data(name: object, x: Any) -> bool:
    """Whether an entry is a tensor other than global lengths."""
    return isinstance(x, torch.Tensor) and not str(name).startswith("cu_seqlens")


def _is_positions(name: object) -> bool:
    return str(name).endswith("position_ids")


def _axes_in_front(name: object, x: torch.Tensor, qkv_format: str) -> int:
    """How many axes stand before the format's own: all others of positions, the first of a packed batch [1, t, ...]."""
    if _is_positions(name):
        return max(x.ndim - _AXES[qkv_format], 0)
    return int(qkv_format == "thd" and x.ndim > 1 and len(x) == 1)


def _is_one_row(entries: dict[str, torch.Tensor], plan: Any, cu_seqlens_padded: Any) -> bool:
    """Whether [1, ...] is a packed buffer of one row: at most one token is known, and no other entry has more rows."""
    if plan is not None:
        tokens = sum(plan.problem.lengths.slots_q)
    else:
        check_lengths("cu_seqlens_padded", cu_seqlens_padded, device_of(cu_seqlens_padded))
        tokens = int(cu_seqlens_padded[-1]) if cu_seqlens_padded.device.type == "cpu" else MOST_ROWS
    rows = {x.shape[-1] for name, x in entries.items() if x.ndim == 1 or (x.ndim and _is_positions(name))}
    return tokens <= 1 and (1 in rows if rows else tokens == 1)


def _tokens_first(x: torch.Tensor, in_front: int) -> torch.Tensor:
    """The tensor with the format's axes first: the others go behind them, or away if there is one of size 1."""
    if in_front == len(x.shape[:1]) == sum(x.shape[:1]) == 1:
        return x.squeeze(0)
    return x.movedim(tuple(range(in_front)), tuple(range(-in_front, 0)))


def _tokens_last(x: torch.Tensor, in_front: int, axes: int) -> torch.Tensor:
    """The inverse of `_tokens_first`, for a tensor that had this number of axes."""
    if x.ndim < axes:
        return x.unsqueeze(0)
    return x.movedim(tuple(range(-in_front, 0)), tuple(range(in_front))).contiguous()


def _entries_to_cut(batch: Mapping[str, Any], qkv_format: str, in_front: dict[str, int]) -> dict[str, torch.Tensor]:
    """The entries that have the sequence axis, on the axis where the format has it."""
    axis = 1 if qkv_format == "bshd" else 0
    candidates = {name: _tokens_first(batch[name], count) for name, count in in_front.items()}
    cut = {name: x for name, x in candidates.items() if x.ndim > axis}
    _check_agreement(batch, cut, in_front, axis, qkv_format)
    for name, x in candidates.items():
        if x.ndim == 1 and qkv_format != "thd":
            _check_meaning(name, batch, cut, qkv_format)
    return cut


def _check_integers(**tensors: torch.Tensor) -> None:
    """Check that token ids and labels have an integer dtype."""
    for name, x in tensors.items():
        if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
            raise TypeError(f"{name} has dtype {x.dtype}; it must be an integer dtype")


def _check_fill(name: str, value: Any, x: torch.Tensor) -> None:
    """Check that the padding value is within the range of the tensor's dtype."""
    range_ = torch.iinfo(x.dtype)
    check_count(name, value, int(range_.min), below=int(range_.max) + 1, at_most=int(range_.max))


def _check_mapping(batch: Any) -> None:
    """Raise unless the batch has names and values."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch is a {type(batch).__name__}; it must be a dict of tensors and other values")


def _check_agreement(
    batch: Mapping[str, Any], cut: dict[str, torch.Tensor], in_front: dict[str, int], axis: int, qkv_format: str
) -> None:
    """Check that all have the same size on the sequence axis."""
    for first, x in list(cut.items())[:1]:
        for name, y in cut.items():
            if y.shape[axis] != x.shape[axis]:
                one, other = axis + in_front[first], axis + in_front[name]
                axes = f"axis {one}" if one == other else f"axes {one} and {other}"
                raise ValueError(
                    f"batch[{first!r}] has shape {list(batch[first].shape)} and batch[{name!r}] has "
                    f"{list(batch[name].shape)}: with qkv_format {qkv_format!r} both would be cut along {axes}, but "
                    "their sizes there differ. Take out what is no sequence"
                )


def _check_meaning(name: str, batch: Mapping[str, Any], cut: dict[str, torch.Tensor], qkv_format: str) -> None:
    """Check that a tensor [n] is clearly a sequence, or clearly one value per sequence."""
    x = batch[name]
    for other, y in cut.items():
        if y.ndim > 1 and len(x) == y.shape[1] and (qkv_format == "bshd" or len(x) == y.shape[0]):
            raise ValueError(
                f"batch[{name!r}] has shape {list(x.shape)} beside batch[{other!r}] {list(batch[other].shape)}: with "
                f"qkv_format {qkv_format!r} it may be a sequence, or one value a sequence. Give it a batch axis, or "
                "take it out"
            )
