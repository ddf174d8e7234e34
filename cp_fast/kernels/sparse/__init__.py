"""Kernels of attention to chosen keys behind one interface (`sparse_kernels.SparseKernels`)."""
