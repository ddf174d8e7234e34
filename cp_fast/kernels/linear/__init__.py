"""Kernels of linear attention behind one interface (`linear_kernels`)."""
