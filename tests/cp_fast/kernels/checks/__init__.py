"""What every implementation of the kernels has to do: cases, guarded memory, checks."""
