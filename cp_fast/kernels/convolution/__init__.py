"""Kernels of causal convolutions: sums of shifted rows."""
