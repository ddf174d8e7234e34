"""Linear attention and causal convolutions on the slices of attention: local kernels, state messages, autograd."""
