"""The values of lengths, as far as anybody may look at them, and what else the fast THD helpers refuse; the checks of
shapes and dtypes are those of `cp_ref.common.thd.checks`.

Where lengths lie on the CPU, looking at them costs nothing. Where they lie on a GPU nobody looks at them, since that
would wait for it: the kernels assert the same rules there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["check_no_grad", "end_of", "sizes_of"]

Values = np.ndarray[Any, np.dtype[np.int64]]


def check_no_grad(**tensors: torch.Tensor) -> None:
    """Raise where autograd would have to know the gradient of a helper that has none."""
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if x.requires_grad:
                raise ValueError(
                    f"{name} requires grad, and this helper is not differentiable; call it inside an "
                    "autograd.Function or under torch.no_grad()"
                )


def sizes_of(name: str, lengths: torch.Tensor, from_zero: bool = True) -> Values | None:
    """Every sequence's length; raises where cumulative lengths do not begin at 0 or decrease."""
    if lengths.device.type != "cpu":
        return None
    values = lengths.numpy().astype(np.int64)
    if from_zero and values[0] != 0:
        raise ValueError(f"{name}[0] is {values[0]}; it must be 0")
    sizes = np.diff(values)
    if values[0] < 0 or (len(sizes) and sizes.min() < 0):
        if not from_zero:
            raise ValueError(f"{name} is {values.tolist()}; it must be at least 0 and must not decrease")
        n = int(np.argmax(sizes < 0))
        raise ValueError(
            f"{name}[{n + 1}] is {values[n + 1]}, less than {name}[{n}] = {values[n]}; cumulative lengths must not "
            "decrease"
        )
    return sizes


def end_of(lengths: torch.Tensor) -> int | None:
    """Where the tail begins."""
    return int(lengths[-1]) if lengths.device.type == "cpu" else None
