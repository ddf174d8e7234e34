"""MagiAttention without a GPU: its planner, its messages over gloo, and its own backend of plain PyTorch.

PyTorch replaces three Triton kernels: the gathering and the sum of ranges of rows, and the merge of two partial
results. The current device is the CPU. All of it is for the whole process.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

__all__ = ["install"]


def install() -> bool:
    """Put the stand-ins into the library, where there is no GPU; whether that is so."""
    if torch.cuda.is_available():
        return False
    for function, module in _USED_IN.items():
        setattr(import_module(f"magi_attention.{module}"), function.__name__, function)
    torch.cuda.current_device = lambda: torch.device("cpu")
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *_: 0)
    return True


def range_gather(input: torch.Tensor, ranges: torch.Tensor, dim: int = 0, output: Any = None, **_: Any) -> torch.Tensor:
    """The rows of ranges [n, 2], one after the other.

    >>> range_gather(torch.tensor([5, 6, 7, 8]), torch.tensor([[2, 4], [0, 1]])).tolist()
    [7, 8, 5]
    """
    rows = torch.cat([torch.arange(a, b) for a, b in ranges.tolist()] or [torch.empty(0, dtype=torch.long)])
    gathered = input.index_select(dim, rows)
    return gathered if output is None else output.copy_(gathered)


def range_reduce(
    input: torch.Tensor, output: torch.Tensor, input_ranges: torch.Tensor, output_ranges: torch.Tensor,
    reduce_op: str = "sum", **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Add each range of the input to one of the output, in place.

    >>> where = torch.tensor([[0, 2], [2, 3]]), torch.tensor([[1, 3], [1, 2]])
    >>> range_reduce(torch.tensor([1, 2, 3]), torch.tensor([10, 20, 30]), *where).tolist()
    [10, 24, 32]
    """
    if reduce_op != "sum":
        raise NotImplementedError(f"reduce_op is {reduce_op!r}; what stands in for the kernel has sums alone")
    for (a, b), (c, d) in zip(input_ranges.tolist(), output_ranges.tolist(), strict=True):
        output[c:d] += input[a:b]
    return output


def correct_attn_out_lse(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor, inplace: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first partial result, merged with the second, in place: out [n, h, d], lse [n, h].

    >>> out, lse = torch.zeros(1, 1, 1), torch.zeros(1, 1)
    >>> [x.item() for x in correct_attn_out_lse(out, lse, out + 1, lse, inplace=True)] == [0.5, torch.tensor(2.0).log()]
    True
    """
    if not inplace:
        out1, lse1 = out1.clone(), lse1.clone()
    wide = torch.promote_types(lse1.dtype, torch.float32)
    parts = lse1.to(wide), lse2.to(wide)
    lse = torch.logaddexp(*parts)
    first, second = ((part - lse).exp().nan_to_num(0.0)[..., None] for part in parts)
    out1.copy_(first * out1 + second * out2)
    lse1.copy_(lse)
    return out1, lse1


_USED_IN = {
    range_gather: "comm.primitive.grpcoll.utils",
    range_reduce: "comm.primitive.grpcoll.utils",
    correct_attn_out_lse: "functional.dist_attn",
}
