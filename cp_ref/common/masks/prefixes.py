"""Masks in which rows see all of the text that they continue: prefixes, prompts with several answers, trees."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from cp_ref.common.masks.area_rows import FULL, Lengths, causal, numbers, tensor, upper
from cp_ref.spec import AttentionSliceRow, read_count

__all__ = ["prefix_lm", "shared_prefix", "tree"]


def prefix_lm(prefix: int, length: int) -> torch.Tensor:
    """A causal document whose first `prefix` tokens all see each other (PaliGemma, T5's prefix LM).

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
    """A prompt, then answers that see the prompt and themselves, but not each other (GRPO; DPO's pairs).

    The buffer has the prompt once, then the answers. Positions go on from the prompt's end in every answer, so for RoPE
    they are not those of `position_ids`, which counts rows of the document.

    Args:
        prompt: its length.
        answers: their lengths, [n].

    Returns:
        int64 [n, 6]: causal squares, and one attention slice for the prompt under all answers.

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
    """Segments of a tree: each sees itself causally, and all of its parent, its parent's parent, and so on (tree
    search, speculative decoding, prompts that share beginnings).

    Args:
        lengths: of the segments, in the order of the buffer, [n].
        parents: the number of each segment's parent, which comes before it; -1 for none, [n].

    Returns:
        int64 [m, 6]: a causal square for each segment, and one attention slice for each stretch of rows below it. In
        depth-first order (a segment, then everything below it) there is one such stretch.

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
    rows: list[AttentionSliceRow] = []
    for (start, stop), stretches in zip(spans, below, strict=True):
        rows.append(causal(start, stop))
        rows += [(first, last, start, stop, *FULL) for first, last in stretches]
    return tensor(rows)
