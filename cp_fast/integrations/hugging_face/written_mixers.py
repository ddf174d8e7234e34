"""Mixers of transformers that are written out, and not calls of functions that cp_fast can replace: MiniMax's lightning
attention, Mamba and its kind, the recurrent block of RecurrentGemma, and Zaya's projection. Each has its forward here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from cp_fast.integrations.hugging_face.handed_on import Handed, as_keyword
from cp_fast.integrations.hugging_face.linear_functions import causal_conv1d_fn, recurrence, sequences_of_mixer
from cp_fast.integrations.hugging_face.module_states import hook_once
from cp_fast.integrations.hugging_face.slice_probe import Probe
from cp_fast.integrations.token_batches import CpBatch

__all__ = ["WRITTEN", "hand_on"]

_MASK = "attention_mask"


def _lightning(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    *,
    cp_batch: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """MiniMax's lightning attention, which is written out: Mamba-2 whose decay is a number for each head."""
    kwargs.pop("cache", None)  # It is None.
    sequences = sequences_of_mixer("MiniMaxLightningAttention", cp_batch, kwargs | {_MASK: attention_mask})
    qkv = self.act_fn(self.qkv_proj(hidden_states)).unflatten(2, (self.num_attention_heads, -1))
    q, k, v = qkv.split(self.head_dim, dim=3)
    g = -self.slope_rate.flatten().expand(qkv.shape[:3]).to(torch.promote_types(qkv.dtype, torch.float32))
    out = self.norm(recurrence(sequences, "mamba2", q, k, v, g, None, scale=1.0).flatten(2).to(v.dtype))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * out), None


# ---- Mamba


