"""Kernels ask this of their operands: aligned rows, head dims that they have, and a gradient through lse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch.nn.functional import pad

from cp_fast.kernels.attention.backend_protocol import BackwardOperands, Gradients

__all__ = [
    "aligned",
    "aligned_view",
    "copied_if_unaligned",
    "lse_launch",
    "round_up",
    "trim",
    "widen",
    "with_lse_gradient",
]

# ---- rows that are aligned


_LINE = 64  # bytes; PyTorch's allocations begin on one


def aligned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor of this shape, whose last dimension is contiguous, and each of its rows on a cache line.

    >>> aligned((2, 3, 5), torch.float32, torch.device("cpu")).stride()
    (48, 16, 1)
    """
    return aligned_view(torch.empty(0, dtype=dtype, device=device), shape)


def aligned_view(buffer: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The same tensor in the memory of a flat buffer, which grows if it is too small."""
    per_line = _LINE // buffer.element_size()
    width = -(-shape[-1] // per_line) * per_line
    buffer.resize_(prod(shape[:-1]) * width)
    return buffer.view(*shape[:-1], width)[..., : shape[-1]]


# ---- head dims that are padded
#
# Head dims that a kernel lacks run with the next larger one: zero columns change no score and no product.
#
# With zero columns in q and k every score stays what it was; with zero columns in v, out and dout the result's further
# columns are zero and delta = sum(dout * out) stays. The columns of x stay exact, at the cost of a copy and of the
# wider products.


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is n or more.

    >>> round_up(75, 8), round_up(80, 8)
    (80, 80)
    """
    return -(-n // multiple) * multiple


def widen(x: torch.Tensor, d: int) -> torch.Tensor:
    """Widen x [rows, heads, up to d] with zero columns up to d."""
    return x if x.shape[2] == d else pad(x, (0, d - x.shape[2]))


def trim(x: torch.Tensor, d: int) -> torch.Tensor:
    """Trim x [rows, heads, d or more] to its first d columns, contiguous."""
    return x if x.shape[2] == d and x.is_contiguous() else x[..., :d].contiguous()


def copied_if_unaligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy if its rows are not 16-byte aligned: kernels load 16 bytes at a time."""
    elements = 16 // x.element_size()
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s % elements == 0 for s in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


# ---- the gradient of lse for a library without it
#
# The gradient through lse for a library that lacks it: a second backward launch in which only delta is nonzero.
#
# Every library computes ds = p * (dout . v - sum(dout * out)). With v = 0 and a dout and out made so that their product
# sums to -dlse, that is p * dlse: the whole share of a gradient through lse in dq and dk (dv gets none).
#
# A row's -dlse is the sum of three products whose factors are exact in half precision: the first two terms hold its
# leading bits, the last one the rest. Together their relative error is below 2**-20 in bfloat16 (8 bits each), and
# smaller in float16.


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
