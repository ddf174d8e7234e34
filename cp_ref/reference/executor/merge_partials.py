"""Merging partial attention results by their log-sum-exp.

Two sets of keys, A and B, give a query the partial results (out_a, lse_a) and (out_b, lse_b). Over both together:

    lse = log(exp(lse_a) + exp(lse_b))          out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

out_a is a mean of values whose weights are exp(score - lse_a). Times exp(lse_a - lse) they are exp(score - lse), each
key's weight among all keys of both sets. No exponent is positive, as lse is not below either, so nothing overflows.

The merge is associative and commutative, so partial results may arrive in any order and grouping. A set that a query
does not see at all has lse -inf and out 0, and changes nothing; two such sets give such a set again, never NaN.
"""

from __future__ import annotations

import torch

__all__ = ["add_sink", "merge", "sink_gradient"]


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result over both sets of keys.

    Args:
        out_a, out_b: [..., d_v], float32 or float64.
        lse_a, lse_b: [...], natural logarithm, -inf where nothing was seen.

    Returns:
        (out, lse) in the same shapes.

    >>> a = torch.tensor([[4.0]]), torch.tensor([0.0])               # one key of weight 1
    >>> b = torch.tensor([[1.0]]), torch.log(torch.tensor([2.0]))    # two keys of weight 1, mean 1
    >>> out, lse = merge(*a, *b)
    >>> round(out.item(), 6), round(lse.exp().item(), 6)             # three keys, mean (4 + 1 + 1) / 3
    (2.0, 3.0)
    """
    lse = torch.logaddexp(lse_a, lse_b)
    return out_a * _weight(lse_a, lse) + out_b * _weight(lse_b, lse), lse


def add_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add exp(sink) to the denominator: a key of score `sink` and value 0. Do this once, when all keys are merged.

    Args:
        out [t, h, d_v], lse [t, h], sink [h]: the logit of each head's sink.

    >>> out, lse = add_sink(torch.tensor([[[3.0]]]), torch.log(torch.tensor([[2.0]])), torch.tensor([0.0]))
    >>> round(out.item(), 6), round(lse.exp().item(), 6)
    (2.0, 3.0)
    """
    with_sink = torch.logaddexp(lse, sink.to(lse.dtype).expand_as(lse))
    return out * _weight(lse, with_sink), with_sink


def sink_gradient(lse: torch.Tensor, delta: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """The gradient of the sink's logits [h] from these rows: minus the sink's share of the softmax, times delta.

    Args:
        lse, delta: [t, h], the lse with the sink in it.
        sink: [h]; -inf is no sink. (A row without a key then has lse -inf too, and any delta.)

    >>> sink_gradient(torch.log(torch.tensor([[4.0]])), torch.tensor([[2.0]]), torch.tensor([0.0]))  # a share of 1/4
    tensor([-0.5000])
    """
    sink = sink.to(lse.dtype)
    return -(torch.exp(sink - lse) * delta).masked_fill(sink == float("-inf"), 0.0).sum(dim=0)


def _weight(lse_part: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(lse_part - lse), 0 where lse_part is -inf (lse may be too), with an axis for d_v."""
    return torch.exp(lse_part - lse).masked_fill(lse_part == float("-inf"), 0.0)[..., None]
