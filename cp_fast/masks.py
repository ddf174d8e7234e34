"""Makers of areas, for `attention(..., areas=...)`: see `cp_ref.common.masks`."""

from cp_ref.common.masks import (
    block_causal,
    chunked,
    dilated_blocks,
    documents,
    first_tokens_and_window,
    from_block_mask,
    from_call,
    from_magi,
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
