"""Makers of attention slices: masks by name, as the tensors that `attention(..., areas=...)` takes, and readers of
others' masks.

    documents                                               each document sees itself
    prefix_lm, shared_prefix, tree                          all rows see the beginning that they continue
    block_causal, chunked, dilated_blocks                   blocks
    first_tokens_and_window                                 StreamingLLM
    packed, picture                                         one mask for each document of a buffer; a mask as text
    from_magi, from_block_mask                              masks of MagiAttention, and of PyTorch's FlexAttention
    from_call                                               a maker's call as text, for command lines

Every maker is for one document that begins at row 0; `packed` puts several into one buffer. The result is a table like
any other: rows may be added by torch.cat, as long as no pair is in two of them.
"""

from cp_ref.common.masks.blocks import block_causal, chunked, dilated_blocks
from cp_ref.common.masks.document_masks import documents, packed, picture
from cp_ref.common.masks.flex import from_block_mask
from cp_ref.common.masks.magi import from_magi
from cp_ref.common.masks.mask_calls import from_call
from cp_ref.common.masks.prefixes import prefix_lm, shared_prefix, tree
from cp_ref.common.masks.window_masks import first_tokens_and_window

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
