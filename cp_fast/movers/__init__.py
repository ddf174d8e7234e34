"""The data-moving kernels: three primitives in three implementations, behind one protocol.

mover_protocol    the protocol (`Kernels`), and who checks        lengths_map    rows by lengths
select_kernels    the implementation for a device, and how to choose one
operators         the registered operators (`torch.ops.cp_attention`) for `cp_fast.thd`
native_kernels    C++ and CUDA        numba_cuda    Numba CUDA        torch_movers    PyTorch's operators
"""

from cp_fast.movers.lengths_map import LengthsMap
from cp_fast.movers.mover_protocol import Kernels
from cp_fast.movers.select_kernels import NAMES, chosen, kernels, use, why_not

__all__ = ["NAMES", "Kernels", "LengthsMap", "chosen", "kernels", "use", "why_not"]
