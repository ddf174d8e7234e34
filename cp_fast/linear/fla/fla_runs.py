"""The passes of each kind. Importing this imports flash-linear-attention and Triton."""

from __future__ import annotations

from functools import partial

from cp_fast.linear.fla.gated_delta_rule import GatedBackward, GatedForward
from cp_fast.linear.fla.kda import KdaBackward, KdaForward
from cp_fast.linear.fla.kernels.scan_kernel import LARGEST, states_before
from cp_fast.linear.fla.mamba2 import SimpleBackward, SimpleForward
from cp_fast.linear.fla.piecewise import PiecewiseBackward, PiecewiseForward

__all__ = ["BACKWARD", "FORWARD", "LARGEST", "states_before"]

FORWARD = {
    "gated_delta_rule": partial(PiecewiseForward, GatedForward),
    "kda": partial(PiecewiseForward, KdaForward),
    "mamba2": SimpleForward,  # its kernels of states have four times as many programs
}
BACKWARD = {
    "gated_delta_rule": partial(PiecewiseBackward, GatedBackward),
    "kda": partial(PiecewiseBackward, KdaBackward),
    "mamba2": SimpleBackward,
}
