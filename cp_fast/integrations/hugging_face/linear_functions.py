"""The functions in which linear layers and convolutions of transformers mix tokens, over ranks.

Each has the name and the parameters of the function of transformers that it replaces. `cp_batch` reaches it as it
reaches attention: as a keyword that models hand on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F

from cp_fast.integrations.hugging_face.model_call import SILENT, sequences_of
from cp_fast.integrations.hugging_face.slice_probe import Probe
from cp_fast.integrations.shared.drop_in import refuse
from cp_fast.integrations.token_batches import CpBatch
from cp_fast.layers.causal_conv1d import causal_conv1d
from cp_fast.layers.linear_attention import linear_attention
from cp_ref.calls.linear_calls import Activation, LinearKind

__all__ = [
    "FUNCTIONS",
    "OF_CACHES",
    "causal_conv1d_fn",
    "mamba2_split_conv1d_scan_combined",
    "one_token",
    "recurrence",
    "sequences_of_mixer",
]

_EPSILON = 1e-6  # of the length of q and k, as in flash-linear-attention


def causal_conv1d_fn(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    cp_batch: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """A causal convolution of each channel: [b, channels, s/cp] -> the same; weight [channels, kernel_size]."""
    sequences = sequences_of_mixer("causal_conv1d_fn", cp_batch, kwargs)
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"activation is {activation!r} behind a convolution; cp_fast has 'silu'")
    x = hidden_states.transpose(1, 2).to(weight.dtype)
    if isinstance(sequences, Probe):
        out = x * weight[:, -1] + (0 if bias is None else bias)
        out = out if activation is None else F.silu(out)
    else:
        plan, how = sequences.linear_plan(x), cast(Activation | None, activation)
        out = causal_conv1d(_rows(sequences, x), weight, bias, cp=sequences.cp, plan=plan, activation=how)
        out = out.view_as(x)
    return out.to(hidden_states.dtype).transpose(1, 2)


def _delta_rule(name: str, kind: LinearKind) -> Callable[..., tuple[torch.Tensor, None]]:
    """A delta rule: q, k [b, s/cp, h, d_k], v [b, s/cp, h_v, d_v], beta [b, s/cp, h_v] -> out like v; g [b, s/cp, h_v],
    of Kimi's [b, s/cp, h, d_k].
    """

    def rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int = 64,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        *,
        cp_batch: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        states = {"initial_state": initial_state, "output_final_state": output_final_state}
        sequences = sequences_of_mixer(name, cp_batch, kwargs | states)
        if use_qk_l2norm_in_kernel:
            query, key = _of_length_one(query), _of_length_one(key)
        return recurrence(sequences, kind, query, key, value, g, beta), None

    return rule


def mamba2_chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    *,
    cp_batch: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Mamba-2: x [b, s/cp, h, d], dt [b, s/cp, h], A, D, dt_bias [h], B, C [b, s/cp, groups, states] -> out like x."""
    states = {"initial_states": initial_states, "return_final_states": return_final_states}
    sequences = sequences_of_mixer("mamba2_chunk_scan", cp_batch, kwargs | states)
    x, wide = hidden_states, torch.promote_types(hidden_states.dtype, torch.float32)
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).to(wide)
    v, g = (x.to(wide) * dt[..., None]).to(x.dtype), (A * dt).to(wide)
    out = recurrence(sequences, "mamba2", C.to(x.dtype), B.to(x.dtype), v, g, None, scale=1.0).to(wide)
    return out if D is None else out + D[:, None] * x.to(wide)


def mamba2_split_conv1d_scan_combined(*_: Any, **__: Any) -> None:
    """Not taken: without it a mixer calls `causal_conv1d_fn` and `mamba2_chunk_scan`."""
    return


def one_token(*_: Any, **__: Any) -> Any:
    """Raise for a function that continues from a cache."""
    raise NotImplementedError("a linear layer continues from a cache, which cp_fast does not support over ranks")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": _delta_rule("torch_chunk_gated_delta_rule", "gated_delta_rule"),
    "chunk_kimi_delta_attention": _delta_rule("chunk_kimi_delta_attention", "kda"),
    "mamba2_chunk_scan": mamba2_chunk_scan,
}
OF_CACHES = (
    *("causal_conv1d_update", "torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"),
    "mamba2_selective_state_update",
)


def sequences_of_mixer(name: str, cp_batch: Any, others: dict[str, Any]) -> CpBatch | Probe:
    """The batch's sequences; raises for arguments that cannot be honoured."""
    sequences = sequences_of(name, cp_batch)
    refuse(name, **{keyword: value for keyword, value in others.items() if keyword not in SILENT})
    return sequences


def _rows(sequences: CpBatch, x: torch.Tensor) -> torch.Tensor:
    """[b, s/cp, ...] in the format of the batch."""
    return x[0] if sequences.qkv_format == "thd" else x


def _of_length_one(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPSILON)).to(x.dtype)


def recurrence(
    sequences: CpBatch | Probe,
    kind: LinearKind,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float | None = None,
    rates: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear_attention` of [b, s/cp, ...] in the format of the batch. rates: A."""
    if isinstance(sequences, Probe):
        return _of_own_token(q, k, v, g, beta)
    plan = sequences.linear_plan(q)
    q, k, v, g = (_rows(sequences, x) for x in (q, k, v, g))
    beta = None if beta is None else _rows(sequences, beta)
    out = linear_attention(q, k, v, g, beta, cp=sequences.cp, plan=plan, kind=kind, A=rates, scale=scale)
    return out[None] if sequences.qkv_format == "thd" else out


def _of_own_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None
) -> torch.Tensor:
    """v, scaled by all that its own token has."""
    product = (q * k).sum(-1).repeat_interleave(v.shape[2] // q.shape[2], dim=2) / math.sqrt(q.shape[-1])
    decay = g if g.dim() == product.dim() else g.mean(-1)
    return v * (1 + torch.tanh(product + decay + (0 if beta is None else beta)))[..., None].to(v.dtype)
