"""Calls with scores on "fa4" over the simulated group, against the oracle in float64.

python -m tests.gpu.scores.call_cases
"""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any

import torch

import cp_fast
from cp_ref import SimGroup, dense_attention
from tests.gpu.scores.launch_cases import biased

__all__ = ["CALLS", "wrong_call"]

CALLS: dict[str, dict[str, Any]] = {
    "p2p": {"cp_comm_type": "p2p"},
    "all_gather, contiguous": {"cp_comm_type": "all_gather", "layout": "contiguous"},
    "a2a": {"cp_comm_type": "a2a"},
    "p2p, thd": {"cp_comm_type": "p2p", "cu_seqlens": (0, 200, 456, 1024)},
}


def wrong_call(name: str) -> list[str]:
    """What is wrong with a call on two ranks: nothing, or lines of text."""
    given = dict(CALLS[name])
    how, lengths = (
        {name: given.pop(name) for name in ("cp_comm_type", "layout") if name in given},
        given.pop("cu_seqlens", None),
    )
    torch.manual_seed(0)
    device, heads = "cuda", 8
    shape = (1024,) if lengths else (2, 512)
    q, k, v, dout = (
        torch.randn(*shape, h, 128, device=device, dtype=torch.bfloat16) for h in (heads, heads // 2, heads // 2, heads)
    )
    scores: dict[str, Any] = {
        "alibi_slopes": torch.rand(heads, device=device) / 8,
        "score_mod": biased,
        "aux_tensors": {
            "table": torch.randn(heads, 50, device=device),
            "kinds": torch.randint(0, 3, (2000,), device=device),
        },
        "dropout_p": 0.2,
        "dropout_seed": 11,
    }
    if lengths:
        cu = torch.tensor(lengths, dtype=torch.int32)
        given |= {"qkv_format": "thd", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    masks = {"attn_mask_type": "padding_causal" if lengths else "causal"}

    def exact() -> list[torch.Tensor]:
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        out, *_ = dense_attention(*leaves, **given, **masks, **scores)
        out.backward(dout.double())
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def ranks(member: Any) -> list[torch.Tensor]:
        cp = cp_fast.ContextParallel(member, backend="fa4", **how)
        cut = {"qkv_format": "thd", "cu_seqlens_padded": given["cu_seqlens_q"]} if lengths else {}
        leaves = [cp_fast.shard(x, cp=cp, **cut).clone().requires_grad_() for x in (q, k, v)]
        out = cp_fast.attention(*leaves, cp=cp, **given, **masks, **scores)
        out.backward(cp_fast.shard(dout, cp=cp, **cut))
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        return [cp_fast.unshard(x, cp=cp, **cut) for x in (out.detach(), *grads)]

    wide, wrong = exact(), list[str]()
    for rank, results in enumerate(SimGroup(2).run(ranks)):
        for what, found, right in zip(("out", "dq", "dk", "dv"), results, wide, strict=True):
            error, most = float((found - right).abs().max()), float(right.abs().max())
            if rank == 0:
                print(f"    {what}: largest error {error:.2e} of {most:.2e}")
            if not error <= 0.02 * most:
                wrong.append(f"rank {rank} {what}: largest error {error:.2e} of {most:.2e}")
    return wrong


def main() -> int:
    """Run all calls; the number of failures."""
    failed = 0
    for name in CALLS:
        began = time.monotonic()
        try:
            wrong = wrong_call(name)
        except Exception:
            wrong = [traceback.format_exc()]
        failed += bool(wrong)
        print(f"call {name}: {'WRONG' if wrong else 'right'} ({time.monotonic() - began:.0f} s)", *wrong, sep="\n    ")
    return failed


if __name__ == "__main__":
    sys.exit(main())
