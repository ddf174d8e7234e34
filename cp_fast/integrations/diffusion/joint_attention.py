"""Full attention of slices of streams: a rank's queries see the keys of all ranks, without padding.

The keys of a call are a row of streams, such as text and image, of which each rank has its slices. So they are not one
sequence in order. That changes nothing for full attention, which knows no order; what counts is which rows are tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from cp_fast.api.attention import attention
from cp_fast.integrations.diffusion.token_cuts import SlicedCall, rows_of_slice
from cp_fast.integrations.shared.drop_in import words_for
from cp_ref.batches.area_rows import tensor
from cp_ref.groups.agreement import merged

__all__ = ["Seen", "attend_over_ranks", "check_mask", "keys_of", "lengths"]

_HIDDEN = -1e4  # a bias from which on a key has no weight


class Seen(NamedTuple):
    """One attention of a model: the streams that its queries and keys are made of, one after the other.

    Attributes:
        queries: None where they are parts of streams, or whole on every rank.
        keys: None where they are whole on every rank.
    """

    queries: tuple[str, ...] | None
    keys: tuple[str, ...] | None


def lengths(streams: tuple[str, ...], call: SlicedCall) -> int:
    """The rows that a call has of these streams."""
    return sum(call.window.of(call.streams[name])[1] for name in streams)


def keys_of(streams: tuple[str, ...], call: SlicedCall, batch: int) -> np.ndarray:
    """Which rows of each rank's keys are tokens: bool [rank, b, rows].

    >>> from cp_fast import ContextParallel
    >>> from cp_fast.integrations.diffusion.token_cuts import Window
    >>> from cp_ref.groups.group import PaperGroup
    >>> call = SlicedCall(ContextParallel(PaperGroup(2)), Window(0, 2), {"text": 1, "image": 3})
    >>> keys_of(("text", "image"), call, 1).astype(int).tolist()
    [[[1, 1, 1]], [[0, 1, 0]]]
    """
    size = call.cp.size
    parts = []
    for name in streams:
        tokens = call.streams[name]
        rows = rows_of_slice(tokens, size)
        parts.append((np.arange(size * rows) < tokens).reshape(size, rows))
    rows = np.concatenate(parts, axis=1)
    return np.broadcast_to(rows[:, None], (size, batch, rows.shape[1]))


def check_mask(where: str, mask: torch.Tensor, batch: int, rows: int) -> torch.Tensor:
    """Which of this rank's keys a mask shows: bool [b, rows], on its device.

    Raises:
        NotImplementedError: it is no mask of keys, or a bias that is neither 0 nor hides.
    """
    shown = mask
    if shown.ndim == 4 and shown.shape[1] == shown.shape[2] == 1:
        shown = shown[:, 0, 0]
    elif shown.ndim == 3 and shown.shape[1] == 1:
        shown = shown[:, 0]
    if shown.ndim != 2 or shown.shape[0] not in (1, batch) or shown.shape[1] != rows:
        raise NotImplementedError(
            f"{where} is given attn_mask {words_for(mask)}; attention over ranks takes masks of keys, [b, {rows}] or "
            f"[b, 1, 1, {rows}], and no mask with a row for each query or head"
        )
    if shown.dtype != torch.bool:
        odd = (shown != 0) & (shown > _HIDDEN)
        if bool(odd.any()):
            raise NotImplementedError(
                f"{where} is given attn_mask with values between {_HIDDEN:g} and 0; attention over ranks takes masks "
                "that hide keys (False, or a bias of at most -10,000), and no other bias"
            )
        shown = shown == 0
    return shown.expand(batch, rows)


def attend_over_ranks(
    where: str,
    seen: Seen,
    call: SlicedCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Attention of this rank's queries [b, rows, h, d] to the keys of all ranks. Collective.

    Rows of padding are queries like others. Nobody reads what they see, so their gradients are zero.
    """
    assert seen.keys is not None
    how: dict[str, Any] = {"cp": call.cp, "softmax_scale": scale}
    if is_causal:
        if mask is not None or len(seen.keys) != 1 or seen.queries != seen.keys:
            raise NotImplementedError(
                f"{where} is causal over {' and '.join(seen.keys)}{' with a mask' if mask is not None else ''}; "
                "attention over ranks takes causal masks of one stream"
            )
        return attention(q, k, v, attn_mask_type="causal", **how)  # Padding comes last: no token sees it.
    batch, rows = len(q), k.shape[1]
    shown, digest = _shown(where, seen.keys, call, mask, batch, rows)
    if shown.all():
        return attention(q, k, v, attn_mask_type="no_mask", **how)
    in_order = shown.transpose(1, 0, 2).reshape(batch, -1)  # [b, all ranks' rows]
    counts = in_order.sum(1)
    if not counts.all():
        raise ValueError(f"{where} is given attn_mask that hides all keys of sequence {int(counts.argmin())}")
    if (in_order == (np.arange(in_order.shape[1]) < counts[:, None])).all():
        slots = call.cp.size * q.shape[1] * torch.arange(batch + 1, device="cpu")
        keys = torch.from_numpy(np.append(0, np.cumsum(counts)))
        return attention(q, k, v, attn_mask_type="padding", cu_seqlens_q=slots, cu_seqlens_kv=keys, **how)
    key = seen.keys, batch, q.shape[1], digest, "areas"
    if key not in call.masks:
        call.masks[key] = _areas(shown, q.shape[1])
    ends = {
        f"cu_seqlens_{side}": torch.tensor([0, call.cp.size * batch * x.shape[1]], device="cpu")
        for side, x in (("q", q), ("kv", k))
    }
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out = attention(q, k, v, qkv_format="thd", areas=call.masks[key], **ends, **how)
    return out.unflatten(0, (batch, -1))


