"""Known bugs: what went wrong in other systems, as named problems, so that nobody makes it again. The name has the
project and the number of the report: "te-1930" is NVIDIA/TransformerEngine#1930.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from conformance.checks.budgets import close
from conformance.checks.play import RankCall, on_every_rank
from conformance.checks.reference import Hang, UnsupportedCase, describe_error, run_ranks, values_of_ranks
from conformance.implementation import Implementation
from conformance.problems.named import NamedCases, TableEntry, case, dense, reported
from conformance.tensors import build
from cp_ref.schedules.problem import Sequence
from cp_ref.schedules.words import CP_COMM_TYPES

__all__ = ["KNOWN", "PROJECTS", "KnownBug"]

# ---- bugs that no case shows: of helpers, of groups and of memory layouts


_TOKENS = [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]  # of each of two ranks: sequences of 8 and 4 tokens, dual_chunk


def packed_qkv(impl: Implementation, device: str = "cpu") -> list[str]:
    """Views of one tensor [b, s, 3, h, d] as q, k and v: results and gradients equal those of separate tensors."""
    found: list[str] = []
    for comm, a2a_size in (("p2p", 1), ("a2a", 2)):
        fields = {"cp_comm_type": comm, "a2a_size": a2a_size, "heads_kv": 4, "qkv_format": "bshd"}
        one = case(2, dense(8), dense(8), attn_mask_type="causal", **fields)
        found += on_every_rank(impl, one, build(one, device), _check_packed_rank)
    return found


def _check_packed_rank(call: RankCall) -> list[str]:
    want = call.both(call.leaves())
    qkv = torch.stack([call.inputs[name] for name in ("q", "k", "v")], dim=2).requires_grad_()
    q, k, v = qkv.unbind(2)
    results = call.attend({"q": q, "k": k, "v": v})
    (grad,) = torch.autograd.grad([results["out"], results["lse"]], [qkv], [call.dout, call.dlse])
    got = {name: x.detach() for name, x in results.items()} | dict(zip(("dq", "dk", "dv"), grad.unbind(2), strict=True))
    return close("of a packed qkv", call.case, want, got)


def flat_group_for_two_levels(impl: Implementation, device: str = "cpu") -> list[str]:
    """One group without sizes for "a2a+p2p": a TypeError or ValueError, or all ranks take part; never a group of
    one."""

    def one_rank(member: Any) -> int:
        return impl.ContextParallel(member, "a2a+p2p").size

    try:
        outcomes = run_ranks(4, one_rank, 20.0)
    except Hang as hang:
        return [str(hang)]
    found = []
    for rank, outcome in enumerate(outcomes):
        if outcome.error is None and outcome.value != 4:
            found.append(f"rank {rank}: ContextParallel(group of 4, 'a2a+p2p') has size {outcome.value}")
        elif outcome.error is not None and not isinstance(outcome.error, ValueError | TypeError | impl.Unsupported):
            found.append(f"rank {rank} raised {describe_error(outcome.error)}")
    return found


def batch_lengths_kept(impl: Implementation, device: str = "cpu") -> list[str]:
    """`get_batch_on_this_cp_rank` cuts tokens and returns cu_seqlens unchanged."""
    cut = _helper(impl, "get_batch_on_this_cp_rank")
    cu = torch.tensor([0, 8, 12], dtype=torch.int32, device=device)
    ids = torch.arange(12, device=device)

    def one_rank(member: Any) -> dict[str, torch.Tensor]:
        batch = {"input_ids": ids, "cu_seqlens": cu, "cu_seqlens_padded": cu}
        return cut(batch, cp=impl.ContextParallel(member), qkv_format="thd", cu_seqlens_padded=cu)

    batches, found = values_of_ranks(2, one_rank)
    for rank, batch in enumerate(batches):
        for name in ("cu_seqlens", "cu_seqlens_padded"):
            if batch[name].tolist() != cu.tolist():
                found.append(f"rank {rank}: {name} became {batch[name].tolist()}")
        if batch["input_ids"].tolist() != _TOKENS[rank]:
            found.append(f"rank {rank} has tokens {batch['input_ids'].tolist()}, not {_TOKENS[rank]}")
    return found


def trailing_equal_lengths(impl: Implementation, device: str = "cpu") -> list[str]:
    """`thd_get_partitioned_indices` with lengths [0, 8, 12, 12, 12]: as without the entries that repeat."""
    indices = _helper(impl, "thd_get_partitioned_indices")
    found = []
    for rank, want in enumerate(_TOKENS):
        padded = torch.tensor([0, 8, 12, 12, 12], dtype=torch.int32, device=device)
        got = indices(padded, 12, 2, rank).tolist()
        if got != want:
            found.append(f"thd_get_partitioned_indices([0, 8, 12, 12, 12], 12, 2, {rank}) is {got}, not {want}")
    return found


def _helper(impl: Implementation, name: str) -> Any:
    helper = getattr(getattr(impl, "thd", None), name, None)
    if helper is None:
        raise UnsupportedCase(f"missing: thd.{name}")
    return helper


# ---- reports


PROJECTS = {  # by the first part of a name
    "accelerate": "huggingface/accelerate",
    "automodel": "NVIDIA-NeMo/Automodel",
    "bridge": "NVIDIA-NeMo/Megatron-Bridge",
    "deepspeed": "deepspeedai/DeepSpeed",
    "diffusers": "huggingface/diffusers",
    "easycontext": "jzhang38/EasyContext",
    "magi": "SandAI-org/MagiAttention",
    "megatron": "NVIDIA/Megatron-LM",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "pytorch": "pytorch/pytorch",
    "rfa": "zhuzilin/ring-flash-attention",
    "te": "NVIDIA/TransformerEngine",
    "torchtitan": "pytorch/torchtitan",
    "trl": "huggingface/trl",
    "usp": "feifeibear/long-context-attention",
    "verl": "volcengine/verl",
}
_BSHD: dict[str, Any] = {"qkv_format": "bshd", "attn_mask_type": "causal"}
_LONG = {"dtype": "bfloat16", "heads_q": 1, "heads_kv": 1, "d_qk": 32, "d_v": 32}

KNOWN: dict[str, TableEntry] = {
    "te-3331": reported(
        "p2p on packed sequences whose real length does not divide by 2 * cp_size mislabelled rows: lengths were "
        "divided, not counted; rows and gradients were wrong and differed from run to run.",
        case(4, Sequence(13, 13, 16, 16), Sequence(30, 30, 32, 32), Sequence(7, 7, 8, 8), call="deterministic"),
        tiers=("logic", "probes", "determinism"),
    ),
    "te-1930": reported(
        "Packing rounded a sequence's length down to a multiple, and the last tokens were left out.",
        case(2, Sequence(7, 7, 8, 8), Sequence(11, 11, 12, 12)),
        case(2, dense(7), dense(11)),
        schedules=CP_COMM_TYPES,
    ),
    "te-1931": reported(
        "It was unclear what happens to lengths that do not divide: they have to be right, or refused.",
        case(2, dense(8), dense(7)),
        case(2, dense(8), dense(5), layout="contiguous"),
        tiers=("plan", "logic"),
    ),
    "te-2868": reported(
        "p2p with grouped heads and d_qk != d_v viewed the output in V's shape, which has too few heads.",
        case(2, dense(8), heads_q=12, heads_kv=2, d_qk=192, d_v=128),
        case(2, dense(8), heads_q=12, heads_kv=2, d_qk=128, d_v=64, qkv_format="bshd", attn_mask_type="no_mask"),
    ),
    "te-2826": reported(
        "Latent attention, d_qk != d_v, was refused under a2a, though nothing stands against it.",
        case(4, dense(16), heads_q=8, heads_kv=8, d_qk=192, d_v=128, qkv_format="bshd", attn_mask_type="causal"),
        schedules=("a2a",),
    ),
    "te-2629": reported(
        "Packed sequences with d_v < d_qk need V padded for the kernel and the output trimmed; "
        "without, no kernel fits.",
        case(2, dense(8), Sequence(3, 3, 4, 4), heads_q=4, heads_kv=4, d_qk=192, d_v=128),
        schedules=CP_COMM_TYPES,
    ),
    "te-2829": reported(
        "all_gather on packed sequences needs every sequence's own offsets: with the batch's, the second chunk's rows "
        "are computed as the first's.",
        case(2, dense(8), dense(16), Sequence(1, 1, 4, 4)),
        schedules=("all_gather",),
    ),
    "te-2186": reported(
        "Packed sequences where a chunk is all padding gave NaN, and huge dK and dV.",
        case(4, Sequence(5, 5, 32, 32), Sequence(9, 9, 16, 16)),
        case(4, Sequence(1, 1, 32, 32)),
        schedules=CP_COMM_TYPES,
    ),
    "te-1557": reported(
        "p2p gave wrong dQ, dK and dV, with relative errors up to 1.2, while the output was right.",
        case(4, dense(32), qkv_format="bshd", attn_mask_type="causal"),
        case(3, dense(24), qkv_format="sbhd", attn_mask_type="causal"),
    ),
    "te-1054": reported(
        "dK and dV of a block were suspected to be copied over what the ring had summed, where they should be added.",
        case(4, dense(16)),
        case(5, dense(20), dense(10)),
    ),
    "te-909": reported(
        "Packed sequences were cut by other indices than those that attention took them to have.",
        case(2, dense(4), Sequence(9, 9, 12, 12), dense(8)),
        schedules=CP_COMM_TYPES,
        tiers=("plan", "logic"),
    ),
    "te-716": reported(
        "Merging by exp(lse) overflowed to infinity, and gave NaN, where scores were large.",
        case(4, dense(16), qkv_format="bshd", attn_mask_type="causal", softmax_scale=400.0),
        tiers=("logic",),
    ),
    "te-1624": reported(
        "Two streams updated the running LSE without waiting for each other: results depended on timing.",
        case(4, dense(32), call="deterministic"),
        tiers=("determinism", "logic"),
    ),
    "te-3528": reported(
        "A partial result whose rows see nothing has LSE -inf, and merging two such gave NaN.",
        case(2, dense(16, 8), attn_mask_type="causal_bottom_right"),
        case(4, Sequence(8, 0, 8, 0), dense(8)),
        case(4, dense(16), window_size=(0, 0)),
        schedules=CP_COMM_TYPES,
    ),
    "te-3532": reported(
        "A window side of -1 was handed to a kernel that takes it for minus one, and causal masks hid what they show.",
        case(2, dense(16), window_size=(-1, 0)),
        case(2, dense(16), window_size=(-1, -1), attn_mask_type="no_mask"),
        case(2, dense(16), window_size=(-1, 2), attn_mask_type="no_mask"),
        schedules=CP_COMM_TYPES,
    ),
    "te-2541": reported(
        "A learnable sink had no backend under p2p; models with sinks could not be trained with it.",
        case(4, dense(16), softmax_type="learnable"),
        schedules=("p2p", "all_gather", "a2a+p2p"),
    ),
    "te-3551": reported(
        "The ring's helpers never passed softmax_type on: behind the refusal, a sink would have been dropped silently.",
        case(2, dense(8), softmax_type="learnable"),
        case(2, dense(8), softmax_type="off-by-one"),
    ),
    "te-3249": reported(
        "The backward pass of packed sequences with a learnable sink read out of bounds.",
        case(2, dense(8), Sequence(3, 3, 4, 4), softmax_type="learnable", call="strided"),
        schedules=CP_COMM_TYPES,
        tiers=("logic", "hygiene"),
    ),
    "te-1467": reported(
        "A kernel library changed the layout of the LSE from padded to packed, and the merge read it wrongly.",
        case(2, dense(4), dense(16), dense(8), heads_q=6, heads_kv=3),
        schedules=("p2p", "a2a+p2p"),
    ),
    "te-821": reported(
        "Partial outputs and gradients were added up in bfloat16: errors grow with the group.",
        case(8, dense(256), dtype="bfloat16", heads_q=1, heads_kv=1, d_qk=32, d_v=32, attn_mask_type="no_mask"),
        tiers=("budget",),
    ),
    "te-2892": reported(
        "Lengths with and without padding differed, padding was counted as tokens, and training went wrong.",
        case(2, Sequence(5, 5, 16, 16), Sequence(9, 9, 16, 16)),
        schedules=CP_COMM_TYPES,
    ),
    "te-3205": reported(
        "Padding and the rows behind the last sequence of a static buffer held what memory held, not exact zeros.",
        case(2, Sequence(5, 5, 8, 8), tails=(12, 12)),
        schedules=CP_COMM_TYPES,
        tiers=("logic", "hygiene"),
    ),
    "te-2391": reported(
        "Padding between sequences was not supported by the kernel at hand, and packed rows were misplaced.",
        case(2, Sequence(3, 3, 12, 12), dense(8), Sequence(1, 1, 8, 8)),
        schedules=CP_COMM_TYPES,
    ),
    # rings and their hybrids
    "rfa-42": reported(
        "Errors of the backward pass grew with the ring, without bound for deep models: every hop rounded to bfloat16.",
        case(8, dense(256), **_LONG),
        case(8, dense(256), attn_mask_type="no_mask", **_LONG),
        tiers=("budget",),
    ),
    "rfa-22": reported(
        "Every block's output was rounded to bfloat16 before the merge in float32.",
        case(8, dense(256), attn_mask_type="no_mask", **_LONG),
        tiers=("budget",),
    ),
    "rfa-87": reported(
        "dq came back in bfloat16 for float16 inputs.",
        case(2, dense(64), dtype="float16", d_qk=32, d_v=32),
        tiers=("logic", "budget"),
    ),
    "rfa-46": reported(
        "The zigzag ring on packed sequences read illegal memory in the halves of its lengths.",
        case(4, dense(8), dense(24), dense(8), call="strided"),
        tiers=("logic", "hygiene"),
    ),
    "rfa-39": reported(
        "A length that does not divide (32,769) left some ranks with other messages than their "
        "peers, and an obscure error.",
        case(4, dense(33)),
        case(4, dense(33), layout="contiguous"),
    ),
    "easycontext-47": reported(
        "2,999 tokens were split 750, 750, 750, 749, and the ranks' shapes did not fit.",
        case(4, dense(15), qkv_format="bshd", attn_mask_type="causal"),
        tiers=("plan", "logic"),
    ),
    "easycontext-14": reported(
        "exp overflowed in the merge by LSE.",
        case(2, dense(8), softmax_scale=1000.0),
        tiers=("logic",),
    ),
    "prime-rl-2828": reported(
        "The ring ignored the sliding window.",
        case(4, dense(32), window_size=(5, 0)),
        case(4, dense(32), window_size=(5, 3), attn_mask_type="no_mask"),
    ),
    "prime-rl-3397": reported(
        "Attention sinks were silently dropped under context parallelism.",
        case(2, dense(8), softmax_type="learnable"),
        schedules=("p2p", "a2a"),
    ),
    "prime-rl-3042": reported(
        "Ulysses stopped at as many ranks as there are kv heads; beyond, kv heads have to be replicated.",
        case(4, dense(16), heads_q=8, heads_kv=2),
        case(8, dense(16), heads_q=8, heads_kv=1),
        schedules=("a2a", "a2a+p2p"),
    ),
    "usp-149": reported(
        "The backward pass returned another number of gradients than the forward pass had arguments.",
        case(2, dense(8), softmax_type="learnable", qkv_format="bshd", attn_mask_type="causal"),
        case(2, dense(8), qkv_format="bshd", attn_mask_type="causal", call="use_plan return_max_logit deterministic"),
        schedules=("p2p", "a2a+p2p"),
        tiers=("logic",),
    ),
    "usp-72": reported(
        "Updating the LSE was not stable.",
        case(4, dense(16), softmax_scale=300.0),
        schedules=("p2p", "a2a+p2p"),
        tiers=("logic",),
    ),
    "usp-120": reported(
        "The backward pass of q, k and v packed in one tensor failed; the test returned before it.",
        by_hand=packed_qkv,
    ),
    "megatron-1341": reported(
        "a2a+p2p needs another order of the ranks' tokens than p2p, and batches were cut in the order of p2p.",
        case(4, dense(16), dense(8)),
        case(6, dense(24), heads_q=6, heads_kv=6),
        case(8, dense(16), heads_q=2, heads_kv=2),
        schedules=("a2a+p2p",),
        tiers=("plan", "logic"),
    ),
    "magi-71": reported(
        "Hierarchical communication took a wrong rank for the peer.",
        case(8, dense(32), heads_q=8, heads_kv=8),
        case(6, dense(24), heads_q=6, heads_kv=2),
        schedules=("a2a+p2p",),
    ),
    "magi-239": reported(
        "max_logit was wrong where several ranks contribute to it.",
        case(4, dense(16), heads_q=4, heads_kv=2, call="return_max_logit"),
        case(2, dense(8), dense(16, 4), call="return_max_logit", attn_mask_type="no_mask"),
        schedules=("p2p", "all_gather", "a2a", "a2a+p2p"),
        tiers=("logic",),
    ),
    "magi-55": reported(
        "out and dq were wrong now and then while communication overlapped: a fence was missing.",
        case(4, dense(64), heads_q=4, heads_kv=2, call="deterministic"),
        tiers=("determinism", "logic"),
    ),
    "magi-123": reported(
        "Cross attention failed an assertion that both sides have the same length.",
        case(2, dense(8, 16), dense(12, 4), attn_mask_type="padding"),
        schedules=("p2p", "all_gather", "a2a", "a2a+p2p"),
    ),
    # PyTorch and training frameworks
    "pytorch-141429": reported(
        "The ring without a causal mask crashed under the load-balanced layout, which was the default.",
        case(2, dense(8), dense(8), qkv_format="bshd", attn_mask_type="no_mask"),
        case(4, dense(16), qkv_format="bshd", attn_mask_type="no_mask", layout="contiguous"),
        schedules=("p2p", "all_gather"),
    ),
    "pytorch-147793": reported(
        "The plain backend failed under a causal mask.",
        case(2, dense(8), **_BSHD),
        case(2, dense(8), **_BSHD, layout="contiguous"),
        schedules=("p2p", "all_gather"),
    ),
    "pytorch-156012": reported(
        "bfloat16 results were ten times outside the tolerance on one kind of device.",
        case(4, dense(128), **(_BSHD | {"dtype": "bfloat16", "d_qk": 32, "d_v": 32})),
        schedules=("p2p", "all_gather"),
        tiers=("budget",),
    ),
    "torchtitan-3206": reported(
        "K and V were gathered along the wrong dimension; where sizes happen to agree nothing notices.",
        case(2, *[dense(4)] * 4, qkv_format="sbhd", attn_mask_type="causal", heads_q=4, heads_kv=4, d_qk=4, d_v=4),
        case(2, *[dense(4)] * 4, qkv_format="bshd", attn_mask_type="causal", heads_q=4, heads_kv=4, d_qk=4, d_v=4),
        schedules=CP_COMM_TYPES,
    ),
    "accelerate-4177": reported(
        "Layers with a sliding window silently became full causal attention.",
        case(2, dense(16), **_BSHD, window_size=(3, 0)),
        schedules=CP_COMM_TYPES,
    ),
    "trl-6843": reported(
        "Packed documents silently attended across each other's borders.",
        case(2, dense(4), dense(8), dense(4)),
        case(2, dense(4), dense(8), dense(4), layout="contiguous"),
        schedules=CP_COMM_TYPES,
    ),
    "diffusers-14265": reported(
        "The ring's backward pass used the K and V of its first step in every step: wrong gradients, without an error.",
        case(3, dense(12), qkv_format="bshd", attn_mask_type="no_mask"),
        case(4, dense(16), **_BSHD),
        tiers=("logic",),
    ),
    "automodel-3157": reported(
        "The backward pass transposed twice, and gradients were silently those of other heads and rows.",
        case(2, *[dense(4)] * 2, qkv_format="sbhd", attn_mask_type="causal", heads_q=4, heads_kv=4),
        schedules=CP_COMM_TYPES,
        tiers=("logic", "hygiene"),
    ),
    "automodel-2384": reported(
        "A non-contiguous permute made the backward pass read wrong strides, and gradients were NaN.",
        case(2, dense(8), dense(4), call="strided"),
        case(2, dense(8), **_BSHD, call="strided"),
        schedules=CP_COMM_TYPES,
        tiers=("hygiene",),
    ),
    "deepspeed-7384": reported(
        "Ulysses gave silently corrupt outputs where the sequence length does not divide by the group.",
        case(4, dense(13), **_BSHD),
        case(4, dense(13), dense(6)),
        schedules=CP_COMM_TYPES,
    ),
    "deepspeed-5808": reported(
        "Ulysses was wrong for a batch of more than one.",
        case(2, *[dense(8)] * 3, **_BSHD),
        case(4, *[dense(8)] * 2, qkv_format="sbhd", attn_mask_type="causal"),
        schedules=("a2a", "a2a+p2p"),
    ),
    "deepspeed-4674": reported(
        "The number of heads limited the group; a number that does not fit has to raise.",
        case(3, dense(12), heads_q=6, heads_kv=3),
        schedules=("a2a",),
        errors=("heads-not-a-multiple",),
    ),
    "megatron-1464": reported(
        "p2p gave wrong dQ, dK and dV (the report behind TransformerEngine#1557).",
        case(4, *[dense(16)] * 2, qkv_format="sbhd", attn_mask_type="causal"),
    ),
    "megatron-1764": reported(
        "NaN where all tokens of a rank are masked.",
        case(4, Sequence(2, 2, 16, 16), Sequence(3, 3, 16, 16), qkv_format="sbhd"),
        case(4, dense(16, 8), attn_mask_type="causal_bottom_right"),
        schedules=CP_COMM_TYPES,
    ),
    "megatron-7097": reported(
        "Only powers of two were taken for the size of the group.",
        case(3, dense(12), heads_q=3, heads_kv=3),
        case(5, dense(20), heads_q=5, heads_kv=1),
        case(6, dense(24), heads_q=6, heads_kv=2),
        case(7, dense(14), heads_q=7, heads_kv=7),
        schedules=CP_COMM_TYPES,
        tiers=("plan", "logic"),
    ),
    "megatron-5597": reported(
        "A sliding window needs the neighbours' last tokens alone, and p2p refused windows altogether.",
        case(4, dense(64), window_size=(9, 0)),
        case(4, dense(64), window_size=(9, 0), layout="contiguous"),
        case(4, Sequence(20, 20, 24, 24), dense(40), window_size=(7, 0)),
        tiers=("plan", "logic", "probes"),
    ),
    "bridge-1964": reported(
        "Cutting a batch cut cu_seqlens too, as if it were one more sequence.",
        by_hand=batch_lengths_kept,
    ),
    "bridge-4489": reported(
        "Lengths padded with equal entries at the end were taken for sequences, and tokens went to wrong ranks.",
        case(2, dense(8), dense(4), *[Sequence(0, 0, 0, 0)] * 5, tails=(4, 4)),
        by_hand=trailing_equal_lengths,
    ),
    "bridge-2667": reported(
        "a2a+p2p without the sizes of its two levels silently switched context parallelism off.",
        by_hand=flat_group_for_two_levels,
    ),
    "verl-4656": reported(
        "A sequence with fewer tokens than there are ranks crashed.",
        case(4, Sequence(1, 1, 8, 8), Sequence(3, 3, 8, 8), dense(16)),
        case(4, dense(1), dense(2), dense(1), layout="contiguous"),
        schedules=CP_COMM_TYPES,
    ),
}


class KnownBug(NamedCases):
    """A bug that was reported of another system, under the schedules that had it."""

    word = "known"
    table: ClassVar[dict[str, TableEntry]] = KNOWN
