"""Helpers for packed sequences (thd): the small steps that context-parallel attention on variable lengths is made of.

    indices       which tokens a rank holds; between sequence order and CP rank order
    valid         how many of them are real; copying these alone
    halves        reading the first or second half of every sequence
    corrections   merging a ring step's LSE, output and gradients, in place
    batches       padding a batch so that it divides, and cutting it
    head_dims     padding V, trimming the output

`rows` and `lse` are what they share. Lengths are called GLOBAL where they are those of the whole packed buffer, and
LOCAL where they are those of a rank's slice: the global ones divided by cp_size.

All of them take any number of sequences, sequences of length 0, a tail behind the last one, int32 and int64 lengths.
What cannot be done right is refused with a ValueError or TypeError that names the argument, its value and the rule.
"""

from cp_ref.common.thd.head_dims import pad_v, trim_out
from cp_ref.thd.batches import get_batch_on_this_cp_rank, pad_thd_sequences_for_cp
from cp_ref.thd.corrections import thd_grad_correction, thd_out_correction, thd_second_half_lse_correction
from cp_ref.thd.halves import thd_read_half_tensor, thd_read_second_half_lse
from cp_ref.thd.indices import (
    thd_cp_rank_order_to_sequence_order,
    thd_get_partitioned_indices,
    thd_sequence_order_to_cp_rank_order,
)
from cp_ref.thd.valid import get_cu_seqlens_on_cp_rank, thd_copy_valid_tokens_from_per_split_to_rank_local

__all__ = [
    "get_batch_on_this_cp_rank",
    "get_cu_seqlens_on_cp_rank",
    "pad_thd_sequences_for_cp",
    "pad_v",
    "thd_copy_valid_tokens_from_per_split_to_rank_local",
    "thd_cp_rank_order_to_sequence_order",
    "thd_get_partitioned_indices",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
    "thd_sequence_order_to_cp_rank_order",
    "trim_out",
]
