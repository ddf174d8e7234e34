"""The masks that a model of transformers builds, and what its layers say of them.

A layer says whether it is causal and how wide its window is. Its model builds a mask too, from its configuration.
FlashAttention follows the layer, eager attention the mask, and SDPA the mask where it is no plain one. They may say
different things, and then transformers computes different things.

So `prepare` looks at both. In one of its runs the model is given numbers in the place of masks, which say in each layer
which mask has come to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

__all__ = ["Said", "Sides", "refuse_own_mask", "sides_of", "without_blocks"]


class Sides(NamedTuple):
    """The part of its sequence that a query sees.

    Attributes:
        left, right: how many tokens on each side of it, without itself; -1: all.
        chunk: the tokens of a chunk, of which it sees its own alone: chunks are counted from the sequence's begin. 0:
            the sequence has no chunks.
    """

    left: int
    right: int
    chunk: int = 0


_CAUSAL, _FULL = Sides(-1, 0), Sides(-1, -1)


@dataclass(frozen=True)
class Said:
    """A layer's own account of its attention.

    Args:
        causal: whether a query sees no later key.
        size: of its window, which counts the query itself; None: it has none.
        chunk: as of `Sides`.
        silent: its configuration has a window, and it names none: the mask alone says what it sees.
    """

    causal: bool
    size: int | None
    chunk: int = 0
    silent: bool = False

    @property
    def sides(self) -> Sides:
        """As FlashAttention reads it."""
        left = -1 if self.size is None else self.size - 1
        return Sides(left, 0 if self.causal else left, self.chunk)

    def among(self, built: frozenset[Sides], name: str) -> Sides:
        """The sides that the layer has under a mask that its model has built. name: of the layer, for the error.

        transformers builds windows of two sides with `size` tokens on each, and its FlashAttention takes one less: it
        is the mask that counts, as in eager attention and SDPA. It also counts where a layer is silent.

        Raises:
            NotImplementedError: the mask is another one.

        >>> Said(False, 8).among(frozenset({Sides(8, 8)}), "layer")
        Sides(left=8, right=8, chunk=0)
        >>> Said(True, 8).among(frozenset({Sides(7, 0)}), "layer")
        Sides(left=7, right=0, chunk=0)
        >>> Said(True, None, silent=True).among(frozenset({Sides(7, 0)}), "layer")
        Sides(left=7, right=0, chunk=0)
        """
        if self.silent and self.causal and len(causal := [one for one in built if one.right == 0]) == 1:
            return causal[0]
        if self.sides in built and not self.silent:
            return self.sides
        if not self.causal and self.size is not None and built == {Sides(self.size, self.size)}:
            return Sides(self.size, self.size)
        window = "" if self.size is None else f" with a window of {self.size}"
        window += f" in chunks of {self.chunk}" if self.chunk else ""
        cure = f"set model.config.is_causal to {self.causal} too"
        if not self.causal:
            cure += ", or make the layers causal (their is_causal, or use_bidirectional_attention=False)"
        raise NotImplementedError(
            f"{name} says is_causal={self.causal}{window}, and its model builds a mask {_words(built)}. transformers' "
            "own paths differ: eager attention follows the mask, FlashAttention the layer, SDPA one or the other. Make "
            f"both alike before prepare: {cure}"
        )


def sides_of(mask_function: Callable[..., Any], length: Any, size: int | None) -> frozenset[Sides]:
    """The sides that a function of transformers.masking_utils may have, tried near 0, `length` and `size`.

    Documents are left out: transformers joins functions, a mask and whether two tokens have one document. It takes the
    positions of a slice for those of several documents, and `cp_batch` knows better. A function that holds tensors is
    tried inside of `length`, where several sides may fit.

    Args:
        size: of a window or of chunks.

    Returns:
        Nothing where it is no mask of sides.

    >>> sides_of(lambda batch, head, q, kv: (kv <= q) & (kv > q - 4), 6, 4)
    frozenset({Sides(left=3, right=0, chunk=0)})
    >>> sides_of(lambda batch, head, q, kv: (kv <= q) & (kv // 4 == q // 4), 6, 4)
    frozenset({Sides(left=-1, right=0, chunk=4)})
    >>> sides_of(lambda batch, head, q, kv: (kv <= q) | (kv < 2), 6, None)
    frozenset()
    """
    function = _without_documents(mask_function)
    if function is None or not isinstance(length, int) or length < 1:
        return frozenset()
    near = {0, 1, 2, length // 2, length - 1}
    candidates = {_CAUSAL, _FULL}
    if size is not None:
        near |= {size - 1, size, size + 1, 2 * size}
        candidates |= {Sides(left, right) for left in (size - 1, size) for right in (0, left)}
        candidates |= {Sides(-1, 0, size)} if size > 0 else set()
    last = length - 1 if _holds_tensors(function) else max(near)
    rows = torch.tensor(sorted(row for row in near if 0 <= row <= last), device="cpu")
    zero = torch.tensor(0, device="cpu")
    seen = torch.as_tensor(function(zero, zero, rows[:, None], rows[None])).cpu().expand(len(rows), len(rows))
    return frozenset(sides for sides in candidates if torch.equal(seen, _visible(rows, sides)))


def without_blocks(function: Callable[..., Any]) -> Callable[..., Any]:
    """A mask function, or the one inside that is joined with blocks of images, where the batch has no such block."""
    if not _name(function).startswith("or_masks"):
        return function
    parts = [part for part in _parts(function) if not _is_empty(part)]
    return without_blocks(parts[0]) if len(parts) == 1 else function


def _is_empty(function: Callable[..., Any]) -> bool:
    """Whether it is one of blocks, and no token is in a block."""
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    blocks = [x for x in held if isinstance(x, torch.Tensor)]
    return _name(function).startswith("blockwise_overlay") and len(blocks) == 1 and bool((blocks[0] < 0).all())


def refuse_own_mask(name: str, mask: Any) -> None:
    """Raise NotImplementedError for a mask that a model makes itself; name: what it reaches."""
    shape = f"{list(mask.shape)} " if isinstance(mask, torch.Tensor) else ""
    raise NotImplementedError(
        f"the model makes an attention mask {shape}of its own, which comes to {name}; cp_fast has the causal masks, "
        "windows, chunks and full attention of transformers.masking_utils, and documents and padding from shard_batch"
    )


def _visible(rows: torch.Tensor, sides: Sides) -> torch.Tensor:
    """Whether each of these tokens sees each other one: bool [rows, rows]."""
    distance = rows[:, None] - rows[None]  # of a key to the left of a query
    chunks = rows // sides.chunk if sides.chunk else torch.zeros_like(rows)
    seen = chunks[:, None] == chunks[None]
    seen = seen if sides.left < 0 else seen & (distance <= sides.left)
    return seen if sides.right < 0 else seen & (-distance <= sides.right)


def _without_documents(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the function inside of those that tell documents apart. None: they have several inside."""
    while _name(function).startswith(("and_masks", "remap_positions_for_packed", "add_offsets")):
        parts = _parts(function)
        inside = [part for part in parts if not _name(part).startswith("packed_sequence_mask_function")]
        if len(inside) != 1:  # a window is such a pair
            return None if len(inside) < len(parts) else function
        [function] = inside
    return function


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", "")


def _parts(function: Callable[..., Any]) -> list[Any]:
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    parts = [part for one in held for part in (one if isinstance(one, tuple) else [one])]
    return [part for part in parts if callable(part) and not isinstance(part, torch.Tensor)]


def _holds_tensors(function: Callable[..., Any]) -> bool:
    """Whether a function of a mask has tensors that it may read by place; chunks read one by row of the batch."""
    if _name(function).startswith("chunked_overlay"):
        return False
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return any(isinstance(x, torch.Tensor) and x.dim() > 0 for x in held) or any(map(_holds_tensors, _parts(function)))


def _words(built: frozenset[Sides]) -> str:
    if not built:
        return "that is neither causal, nor a window, nor full attention"
    left, right, chunk = min(built)
    kind = "that is causal" if right == 0 else "of both sides"
    kind += f" in chunks of {chunk}" if chunk else ""
    return kind if left < 0 else f"{kind}, with {left} tokens on {'the left' if right == 0 else 'each side'}"
