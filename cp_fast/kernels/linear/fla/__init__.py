"""Linear attention on flash-linear-attention's kernels, and on Triton kernels of our own for what it lacks."""
