"""Linear attention and causal convolutions: not here yet, see `cp_ref.linear`."""

from __future__ import annotations

from typing import Any

import torch

from cp_ref.common.declared import implements
from cp_ref.common.linear import linear_calls
from cp_ref.spec import Unsupported

__all__ = ["causal_conv1d", "linear_attention"]


@implements(linear_calls.linear_attention)
def linear_attention(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    **arguments: Any,
) -> Any:
    raise Unsupported("linear_attention", {}, "cp_fast has no linear layers yet; cp_ref has")


@implements(linear_calls.causal_conv1d)
def causal_conv1d(x: Any, weight: Any, bias: Any, **arguments: Any) -> torch.Tensor:
    raise Unsupported("causal_conv1d", {}, "cp_fast has no linear layers yet; cp_ref has")
