"""Helpers for packed sequences (thd): the small steps of context-parallel attention on variable lengths.

    indices, valid, halves, corrections, batches   the helpers, as declared in `cp_ref.common.thd`
    packed_lengths, lse   what they share: the lengths of a packed buffer, and the two shapes of an LSE

A helper is one index table of `cp_ref.common.thd.row_tables`, which says which rows it reads or changes, and one step
with these rows: gather them, write or add them, or merge them.

GLOBAL lengths are those of the whole packed buffer. LOCAL lengths are those of a rank's slice: the global ones divided
by cp_size.
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


def __getattr__(name: str) -> object:
    if name == "generate_positional_ids_for_cp":  # an AttributeError's words would be lost in `from thd import name`
        raise ImportError(
            f"{__name__} has no {name}; cp_ref.position_ids(cp=cp, qkv_format='thd', cu_seqlens_padded=...) gives "
            "the positions of this rank's rows, or of the whole batch over one rank"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
