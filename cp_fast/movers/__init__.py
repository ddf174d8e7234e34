"""The data-moving kernels: three primitives in three implementations, behind one protocol.

mover_protocol    the protocol (`Movers`), rules for rows (`RowRule`), and who checks
select_movers     the implementation for a device, and how to choose one
native_movers     C++ and CUDA
numba_cuda        Numba CUDA
torch_movers      PyTorch's operators
operands          what operators check and bring into shape
operators         the registered operators (`torch.ops.cp_attention`) for `cp_fast.thd`
"""

from cp_fast.movers.select_movers import use

__all__ = ["use"]
