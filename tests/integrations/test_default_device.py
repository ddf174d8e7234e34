"""A default device of PyTorch (torch.set_default_device) is for the user's tensors: none of ours lands there.

The device is "meta", whose tensors have no values: whatever lands there is missed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from cp_fast.integrations import flash_attn, ring_flash_attn, token_batches, torchtitan
from cp_fast.integrations.hugging_face import model_batches
from cp_ref import SimGroup, masks
from cp_ref.schedules.words import LAYOUTS

IDS = torch.arange(16).view(2, 8)
MASK = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
CU, POSITIONS = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
X = torch.ones(4, 2, 8)
VARLEN = SimpleNamespace(cu_seq_q=CU, cu_seq_k=CU, max_q=5, max_k=5, _replace=lambda **new: new)
ROW = {"input_ids": IDS[:1], "labels": IDS[:1]}

OF_CP_FAST: dict[str, Callable[[Any], Any]] = {
    "rows": lambda cp: token_batches.shard_tokens({"input_ids": IDS, "labels": IDS}, cp=cp),
    "padded": lambda cp: token_batches.shard_tokens({"input_ids": IDS, "attention_mask": MASK}, cp=cp),
    "packed": lambda cp: token_batches.shard_tokens({**ROW, "position_ids": POSITIONS}, cp=cp),
    "lengths": lambda cp: model_batches.shard_batch({**ROW, "cu_seq_lens_q": CU}, cp=cp),
    "flash-attn": lambda cp: flash_attn.flash_attn_varlen_func(X, X, X, CU, CU, 5, 5, causal=True, cp=cp),
    "ring-flash-attn": lambda cp: ring_flash_attn.zigzag_ring_flash_attn_varlen_func(
        X, X, X, torch.tensor([0, 4], device="cpu"), 4, causal=True, cp=cp
    ),
    "torchtitan": lambda cp: torchtitan.prepare_context_parallel_input(
        IDS[:1], IDS[:1], {"positions": POSITIONS, "attention_masks": VARLEN}, cp
    )[:2],
}
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "score_mod": lambda package, cp: package.attention(
        *[X[None]] * 3, cp=cp, score_mod=lambda s, b, h, i, j, t: s + t[h] * (i - j), aux_tensors={"t": X[0, :, 0]}
    ),
    "dropout": lambda package, cp: package.attention(*[X[None]] * 3, cp=cp, dropout_p=0.5, dropout_seed=1),
    "alibi": lambda package, cp: package.attention(*[X[None]] * 3, cp=cp, alibi_slopes=X[0, :, 0]),
}


def on_the_cpu(found: Any) -> None:
    for x in found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else [found]:
        assert not isinstance(x, torch.Tensor) or x.device.type == "cpu"


def played(package: Any, layout: Any, call: Callable[[Any], Any]) -> None:
    def one(member: Any) -> None:
        cp = package.ContextParallel(member, layout=layout)
        with torch.device("meta"):
            on_the_cpu(call(cp))

    SimGroup(2).run(one)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OF_CP_FAST)
def test_batches_and_drop_ins(name: str, layout: str) -> None:
    played(cp_fast, "dual_chunk" if "attn" in name else layout, OF_CP_FAST[name])


@pytest.mark.parametrize("package", [cp_fast, cp_ref])
@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, package: Any) -> None:
    played(package, "dual_chunk", lambda cp: CALLS[name](package, cp))


@pytest.mark.parametrize("package", [cp_fast, cp_ref])
def test_linear_layers(package: Any) -> None:
    def call(cp: Any) -> tuple[torch.Tensor, ...]:
        sizes: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": X.dtype, "device": "cpu"}
        plan = package.make_plan(cp=cp, batch_size=1, seqlen_q=8, linear=True, **sizes)
        x = X[None].clone().requires_grad_()
        results: list[torch.Tensor] = [package.causal_conv1d(x.flatten(2), X[:1].flatten(1).T, cp=cp, plan=plan)]
        for kind, g in (("gated_delta_rule", -x[..., 0]), ("kda", -x), ("mamba2", -x[..., 0]), ("mamba", -x)):
            beta = None if kind.startswith("mamba") else x[..., 0]
            how: dict[str, Any] = {"kind": kind, "output_final_state": True}
            how |= {"A": x.new_ones(2, 8, 8)} if kind == "mamba" else {}
            results += package.linear_attention(x, x, x, g, beta, cp=cp, plan=plan, **how)
        torch.stack([y.sum() for y in results]).sum().backward()
        assert x.grad is not None
        return (*results, x.grad, plan.position_ids)

    played(package, "dual_chunk", call)


def test_masks() -> None:
    with torch.device("meta"):
        made = [masks.block_causal(16, 2), masks.tree([2, 3], [-1, 0]), masks.shared_prefix(4, [2, 3])]
        made.append(masks.packed([masks.prefix_lm(2, 3), masks.chunked(4, 2)], [0, 3]))
        assert all(x.device.type == "cpu" for x in made)
        assert masks.picture(made[-1])
