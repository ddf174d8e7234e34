"""Known bugs: what went wrong in other systems, as named problems, so that nobody makes it again. Here are those of
PyTorch and of training frameworks: torchtitan, Accelerate, TRL, diffusers, DeepSpeed, Megatron, NeMo.
"""

from __future__ import annotations

from typing import Any, ClassVar

from conformance.problems.known_libraries import (
    RINGS,
    TRANSFORMER_ENGINE,
    batch_lengths_kept,
    flat_group_for_two_levels,
    trailing_equal_lengths,
)
from conformance.problems.named import NamedCases, TableEntry, case, dense, reported
from cp_ref.schedules.problem import Sequence
from cp_ref.schedules.words import CP_COMM_TYPES

__all__ = ["KNOWN", "KnownBug"]

_BSHD: dict[str, Any] = {"qkv_format": "bshd", "attn_mask_type": "causal"}

_FRAMEWORKS: dict[str, TableEntry] = {
    "pytorch-141429": reported(
        "pytorch/pytorch#141429",
        "The ring without a causal mask crashed under the load-balanced layout, which was the default.",
        case(2, dense(8), dense(8), qkv_format="bshd", attn_mask_type="no_mask"),
        case(4, dense(16), qkv_format="bshd", attn_mask_type="no_mask", layout="contiguous"),
        schedules=("p2p", "all_gather"),
    ),
    "pytorch-147793": reported(
        "pytorch/pytorch#147793",
        "The plain backend failed under a causal mask.",
        case(2, dense(8), **_BSHD),
        case(2, dense(8), **_BSHD, layout="contiguous"),
        schedules=("p2p", "all_gather"),
    ),
    "pytorch-156012": reported(
        "pytorch/pytorch#156012",
        "bfloat16 results were ten times outside the tolerance on one kind of device.",
        case(4, dense(128), **(_BSHD | {"dtype": "bfloat16", "d_qk": 32, "d_v": 32})),
        schedules=("p2p", "all_gather"),
        tiers=("budget",),
    ),
    "torchtitan-3206": reported(
        "pytorch/torchtitan#3206",
        "K and V were gathered along the wrong dimension; where sizes happen to agree nothing notices.",
        case(2, *[dense(4)] * 4, qkv_format="sbhd", attn_mask_type="causal", heads_q=4, heads_kv=4, d_qk=4, d_v=4),
        case(2, *[dense(4)] * 4, qkv_format="bshd", attn_mask_type="causal", heads_q=4, heads_kv=4, d_qk=4, d_v=4),
        schedules=CP_COMM_TYPES,
    ),
    "accelerate-4177": reported(
        "huggingface/accelerate#4177",
        "Layers with a sliding window silently became full causal attention.",
        case(2, dense(16), **_BSHD, window_size=(3, 0)),
        schedules=CP_COMM_TYPES,
    ),
    "trl-6843": reported(
        "huggingface/trl#6843",
        "Packed documents silently attended across each other's borders.",
        case(2, dense(4), dense(8), dense(4)),
        case(2, dense(4), dense(8), dense(4), layout="contiguous"),
        schedules=CP_COMM_TYPES,
    ),
    "diffusers-14265": reported(
        "huggingface/diffusers#14265",
        "The ring's backward pass used the K and V of its first step in every step: wrong gradients, without an error.",
        case(3, dense(12), qkv_format="bshd", attn_mask_type="no_mask"),
        case(4, dense(16), **_BSHD),
        tiers=("logic",),
    ),
    "automodel-3157": reported(
        "NVIDIA-NeMo/Automodel#3157",
        "The backward pass transposed twice, and gradients were silently those of other heads and rows.",
        case(2, *[dense(4)] * 2, qkv_format="sbhd", attn_mask_type="causal", heads_q=4, heads_kv=4),
        schedules=CP_COMM_TYPES,
        tiers=("logic", "hygiene"),
    ),
    "automodel-2384": reported(
        "NVIDIA-NeMo/Automodel#2384",
        "A non-contiguous permute made the backward pass read wrong strides, and gradients were NaN.",
        case(2, dense(8), dense(4), call="strided"),
        case(2, dense(8), **_BSHD, call="strided"),
        schedules=CP_COMM_TYPES,
        tiers=("hygiene",),
    ),
    "deepspeed-7384": reported(
        "deepspeedai/DeepSpeed#7384",
        "Ulysses gave silently corrupt outputs where the sequence length does not divide by the group.",
        case(4, dense(13), **_BSHD),
        case(4, dense(13), dense(6)),
        schedules=CP_COMM_TYPES,
    ),
    "deepspeed-5808": reported(
        "deepspeedai/DeepSpeed#5808",
        "Ulysses was wrong for a batch of more than one.",
        case(2, *[dense(8)] * 3, **_BSHD),
        case(4, *[dense(8)] * 2, qkv_format="sbhd", attn_mask_type="causal"),
        schedules=("a2a", "a2a+p2p"),
    ),
    "deepspeed-4674": reported(
        "deepspeedai/DeepSpeed#4674",
        "The number of heads limited the group; a number that does not fit has to raise.",
        case(3, dense(12), heads_q=6, heads_kv=3),
        schedules=("a2a",),
        errors=("heads-not-a-multiple",),
    ),
    "megatron-1464": reported(
        "NVIDIA/Megatron-LM#1464",
        "p2p gave wrong dQ, dK and dV (the report behind TransformerEngine#1557).",
        case(4, *[dense(16)] * 2, qkv_format="sbhd", attn_mask_type="causal"),
    ),
    "megatron-1764": reported(
        "NVIDIA/Megatron-LM#1764",
        "NaN where all tokens of a rank are masked.",
        case(4, Sequence(2, 2, 16, 16), Sequence(3, 3, 16, 16), qkv_format="sbhd"),
        case(4, dense(16, 8), attn_mask_type="causal_bottom_right"),
        schedules=CP_COMM_TYPES,
    ),
    "megatron-7097": reported(
        "NVIDIA/Megatron-LM#7097",
        "Only powers of two were taken for the size of the group.",
        case(3, dense(12), heads_q=3, heads_kv=3),
        case(5, dense(20), heads_q=5, heads_kv=1),
        case(6, dense(24), heads_q=6, heads_kv=2),
        case(7, dense(14), heads_q=7, heads_kv=7),
        schedules=CP_COMM_TYPES,
        tiers=("plan", "logic"),
    ),
    "megatron-5597": reported(
        "NVIDIA/Megatron-LM#5597",
        "A sliding window needs the neighbours' last tokens alone, and p2p refused windows altogether.",
        case(4, dense(64), window_size=(9, 0)),
        case(4, dense(64), window_size=(9, 0), layout="contiguous"),
        case(4, Sequence(20, 20, 24, 24), dense(40), window_size=(7, 0)),
        tiers=("plan", "logic", "probes"),
    ),
    "bridge-1964": reported(
        "NVIDIA-NeMo/Megatron-Bridge#1964",
        "Cutting a batch cut cu_seqlens too, as if it were one more sequence.",
        by_hand=batch_lengths_kept,
    ),
    "bridge-4489": reported(
        "NVIDIA-NeMo/Megatron-Bridge#4489",
        "Lengths padded with equal entries at the end were taken for sequences, and tokens went to wrong ranks.",
        case(2, dense(8), dense(4), *[Sequence(0, 0, 0, 0)] * 5, tails=(4, 4)),
        by_hand=trailing_equal_lengths,
    ),
    "bridge-2667": reported(
        "NVIDIA-NeMo/Megatron-Bridge#2667",
        "a2a+p2p without the sizes of its two levels silently switched context parallelism off.",
        by_hand=flat_group_for_two_levels,
    ),
    "verl-4656": reported(
        "volcengine/verl#4656",
        "A sequence with fewer tokens than there are ranks crashed.",
        case(4, Sequence(1, 1, 8, 8), Sequence(3, 3, 8, 8), dense(16)),
        case(4, dense(1), dense(2), dense(1), layout="contiguous"),
        schedules=CP_COMM_TYPES,
    ),
}


KNOWN: dict[str, TableEntry] = TRANSFORMER_ENGINE | RINGS | _FRAMEWORKS


class KnownBug(NamedCases):
    """A bug that was reported of another system, under the schedules that had it."""

    word = "known"
    table: ClassVar[dict[str, TableEntry]] = KNOWN
