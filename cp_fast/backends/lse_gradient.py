"""The gradient through lse for a library that lacks it: a second backward launch in which only delta is nonzero.

Every library computes ds = p * (dout . v - sum(dout * out)). With v = 0 and a dout and out made so that their product
sums to -dlse, that is p * dlse: the whole share of a gradient through lse in dq and dk (dv gets none).

A row's -dlse is the sum of three products whose factors are exact in half precision: the first two terms hold its
leading bits, the last one the rest. Together their relative error is below 2**-20 in bfloat16 (8 bits each), and
smaller in float16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cp_fast.backends.backend_protocol import BackwardOperands, Gradients

__all__ = ["lse_launch", "with_lse_gradient"]

_FACTORS = (2.0**14, 1.0, 2.0**-10)  # Float16 holds at most 65504 and nothing finer than 2**-24.


def with_lse_gradient(
    launch: Callable[[BackwardOperands], Gradients], operands: BackwardOperands, dlse: torch.Tensor | None, d: int
) -> Gradients:
    """The gradients of a launch, and of the second one where there is a dlse: dq and dk are float32 then.

    Args:
        launch: a backward launch of operands without a dlse.
        d: the head dim of v, dout and out in the second launch.
    """
    found = launch(operands)
    if dlse is None:
        return found
    ones, products = lse_launch(dlse, operands.q.dtype, d)
    nothing = operands.v.new_zeros(*operands.v.shape[:2], d)
    more = launch(operands._replace(dout=ones, v=nothing, out=products))
    return Gradients(found.dq.float() + more.dq, found.dk.float() + more.dk, found.dv)


def lse_launch(dlse: torch.Tensor, dtype: torch.dtype, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`(dout, out)` [n, h_q, d] of the dtype with sum(dout * out) = -dlse, for dlse float32 [h_q, n] and d >= 3.

    >>> dout, out = lse_launch(torch.tensor([[1000.001, -3.0]]), torch.bfloat16, 8)
    >>> (dout.float() * out.float()).sum(-1)
    tensor([[-1000.0010],
            [    3.0000]])
    """
    rest = -dlse.T
    dout = torch.zeros(*rest.shape, d, dtype=dtype, device=dlse.device)
    out = torch.zeros_like(dout)
    for column, factor in enumerate(_FACTORS):
        dout[..., column] = factor
        out[..., column] = rest / factor
        rest = rest - out[..., column].float() * factor
    return dout, out
