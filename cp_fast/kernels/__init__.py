"""Data-moving kernels: see `base`."""
