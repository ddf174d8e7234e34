"""The data-moving kernels, in three implementations behind two protocols.

base, base_thd   what attention moves and merges (`Kernels`), what `cp_fast.thd` is made of (`ThdKernels`); who checks
select           which implementation a device gets, and how to choose one
ops              the registered operators (`torch.ops.cp_attention`) that `cp_fast.thd` calls
native      C++ and CUDA          numba_cuda    Numba CUDA          torch_ops, torch_thd    PyTorch's operators
"""

from cp_fast.kernels.base import Kernels
from cp_fast.kernels.base_thd import ThdKernels
from cp_fast.kernels.select import NAMES, chosen, kernels, thd_kernels, use, why_not

__all__ = ["NAMES", "Kernels", "ThdKernels", "chosen", "kernels", "thd_kernels", "use", "why_not"]
