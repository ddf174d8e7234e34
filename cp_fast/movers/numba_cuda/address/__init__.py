"""Memory by address: of a GPU, or of this process where Numba simulates one."""
