"""Attention over chosen keys in Triton: the kernels of `cp_fast.backends.sparse_kernels`, on NVIDIA GPUs."""
