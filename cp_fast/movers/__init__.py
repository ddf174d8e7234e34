"""The data-moving kernels, in three implementations behind two protocols.

base, base_thd   the kernels of attention (`Kernels`) and of `cp_fast.thd` (`ThdKernels`); who checks.
select           the implementation for a device, and how to choose one.
ops              the registered operators (`torch.ops.cp_attention`) for `cp_fast.thd`.
native      C++ and CUDA          numba_cuda    Numba CUDA          torch_ops, torch_thd    PyTorch's operators
"""

from cp_fast.movers.base import Kernels
from cp_fast.movers.base_thd import ThdKernels
from cp_fast.movers.select import NAMES, chosen, kernels, thd_kernels, use, why_not

__all__ = ["NAMES", "Kernels", "ThdKernels", "chosen", "kernels", "thd_kernels", "use", "why_not"]
