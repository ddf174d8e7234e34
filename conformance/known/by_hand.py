"""Known bugs that no case shows: bugs of helpers, of groups and of memory layouts."""

from __future__ import annotations

from typing import Any

import torch

from conformance.implementation import Implementation
from conformance.judge.named_entries import dense
from conformance.judge.ranks import UnsupportedCase, values_of_ranks
from conformance.judge.reference import Hang, describe_error, run_ranks
from conformance.known.known_bug import case
from conformance.run.case_tensors import build
from conformance.tiers.calls.one_rank import Call, close, on_every_rank

__all__ = ["batch_lengths_kept", "flat_group_for_two_levels", "packed_qkv", "trailing_equal_lengths"]

_TOKENS = [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]  # of each of two ranks: sequences of 8 and 4 tokens, dual_chunk


def packed_qkv(impl: Implementation, device: str = "cpu") -> list[str]:
    """Views of one tensor [b, s, 3, h, d] as q, k and v: results and gradients equal those of separate tensors."""
    found: list[str] = []
    for comm, a2a_size in (("p2p", 1), ("a2a", 2)):
        fields = {"cp_comm_type": comm, "a2a_size": a2a_size, "heads_kv": 4, "qkv_format": "bshd"}
        one = case(2, dense(8), dense(8), attn_mask_type="causal", **fields)
        found += on_every_rank(impl, one, build(one, device), _check_packed_rank)
    return found


def _check_packed_rank(call: Call) -> list[str]:
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
