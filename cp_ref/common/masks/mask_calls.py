"""A maker's call as text, as command lines take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cp_ref.common.masks.blocks import block_causal, chunked, dilated_blocks
from cp_ref.common.masks.document_masks import documents
from cp_ref.common.masks.prefixes import prefix_lm, shared_prefix, tree
from cp_ref.common.masks.window_masks import first_tokens_and_window
from cp_ref.spec import kind_of
from cp_ref.spec.arguments.single_values import parse_call

__all__ = ["from_call"]

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
    """The attention slices of a maker's call, whose arguments are numbers and lists of numbers.

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
