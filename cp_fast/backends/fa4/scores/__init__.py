"""FlashAttention 4 with scores that know where they are: ALiBi, `score_mod` and dropout.

- tracing          functions of scores, written in PyTorch, become expressions; so do their derivatives
- expressions      the expressions: data
- cute_operations  expressions become CuTe, the language of the library's kernels
- cute_philox      the random words of dropout in CuTe
- score_tiles      scores of one tile of a kernel
- score_kernels    the library's kernels with these scores
- launch_program   what a launch passes to the library
"""
