"""Right or wrong on GPUs: other libraries, a training step, the compute sanitizer, kernels that got slower."""
