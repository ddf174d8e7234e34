"""The data-moving kernels, in three implementations behind one interface (`base.Kernels`).

select      which implementation a device gets, and how to choose one
ops         the registered operators (`torch.ops.cp_attention`) that `cp_fast.thd` calls
native      C++ and CUDA          numba_cuda    Numba CUDA          torch_ops    PyTorch's operators
"""

from cp_fast.kernels.base import Kernels
from cp_fast.kernels.select import NAMES, chosen, kernels, use, why_not

__all__ = ["NAMES", "Kernels", "chosen", "kernels", "use", "why_not"]
