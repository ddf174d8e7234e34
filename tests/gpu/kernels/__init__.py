"""The kernels and CUDA graphs on a GPU."""
