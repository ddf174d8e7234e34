"""PyTorch's `scaled_dot_product_attention` over sequences that are spread over ranks: the same arguments, and `cp`.

from cp_fast.integrations.sdpa import scaled_dot_product_attention
"""

from __future__ import annotations

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.shared.drop_in import Asked, check_tensors, drop_in, refuse
from cp_ref.schedules.values import check_flag

__all__ = ["scaled_dot_product_attention"]


@drop_in()
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    cp: ContextParallel,
) -> Asked:
    """Compute `torch.nn.functional.scaled_dot_product_attention` of this rank's slices. Collective.

    Args:
        query, key, value: this rank's slices, [b, h, s/cp, d]: `cp_fast.shard` of [b, s, h, d], transposed.
        is_causal, scale: as there; the causal mask is aligned to the first query and key.
        enable_gqa: whether key and value may have fewer heads than query, as there.
        cp: the group, the schedule and the layout.

    Returns:
        [b, h, s/cp, d_v], a transposed view of [b, s/cp, h, d_v] as PyTorch's flash attention gives.

    Raises:
        NotImplementedError: attn_mask or dropout_p is given. ValueError: the numbers of heads differ without
        enable_gqa, or a tensor has not four axes; the others: as `cp_fast.attention`.
    """
    refuse("scaled_dot_product_attention", attn_mask=attn_mask, dropout_p=dropout_p)
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    check_tensors("b h s/cp d", query=query, key=key, value=value)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"query has {query.shape[1]} heads and key {key.shape[1]}; that needs enable_gqa=True")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    how = {"attn_mask_type": "causal" if is_causal else "no_mask", "softmax_scale": scale}
    return Asked(q, k, v, cp, how, lambda out: out.transpose(1, 2))
