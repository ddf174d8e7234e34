"""Global tensors and slices, for both packages."""
