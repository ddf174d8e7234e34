"""The global tensors of a problem of linear layers, and their exact results.

Slots that are no real token hold NaN in what ranks get. So do the tokens of `spoiled`, the gradients of their results,
and the document's initial state; the oracle has numbers there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from conformance.dtypes import dtype_of, wide_dtype
from conformance.judge.reference import dense_causal_conv1d, dense_linear_attention
from conformance.levels.linear.linear_case import CausalConv1d, LinearAttention, LinearCase
from conformance.run.case_tensors import real_tokens

__all__ = ["LinearTensors", "build_linear", "exact_linear", "judged_documents", "judged_rows"]


@dataclass(frozen=True)
class LinearTensors:
    """Global tensors, with numbers in every slot.

    Attributes:
        rows: the inputs with a row for each token, by argument, in the format of the batch; all have gradients.
        alike: the inputs that every rank has alike, by argument; their gradients are shares.
        dout: the gradient of the result.
        dfinal: the gradients of the final states on every rank [cp_size, b, h_v, d_k, d_v]; None without them.
    """

    rows: dict[str, torch.Tensor]
    alike: dict[str, torch.Tensor]
    dout: torch.Tensor
    dfinal: torch.Tensor | None


def build_linear(case: LinearCase, device: str = "cpu") -> LinearTensors:
    """The problem's tensors, equal for equal problems. Keys have length 1, so that states do not grow; decays are
    weak, so that a state is still there after many tokens."""
    draw = torch.Generator().manual_seed(case.seed)
    lead, low = tuple(real_tokens(case.case, "q").shape), dtype_of(case.dtype)
    state_dtype = wide_dtype(case.dtype)
    gates = torch.float32 if case.wide else low

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    if isinstance(case, CausalConv1d):
        shapes = {"weight": (case.channels, case.kernel_size)} | ({"bias": (case.channels,)} if case.bias else {})
        x, dout = (some(*lead, case.channels).to(device, low) for _ in range(2))
        return LinearTensors({"x": x}, {n: some(*shape).to(device, gates) for n, shape in shapes.items()}, dout, None)
    assert isinstance(case, LinearAttention)
    heads_v = case.heads * case.shared
    rows = {
        "q": some(*lead, case.heads, case.d_k).to(low),
        "k": torch.nn.functional.normalize(some(*lead, case.heads, case.d_k), dim=-1).to(low),
        "v": some(*lead, heads_v, case.d_v).to(low),
        "g": -0.2 * some(*lead, heads_v, *([case.d_k] if case.kind == "kda" else [])).abs().to(gates),
    }
    if case.kind != "mamba2":
        rows["beta"] = some(*lead, heads_v).sigmoid().to(gates)
    states = len(case.documents), heads_v, case.d_k, case.d_v
    alike = {"initial_state": some(*states).to(device, state_dtype)} if case.initial_state else {}
    dfinal = some(case.cp_size, *states).to(device, state_dtype) if case.output_final_state else None
    dout = some(*lead, heads_v, case.d_v).to(device, low)
    return LinearTensors({name: x.to(device) for name, x in rows.items()}, alike, dout, dfinal)


def exact_linear(case: LinearCase, tensors: LinearTensors) -> dict[str, torch.Tensor]:
    """The oracle's results and gradients in float64, by name (out, final_state, dq, ...), of all ranks together."""
    leaves = {name: x.double().requires_grad_() for name, x in (tensors.rows | tensors.alike).items()}
    real = real_tokens(case.case, "q").to(tensors.dout.device)
    real = real[(..., *[None] * (tensors.dout.dim() - real.dim()))]
    lengths: dict[str, Any] = {"qkv_format": case.qkv_format, "cu_seqlens": _cumulative(case, 0)}
    lengths |= {"cu_seqlens_padded": _cumulative(case, 1)} if case.qkv_format == "thd" else {}
    with torch.enable_grad():
        if isinstance(case, LinearAttention):
            out, final = dense_linear_attention(**leaves, **case.options, **lengths)
        else:
            out, final = dense_causal_conv1d(**leaves, **case.options, **lengths), None
        loss = (out * tensors.dout.double().masked_fill(~real, 0.0)).sum()
        if final is not None and tensors.dfinal is not None:
            loss = loss + (final * tensors.dfinal.double().sum(dim=0)).sum()
    results = {"out": out.detach()}
    if final is not None and tensors.dfinal is not None:
        results["final_state"] = final.detach()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if loss.requires_grad else ()
    found = grads or [None] * len(leaves)
    return results | {
        f"d{name}": torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def judged_documents(case: LinearCase) -> torch.Tensor:
    """Which documents are judged: bool [b]."""
    return torch.arange(len(case.documents)) != case.spoiled


def judged_rows(case: LinearCase) -> torch.Tensor:
    """Which slots do not belong to the spoiled document: bool, in the format's axes, as `real_tokens` has them."""
    keep = [torch.full((slots,), n != case.spoiled) for n, (_, slots) in enumerate(case.documents)]
    if case.qkv_format == "thd":
        return torch.cat([*keep, torch.ones(case.case.tail_q, dtype=torch.bool)])
    rows = torch.stack(keep)
    return rows if case.qkv_format == "bshd" else rows.T.contiguous()


def _cumulative(case: LinearCase, column: int) -> torch.Tensor:
    return torch.tensor(list(accumulate((document[column] for document in case.documents), initial=0)))
