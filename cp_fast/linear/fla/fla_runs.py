"""The passes of each kind. Importing this imports flash-linear-attention and Triton."""

from __future__ import annotations

from cp_fast.linear.fla.gated_delta_rule import GatedBackward, GatedForward
from cp_fast.linear.fla.kda import KdaBackward, KdaForward
from cp_fast.linear.fla.mamba2 import SimpleBackward, SimpleForward

__all__ = ["BACKWARD", "FORWARD"]

FORWARD = {"gated_delta_rule": GatedForward, "kda": KdaForward, "mamba2": SimpleForward}
BACKWARD = {"gated_delta_rule": GatedBackward, "kda": KdaBackward, "mamba2": SimpleBackward}