def _shown(
    where: str, streams: tuple[str, ...], call: SlicedCall, mask: torch.Tensor | None, batch: int, rows: int
) -> tuple[np.ndarray, int]:
    """Which keys of all ranks are tokens that the mask shows, and a number for the mask. A new mask is collective."""
    tokens = keys_of(streams, call, batch)
    if mask is None:
        return tokens, 0
    known = call.masks.setdefault((streams, batch, "masks"), [])
    for number, (one, shown) in enumerate(known):
        if one is mask or (one.dtype == mask.dtype and torch.equal(one, mask)):
            return shown, number + 1

    def read() -> list[bytes]:
        return [np.packbits(check_mask(where, mask, batch, rows).cpu().numpy()).tobytes()]

    told = merged(call.cp, f"a mask of {where}", read, lambda parts: [part for some in parts for part in some])
    bits = np.stack([np.unpackbits(np.frombuffer(one, dtype=np.uint8), count=batch * rows) for one in told])
    shown = tokens & bits.astype(bool).reshape(-1, batch, rows)
    known.append((mask, shown))
    return shown, len(known)


def _areas(shown: np.ndarray, queries: int) -> torch.Tensor:
    """The visible pairs, of buffers that have the ranks' rows one after the other, and in them the sequences'.

    shown: which keys are tokens, bool [rank, b, rows]. queries: rows of each rank and sequence.
    """
    size, batch, _ = shown.shape
    areas = []
    for sequence in range(batch):
        mine = np.zeros(shown.shape, dtype=np.int8)
        mine[:, sequence] = shown[:, sequence]
        edges = np.flatnonzero(np.diff(mine.ravel(), prepend=0, append=0))
        spans = [(0, size * queries)] if batch == 1 else []
        spans = spans or [
            ((rank * batch + sequence) * queries, (rank * batch + sequence + 1) * queries) for rank in range(size)
        ]
        areas += [(*span, int(a), int(b), -1, -1) for span in spans for a, b in edges.reshape(-1, 2)]
    return tensor(iter(areas))
