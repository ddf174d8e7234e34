"""`cp_fast.kernels.sparse.sparse_kernels.SparseKernels`, by the kernels of this folder."""

from __future__ import annotations

import torch

from cp_fast.kernels.sparse.triton_sparse.attention_kernels import forward
from cp_fast.kernels.sparse.triton_sparse.gradient_kernels import backward
from cp_fast.kernels.sparse.triton_sparse.loss_kernels import loss, loss_backward
from cp_fast.kernels.sparse.triton_sparse.select_kernels import rows_of, select

__all__ = ["DTYPES", "backward", "forward", "loss", "loss_backward", "rows_of", "select"]

DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
