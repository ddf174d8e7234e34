"""Triton kernels of our own: affine maps, their composition, and the gradients inside chunks."""
