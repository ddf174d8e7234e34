"""The data-moving kernels: three primitives in three implementations, behind one protocol.

base        the protocol (`Kernels`); who checks          lengths_map   rows by lengths
select      the implementation for a device, and how to choose one
ops         the registered operators (`torch.ops.cp_attention`) for `cp_fast.thd`
native      C++ and CUDA          numba_cuda    Numba CUDA          torch_ops    PyTorch's operators
"""

from cp_fast.movers.base import Kernels
from cp_fast.movers.lengths_map import LengthsMap
from cp_fast.movers.select import NAMES, chosen, kernels, use, why_not

__all__ = ["NAMES", "Kernels", "LengthsMap", "chosen", "kernels", "use", "why_not"]
