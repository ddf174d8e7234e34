"""Makers of areas: masks by name, as the tensors that `attention(..., areas=...)` takes.

    documents                                               each document sees itself
    prefix_lm, shared_prefix, tree                          all rows see the beginning that they continue
    block_causal, chunked, dilated_blocks                   blocks
    first_tokens_and_window                                 StreamingLLM
    packed, picture (`area_rows`)                           one mask for each document of a buffer; a mask as text
    from_block_mask, from_magi (`foreign_masks`)            the masks of other libraries
    from_call                                               a maker's call as text, for command lines

`cp_ref.masks` and `cp_fast.masks` have all of them.

Every maker is for one document that begins at row 0; `packed` puts several into one buffer. The result is a table like
any other: rows may be added by torch.cat, as long as no pair is in two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, chain, pairwise
from typing import Any

import torch

from cp_ref.batches.area_rows import FULL, Lengths, causal, numbers, packed, picture, tensor, upper
from cp_ref.batches.foreign_masks import from_block_mask, from_magi
from cp_ref.schedules.areas import WindowRow
from cp_ref.schedules.values import kind_of, parse_call, read_count, read_window

__all__ = [
    "block_causal",
    "chunked",
    "dilated_blocks",
    "documents",
    "first_tokens_and_window",
    "from_block_mask",
    "from_call",
    "from_magi",
    "packed",
    "picture",
    "prefix_lm",
    "shared_prefix",
    "tree",
]


def documents(
    cu_seqlens_q: Lengths,
    cu_seqlens_kv: Lengths | None = None,
    *,
    cu_seqlens_q_padded: Lengths | None = None,
    cu_seqlens_kv_padded: Lengths | None = None,
    window_size: tuple[int, int] = (-1, 0),
) -> torch.Tensor:
    """Let each document see itself through a window: the same as `cu_seqlens_*` and a bottom-right mask without areas.

    Args:
        cu_seqlens_q ... cu_seqlens_kv_padded: as in `attention`, [b + 1].
        window_size: (left, right), -1 for unbounded, aligned to each document's last query and key; causal by default.

    Returns:
        int64 [n, 6]: an area for each document that sees anything.

    >>> print(picture(documents([0, 3, 5])))
    5 query rows x 5 key rows; a cell is 1 x 1
         k 0
    q    0 0 . . . .
         1 0 0 . . .
         2 0 0 0 . .
         3 . . . 1 .
         4 . . . 1 1
    >>> documents([0, 3, 5]).tolist()
    [[0, 3, 0, 3, -1, 0], [3, 5, 3, 5, -1, 0]]
    """
    left, right = read_window(window_size)
    q = numbers("cu_seqlens_q", cu_seqlens_q)
    slots_q = q if cu_seqlens_q_padded is None else numbers("cu_seqlens_q_padded", cu_seqlens_q_padded)
    k = q if cu_seqlens_kv is None else numbers("cu_seqlens_kv", cu_seqlens_kv)
    slots_k = slots_q if cu_seqlens_kv is None else k
    if cu_seqlens_kv_padded is not None:
        slots_k = numbers("cu_seqlens_kv_padded", cu_seqlens_kv_padded)
    if len({len(x) for x in (q, k, slots_q, slots_k)}) > 1:
        raise ValueError("cu_seqlens_q, cu_seqlens_kv and those with padding must have the same number of entries")
    lengths = ([b - a for a, b in pairwise(x)] for x in (q, k))
    placed = zip(slots_q, slots_k, *lengths, strict=False)
    return tensor((i, i + len_q, j, j + len_k, left, right) for i, j, len_q, len_k in placed)


def prefix_lm(prefix: int, length: int) -> torch.Tensor:
    """Make a causal document whose first `prefix` tokens all see each other (PaliGemma, T5's prefix LM).

    Returns:
        int64 [n, 6]: the causal square, which kernels compute fastest, and the prefix's pairs outside it.

    >>> from cp_ref.masks import picture
    >>> print(picture(prefix_lm(3, 5)))
    5 query rows x 5 key rows; a cell is 1 x 1
         k 0
    q    0 0 1 1 . .
         1 0 0 1 . .
         2 0 0 0 . .
         3 0 0 0 0 .
         4 0 0 0 0 0
    >>> prefix_lm(3, 5).tolist()
    [[0, 5, 0, 5, -1, 0], [0, 2, 1, 3, 0, -1]]
    """
    length = read_count("length", length, at_least=0)
    return tensor([causal(0, length), upper(0, read_count("prefix", prefix, at_least=0, at_most=length))])


def shared_prefix(prompt: int, answers: Lengths) -> torch.Tensor:
    """Make a prompt, then answers that see the prompt and themselves, but not each other (GRPO; DPO's pairs).

    The buffer has the prompt once, then the answers. Positions go on from the prompt's end in every answer, so for RoPE
    they are not those of `position_ids`, which counts rows of the document.

    Args:
        prompt: its length.
        answers: their lengths, [n].

    Returns:
        int64 [n, 6]: causal squares, and one area for the prompt under all answers.

    >>> from cp_ref.masks import picture
    >>> print(picture(shared_prefix(2, [2, 1, 2])))
    7 query rows x 7 key rows; a cell is 1 x 1
         k 0
    q    0 0 . . . . . .
         1 0 0 . . . . .
         2 1 1 2 . . . .
         3 1 1 2 2 . . .
         4 1 1 . . 3 . .
         5 1 1 . . . 4 .
         6 1 1 . . . 4 4
    """
    lengths = numbers("answers", answers)
    return tree([read_count("prompt", prompt, at_least=0), *lengths], [-1] + [0] * len(lengths))


def tree(lengths: Lengths, parents: Lengths) -> torch.Tensor:
    """Make segments of a tree: each sees itself causally, and all of its parent, its parent's parent, and so on (tree
    search, speculative decoding, prompts that share beginnings).

    Args:
        lengths: of the segments, in the order of the buffer, [n].
        parents: the number of each segment's parent, which comes before it; -1 for none, [n].

    Returns:
        int64 [m, 6]: a causal square for each segment, and one area for each stretch of rows below it. In depth-first
        order (a segment, then everything below it) there is one such stretch.

    >>> from cp_ref.masks import picture
    >>> print(picture(tree([2, 1, 2, 1], [-1, 0, 1, 0])))
    6 query rows x 6 key rows; a cell is 1 x 1
         k 0
    q    0 0 . . . . .
         1 0 0 . . . .
         2 1 1 2 . . .
         3 1 1 3 4 . .
         4 1 1 3 4 4 .
         5 1 1 . . . 5
    """
    sizes, above = numbers("lengths", lengths), numbers("parents", parents, at_least=-1)
    if len(sizes) != len(above):
        raise ValueError(f"parents has {len(above)} entries and lengths has {len(sizes)}; they must be equal")
    spans = list(pairwise(accumulate(sizes, initial=0)))
    below: list[list[tuple[int, int]]] = [[] for _ in sizes]  # by segment, stretches of rows
    for n, (start, stop) in enumerate(spans):
        if above[n] >= n:
            raise ValueError(f"parents[{n}] is {above[n]}; a parent comes before its child")
        parent = above[n]
        while parent >= 0:
            stretches = below[parent]
            if stretches and stretches[-1][1] == start:
                start_of = stretches.pop()[0]
                stretches.append((start_of, stop))
            else:
                stretches.append((start, stop))
            parent = above[parent]
    rows: list[WindowRow] = []
    for (start, stop), stretches in zip(spans, below, strict=True):
        rows.append(causal(start, stop))
        rows += [(first, last, start, stop, *FULL) for first, last in stretches]
    return tensor(rows)


def block_causal(length: int, block: int) -> torch.Tensor:
    """Let tokens see their own block and all before it: frames of a video, blocks of block diffusion. The last block
    may be shorter.

    Returns:
        int64 [n, 6]: the causal square of all, which kernels compute fastest, and each block's pairs outside it.

    >>> from cp_ref.masks import picture
    >>> print(picture(block_causal(5, 2)))
    5 query rows x 5 key rows; a cell is 1 x 1
         k 0
    q    0 0 1 . . .
         1 0 0 . . .
         2 0 0 0 2 .
         3 0 0 0 0 .
         4 0 0 0 0 0
    """
    blocks = _blocks(length, block)
    return tensor(chain([causal(0, length)], (upper(start, stop) for start, stop in blocks)))


def chunked(length: int, chunk: int) -> torch.Tensor:
    """Let tokens see the tokens before them in their own chunk (Llama 4's local layers). The last chunk may be shorter.

    >>> from cp_ref.masks import picture
    >>> print(picture(chunked(5, 2)))
    5 query rows x 5 key rows; a cell is 1 x 1
         k 0
    q    0 0 . . . .
         1 0 0 . . .
         2 . . 1 . .
         3 . . 1 1 .
         4 . . . . 2
    """
    return tensor(causal(start, stop) for start, stop in _blocks(length, chunk, "chunk"))


def dilated_blocks(length: int, block: int, step: int) -> torch.Tensor:
    """Let tokens see the tokens before them in their own block, and all of every `step`-th block before it (LongNet's
    dilation, by blocks). The last block may be shorter.

    >>> from cp_ref.masks import picture
    >>> print(picture(dilated_blocks(6, 1, 2)))
    6 query rows x 6 key rows; a cell is 1 x 1
         k 0
    q    0 0 . . . . .
         1 . 1 . . . .
         2 2 . 3 . . .
         3 . 4 . 5 . .
         4 6 . 7 . 8 .
         5 . 9 . a . b
    """
    step = read_count("step", step, at_least=1)

    def seen(n: int, start: int) -> range:
        """The first keys of the blocks that the n-th block, which begins at `start`, sees."""
        return range(n % step * block, start + 1, step * block)

    rows = (
        causal(start, stop) if first == start else (start, stop, first, first + block, *FULL)
        for n, (start, stop) in enumerate(_blocks(length, block))
        for first in seen(n, start)
    )
    return tensor(rows)


def _blocks(length: int, block: int, name: str = "block") -> Iterator[tuple[int, int]]:
    """(start, stop) of each."""
    length, block = read_count("length", length, at_least=0), read_count(name, block, at_least=1)
    return ((start, min(start + block, length)) for start in range(0, length, block))


def first_tokens_and_window(length: int, first: int, left: int) -> torch.Tensor:
    """Let tokens see themselves, the `left` tokens before them, and the `first` tokens of all (StreamingLLM's attention
    sinks by position).

    Returns:
        int64 [n, 6]: the window of the tokens after the first ones; the first ones among themselves, with the same
        window if it hides none of them; and the part of them that all others see. The first two share a kernel launch.

    >>> from cp_ref.masks import picture
    >>> print(picture(first_tokens_and_window(7, 2, 2)))
    7 query rows x 7 key rows; a cell is 1 x 1
         k 0
    q    0 1 . . . . . .
         1 1 1 . . . . .
         2 2 2 0 . . . .
         3 2 2 0 0 . . .
         4 2 2 0 0 0 . .
         5 2 2 . 0 0 0 .
         6 2 2 . . 0 0 0
    """
    length = read_count("length", length, at_least=0)
    first, left = read_count("first", first, at_least=0, at_most=length), read_count("left", left, at_least=0)
    own = left if left >= first - 1 else -1
    behind = (first, length)
    return tensor([(*behind, *behind, left, 0), (0, first, 0, first, own, 0), (*behind, 0, first, *FULL)])


_LISTED = (
    block_causal,
    chunked,
    dilated_blocks,
    documents,
    first_tokens_and_window,
    prefix_lm,
    shared_prefix,
    tree,
)
_MAKERS: dict[str, Callable[..., torch.Tensor]] = {maker.__name__: maker for maker in _LISTED}


def from_call(text: str) -> torch.Tensor:
    """Return the areas of a maker's call, whose arguments are numbers and lists of numbers.

    Raises:
        ValueError: it is no such call. And what the maker raises.

    >>> from_call("prefix_lm(2, 4)").tolist()
    [[0, 4, 0, 4, -1, 0], [0, 1, 1, 2, 0, -1]]
    """
    given: Any = text
    if not isinstance(given, str):
        raise TypeError(f"text is {kind_of(given)}; it must be the text of a call")
    try:
        name, arguments, named = parse_call(text, list(_MAKERS))
    except ValueError as error:
        raise ValueError(f"areas are {text!r}; they must be a call of {', '.join(_MAKERS)}: {error}") from error
    return _MAKERS[name](*arguments, **named)
