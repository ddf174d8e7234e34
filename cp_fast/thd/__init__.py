"""Helpers for packed sequences (thd): the small steps of context-parallel attention on variable lengths.

The names, arguments and results of `cp_ref.thd`, at the speed of memory: registered operators (`torch.compile` goes
through them), with implementations in CUDA, C++, Numba CUDA and PyTorch; `cp_fast.movers` selects one.

GLOBAL lengths are those of the whole packed buffer. LOCAL lengths are those of a rank's slice: the global ones divided
by cp_size. They are on the device of the data, or on the CPU. No helper waits:

    lengths on the CPU   their values are checked, and a ValueError names the sequence; they go to a GPU through pinned
                         memory (but not into the capture of a CUDA graph: a ValueError)
    lengths on a GPU     shapes and dtypes are checked; the kernels check the values where they run. A broken rule ends
                         in a device-side assertion, which PyTorch reports at the next call that waits

The helpers accept any number of sequences, sequences of length 0, a tail after the last one, int32 and int64 lengths.
Data has any strides. If the last axis is not dense, operands to be read are copied first, and operands to be changed in
place are refused. Operands that overlap the latter are refused too. The helpers that change something in place are not
differentiable, and refuse tensors that require grad; the two reorders and `thd_read_half_tensor` are differentiable.
"""

from cp_fast.thd.fast_batches import get_batch_on_this_cp_rank, pad_thd_sequences_for_cp
from cp_fast.thd.operators import (
    get_cu_seqlens_on_cp_rank,
    thd_copy_valid_tokens_from_per_split_to_rank_local,
    thd_cp_rank_order_to_sequence_order,
    thd_get_partitioned_indices,
    thd_grad_correction,
    thd_out_correction,
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_second_half_lse_correction,
    thd_sequence_order_to_cp_rank_order,
)
from cp_ref.contract.thd_checks import pad_v, trim_out

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
            f"{__name__} has no {name}; cp_fast.position_ids(cp=cp, qkv_format='thd', cu_seqlens_padded=...) gives "
            "the positions of this rank's rows, or of the whole batch over one rank"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
