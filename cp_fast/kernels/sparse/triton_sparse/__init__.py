"""Attention over chosen keys in Triton: the kernels of `cp_fast.kernels.sparse.sparse_kernels`, on NVIDIA GPUs."""
