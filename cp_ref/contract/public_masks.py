"""The makers of areas that users call: `masks` of both packages."""

from cp_ref.contract.foreign_masks import from_block_mask, from_magi
from cp_ref.contract.masks import (
    block_causal,
    chunked,
    dilated_blocks,
    documents,
    first_tokens_and_window,
    from_call,
    packed,
    picture,
    prefix_lm,
    shared_prefix,
    tree,
)

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
