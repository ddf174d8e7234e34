"""Reports about NVIDIA/TransformerEngine."""

from __future__ import annotations

from conformance.judge.named_entries import dense
from conformance.known.known_bug import Known, case, reported
from cp_ref.schedules.problem import Sequence
from cp_ref.schedules.words import CP_COMM_TYPES

__all__ = ["REPORTS"]

_TE = "NVIDIA/TransformerEngine#"

REPORTS: dict[str, Known] = {
    "te-3331": reported(
        _TE + "3331",
        "p2p on packed sequences whose real length does not divide by 2 * cp_size mislabelled rows: lengths were "
        "divided, not counted; rows and gradients were wrong and differed from run to run.",
        case(4, Sequence(13, 13, 16, 16), Sequence(30, 30, 32, 32), Sequence(7, 7, 8, 8), call="deterministic"),
        tiers=("logic", "probes", "determinism"),
    ),
    "te-1930": reported(
        _TE + "1930",
        "Packing rounded a sequence's length down to a multiple, and the last tokens were left out.",
        case(2, Sequence(7, 7, 8, 8), Sequence(11, 11, 12, 12)),
        case(2, dense(7), dense(11)),
        schedules=CP_COMM_TYPES,
    ),
    "te-1931": reported(
        _TE + "1931",
        "It was unclear what happens to lengths that do not divide: they have to be right, or refused.",
        case(2, dense(8), dense(7)),
        case(2, dense(8), dense(5), layout="contiguous"),
        tiers=("plan", "logic"),
    ),
    "te-2868": reported(
        _TE + "2868",
        "p2p with grouped heads and d_qk != d_v viewed the output in V's shape, which has too few heads.",
        case(2, dense(8), heads_q=12, heads_kv=2, d_qk=192, d_v=128),
        case(2, dense(8), heads_q=12, heads_kv=2, d_qk=128, d_v=64, qkv_format="bshd", attn_mask_type="no_mask"),
    ),
    "te-2826": reported(
        _TE + "2826",
        "Latent attention, d_qk != d_v, was refused under a2a, though nothing stands against it.",
        case(4, dense(16), heads_q=8, heads_kv=8, d_qk=192, d_v=128, qkv_format="bshd", attn_mask_type="causal"),
        schedules=("a2a",),
    ),
    "te-2629": reported(
        _TE + "2629",
        "Packed sequences with d_v < d_qk need V padded for the kernel and the output trimmed; "
        "without, no kernel fits.",
        case(2, dense(8), Sequence(3, 3, 4, 4), heads_q=4, heads_kv=4, d_qk=192, d_v=128),
        schedules=CP_COMM_TYPES,
    ),
    "te-2829": reported(
        _TE + "2829",
        "all_gather on packed sequences needs every sequence's own offsets: with the batch's, the second chunk's rows "
        "are computed as the first's.",
        case(2, dense(8), dense(16), Sequence(1, 1, 4, 4)),
        schedules=("all_gather",),
    ),
    "te-2186": reported(
        _TE + "2186",
        "Packed sequences where a chunk is all padding gave NaN, and huge dK and dV.",
        case(4, Sequence(5, 5, 32, 32), Sequence(9, 9, 16, 16)),
        case(4, Sequence(1, 1, 32, 32)),
        schedules=CP_COMM_TYPES,
    ),
    "te-1557": reported(
        _TE + "1557",
        "p2p gave wrong dQ, dK and dV, with relative errors up to 1.2, while the output was right.",
        case(4, dense(32), qkv_format="bshd", attn_mask_type="causal"),
        case(3, dense(24), qkv_format="sbhd", attn_mask_type="causal"),
    ),
    "te-1054": reported(
        _TE + "1054",
        "dK and dV of a block were suspected to be copied over what the ring had summed, where they should be added.",
        case(4, dense(16)),
        case(5, dense(20), dense(10)),
    ),
    "te-909": reported(
        _TE + "909",
        "Packed sequences were cut by other indices than those that attention took them to have.",
        case(2, dense(4), Sequence(9, 9, 12, 12), dense(8)),
        schedules=CP_COMM_TYPES,
        tiers=("plan", "logic"),
    ),
    "te-716": reported(
        _TE + "716",
        "Merging by exp(lse) overflowed to infinity, and gave NaN, where scores were large.",
        case(4, dense(16), qkv_format="bshd", attn_mask_type="causal", softmax_scale=400.0),
        tiers=("logic",),
    ),
    "te-1624": reported(
        _TE + "1624",
        "Two streams updated the running LSE without waiting for each other: results depended on timing.",
        case(4, dense(32), call="deterministic"),
        tiers=("determinism", "logic"),
    ),
    "te-3528": reported(
        _TE + "3528",
        "A partial result whose rows see nothing has LSE -inf, and merging two such gave NaN.",
        case(2, dense(16, 8), attn_mask_type="causal_bottom_right"),
        case(4, Sequence(8, 0, 8, 0), dense(8)),
        case(4, dense(16), window_size=(0, 0)),
        schedules=CP_COMM_TYPES,
    ),
    "te-3532": reported(
        _TE + "3532",
        "A window side of -1 was handed to a kernel that takes it for minus one, and causal masks hid what they show.",
        case(2, dense(16), window_size=(-1, 0)),
        case(2, dense(16), window_size=(-1, -1), attn_mask_type="no_mask"),
        case(2, dense(16), window_size=(-1, 2), attn_mask_type="no_mask"),
        schedules=CP_COMM_TYPES,
    ),
    "te-2541": reported(
        _TE + "2541",
        "A learnable sink had no backend under p2p; models with sinks could not be trained with it.",
        case(4, dense(16), softmax_type="learnable"),
        schedules=("p2p", "all_gather", "a2a+p2p"),
    ),
    "te-3551": reported(
        _TE + "3551",
        "The ring's helpers never passed softmax_type on: behind the refusal, a sink would have been dropped silently.",
        case(2, dense(8), softmax_type="learnable"),
        case(2, dense(8), softmax_type="off-by-one"),
    ),
    "te-3249": reported(
        _TE + "3249",
        "The backward pass of packed sequences with a learnable sink read out of bounds.",
        case(2, dense(8), Sequence(3, 3, 4, 4), softmax_type="learnable", call="strided"),
        schedules=CP_COMM_TYPES,
        tiers=("logic", "hygiene"),
    ),
    "te-1467": reported(
        _TE + "1467",
        "A kernel library changed the layout of the LSE from padded to packed, and the merge read it wrongly.",
        case(2, dense(4), dense(16), dense(8), heads_q=6, heads_kv=3),
        schedules=("p2p", "a2a+p2p"),
    ),
    "te-821": reported(
        _TE + "821",
        "Partial outputs and gradients were added up in bfloat16: errors grow with the group.",
        case(8, dense(256), dtype="bfloat16", heads_q=1, heads_kv=1, d_qk=32, d_v=32, attn_mask_type="no_mask"),
        tiers=("budget",),
    ),
    "te-2892": reported(
        _TE + "2892",
        "Lengths with and without padding differed, padding was counted as tokens, and training went wrong.",
        case(2, Sequence(5, 5, 16, 16), Sequence(9, 9, 16, 16)),
        schedules=CP_COMM_TYPES,
    ),
    "te-3205": reported(
        _TE + "3205",
        "Padding and the rows behind the last sequence of a static buffer held what memory held, not exact zeros.",
        case(2, Sequence(5, 5, 8, 8), tails=(12, 12)),
        schedules=CP_COMM_TYPES,
        tiers=("logic", "hygiene"),
    ),
    "te-2391": reported(
        _TE + "2391",
        "Padding between sequences was not supported by the kernel at hand, and packed rows were misplaced.",
        case(2, Sequence(3, 3, 12, 12), dense(8), Sequence(1, 1, 8, 8)),
        schedules=CP_COMM_TYPES,
    ),
}