def _mamba(
    self: Any,
    hidden_states: torch.Tensor,
    cache: Any = None,
    attention_mask: Any = None,
    cp_batch: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The mixers of Mamba, of Falcon-Mamba and of Jamba, whose norms are the difference."""
    sequences = sequences_of_mixer(type(self).__name__, cp_batch, kwargs | {_MASK: attention_mask})
    x, gate = self.in_proj(hidden_states).chunk(2, dim=-1)
    x = _convolved(self, x, cp_batch)
    sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
    dt, B, C = self.x_proj(x).split(sizes, dim=-1)
    if hasattr(self, "dt_layernorm"):
        dt, B, C = self.dt_layernorm(dt), self.b_layernorm(B), self.c_layernorm(C)
    dt = F.linear(dt, self.dt_proj.weight)
    heads = (x[:, :, None], dt[:, :, None], B[:, :, None], C[:, :, None])
    out = _selective_scan(sequences, *heads, self.A_log[None], self.D[None], self.dt_proj.bias)
    return self.out_proj((out.flatten(2) * F.silu(gate)).to(hidden_states.dtype))


def _zamba(
    self: Any,
    hidden_states: torch.Tensor,
    cache: Any = None,
    attention_mask: Any = None,
    cp_batch: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Zamba's mixer: it has its own heads, whose channels and gates lie in turns."""
    sequences = sequences_of_mixer(type(self).__name__, cp_batch, kwargs | {_MASK: attention_mask})
    x, gate = self.in_proj(hidden_states).unflatten(-1, (-1, 2)).unbind(-1)
    x = _convolved(self, x, cp_batch).unflatten(-1, (self.n_mamba_heads, -1))
    sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
    dt, B, C = torch.einsum("bshd,hrd->bshr", x, self.x_proj_weight).split(sizes, dim=-1)
    dt = torch.einsum("bshr,hdr->bshd", dt, self.dt_proj_weight)
    out = _selective_scan(sequences, x, dt, B, C, self.A_log, self.D, self.dt_proj_bias)
    return self.out_proj((out.flatten(2) * F.silu(gate)).to(hidden_states.dtype))


def _convolved(self: Any, x: torch.Tensor, cp_batch: Any) -> torch.Tensor:
    """The channels [b, s/cp, channels] of a mixer after its convolution."""
    weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
    return causal_conv1d_fn(x.transpose(1, 2), weight, bias, self.activation, cp_batch=cp_batch).transpose(1, 2)


def _selective_scan(
    sequences: CpBatch | Probe,
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x, dt [b, s/cp, h, d], B, C [b, s/cp, h, states], A_log [h, d, states], D [h, d], bias of h * d -> out like x, in
    float32 or wider.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    dt = dt if bias is None else dt + bias.to(wide).view(D.shape)
    dt, rates = F.softplus(dt.to(wide)), -A_log.to(wide).exp().mT
    v = (x.to(wide) * dt).to(x.dtype)
    out = recurrence(sequences, "mamba", C.to(x.dtype), B.to(x.dtype), v, dt, None, scale=1.0, rates=rates)
    return out.to(wide) + D.to(wide) * x.to(wide)


# ---- RecurrentGemma


def _recurrent_block(
    self: Any,
    input_states: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: Any = None,
    use_cache: bool = False,
    cp_batch: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Griffin's recurrent block: a convolution and the RG-LRU. The mask is that of other layers.

    The RG-LRU is a scan of channels whose states have one number.
    """
    kwargs.pop("cache", None)  # It is None.
    sequences = sequences_of_mixer(type(self).__name__, cp_batch, kwargs)
    x, lru = self.linear_x(input_states).transpose(1, 2), self.rg_lru
    x = causal_conv1d_fn(x, self.conv_1d.weight.squeeze(1), self.conv_1d.bias, cp_batch=cp_batch).transpose(1, 2)
    blocks = x.unflatten(-1, (lru.num_attention_heads, -1))
    of_input, of_state = (
        torch.sigmoid(torch.einsum("bshd,hde->bshe", blocks, weight) + bias).flatten(2)
        for weight, bias in (
            (lru.input_gate_weight, lru.input_gate_bias),
            (lru.recurrent_gate_weight, lru.recurrent_gate_bias),
        )
    )
    decay = -8.0 * of_state * F.softplus(lru.recurrent_param)  # its logarithm
    root = importlib.import_module(type(self).__module__).SqrtBoundDerivative.apply(1 - torch.exp(2 * decay))
    first = position_ids[:, :, None] == 0
    v = x * of_input * (first + ~first * root).type(x.dtype)
    one, wide = x.new_ones(*x.shape[:2], 1, 1), torch.promote_types(x.dtype, torch.float32)
    rates = torch.ones(1, 1, x.shape[-1], dtype=wide, device=x.device)
    found = recurrence(sequences, "mamba", one, one, v[:, :, None], decay[:, :, None].to(wide), None, 1.0, rates)
    return self.linear_out(found.flatten(2) * self.act_fn(self.linear_y(input_states))), None


# ---- Zaya


def _compressed(
    self: Any,
    hidden_states: torch.Tensor,
    cache: Any = None,
    conv_mask: Any = None,
    cp_batch: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zaya's queries, keys and values: two convolutions in a row, and values of which half are the token's before.

    Both begin with what zeros before the sequence give: constants, which are added behind.
    """
    sequences_of_mixer(type(self).__name__, cp_batch, kwargs | {"conv_mask": conv_mask})
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k = self.q_proj(hidden_states), self.k_proj(hidden_states)
    depthwise, grouped = self.conv_qk_depthwise, self.conv_qk_grouped
    x = causal_conv1d_fn(torch.cat([q, k], -1).transpose(1, 2), depthwise.weight.squeeze(1), cp_batch=cp_batch)
    taps = grouped.weight.unbind(-1)
    behind = (_earlier(x, len(taps) - 1 - j, cp_batch) for j in range(len(taps)))
    mixed = sum(F.conv1d(y, tap[..., None], groups=grouped.groups) for y, tap in zip(behind, taps, strict=True))
    constant = F.conv1d(
        depthwise.bias[None, :, None], grouped.weight.sum(-1, keepdim=True), grouped.bias, groups=grouped.groups
    )
    mixed = (mixed + constant).transpose(1, 2)
    per_key = self.num_key_value_groups
    residual_q = (q.view(shape) + k.view(shape).repeat_interleave(per_key, dim=2)) * 0.5
    residual_k = residual_q.unflatten(2, (-1, per_key)).mean(dim=3)
    query, key = (part.view(shape) for part in mixed.split([q.shape[-1], k.shape[-1]], dim=-1))
    delayed, zero = self.v_proj_delayed(hidden_states), self.v_proj_delayed(torch.zeros_like(hidden_states[:1, :1]))
    delayed = _earlier((delayed - zero).transpose(1, 2), 1, cp_batch).transpose(1, 2) + zero
    value = torch.cat([self.v_proj_current(hidden_states), delayed], dim=-1).view(shape)
    return query + residual_q, key + residual_k, value


def _earlier(x: torch.Tensor, count: int, cp_batch: Any) -> torch.Tensor:
    """The values of the token `count` before, [b, channels, s/cp]; zero before the sequence."""
    if not count:
        return x
    weight = x.new_zeros(x.shape[1], count + 1)
    weight[:, 0] = 1
    return causal_conv1d_fn(x, weight, cp_batch=cp_batch)


def _hand_to_projection(_: Any, by_place: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Zaya's attention gives its projection one mask of two, and no keywords."""
    if named.get("cp_batch") is None:
        return None
    masks = named.get(_MASK) or {}
    return by_place, {**named, _MASK: {**masks, "conv": Handed(named["cp_batch"], masks.get("conv"))}}


def hand_on(holder: Any, mixer: Any) -> None:
    """Have a module hand `cp_batch` on to the mixer in it, where its class does not."""
    if _name(type(mixer)) == _ZAYA:
        hook_once(holder, _hand_to_projection)
        hook_once(mixer, as_keyword)


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_PLACE = "transformers.models"
_ZAYA = f"{_PLACE}.zaya.modeling_zaya.ZayaCCAProjection"
WRITTEN: dict[str, Callable[..., Any]] = {  # by the class of the mixer
    f"{_PLACE}.minimax.modeling_minimax.MiniMaxLightningAttention": _lightning,
    f"{_PLACE}.mamba.modeling_mamba.MambaMixer": _mamba,
    f"{_PLACE}.falcon_mamba.modeling_falcon_mamba.FalconMambaMixer": _mamba,
    f"{_PLACE}.jamba.modeling_jamba.JambaMambaMixer": _mamba,
    f"{_PLACE}.zamba.modeling_zamba.ZambaMambaMixer": _zamba,
    _ZAYA: _compressed,
    f"{_PLACE}.recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock": _recurrent_block,
}
