"""The values of lengths, as far as anybody may look at them; all other checks of the operators of the THD helpers are
those of `cp_ref.contract.thd_*`.

Where lengths lie on the CPU, looking at them costs nothing: arrays. Where they lie on a GPU nobody looks at them, since
that would wait for it: None. The kernels assert the same rules there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["end_of", "sizes_of"]

Values = np.ndarray[Any, np.dtype[np.int64]]


def sizes_of(name: str, lengths: torch.Tensor, from_zero: bool = True) -> Values | None:
    """Every sequence's length; raises where cumulative lengths do not begin at 0 or decrease."""
    if lengths.device.type != "cpu":
        return None
    values = lengths.numpy().astype(np.int64)
    if from_zero and values[0] != 0:
        raise ValueError(f"{name}[0] is {values[0]}; it must be 0")
    decreases = values[1:] < values[:-1]  # a difference of any two may not fit into 64 bits: first compared
    if values[0] < 0 or decreases.any():
        if not from_zero:
            raise ValueError(f"{name} is {values.tolist()}; it must be at least 0 and must not decrease")
        n = int(np.argmax(decreases))
        raise ValueError(
            f"{name}[{n + 1}] is {values[n + 1]}, less than {name}[{n}] = {values[n]}; cumulative lengths must not "
            "decrease"
        )
    return np.diff(values)


def end_of(lengths: torch.Tensor) -> int | None:
    """Where the tail begins."""
    return int(lengths[-1]) if lengths.device.type == "cpu" else None
