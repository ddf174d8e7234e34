"""FlashAttention 4 with scores that know where they are: ALiBi, `score_mod` and dropout.

- expressions      the expressions of a score: data
- aten_operations  PyTorch's operators for one element, as nodes of an expression
- trace_scores     functions of scores, written in PyTorch, become expressions; so do their derivatives
- launch_program   what a launch passes to the library
- score_tiles      scores and dropout of one tile, in CuTe, the language of the library's kernels
- score_kernels    the library's kernels with these scores, and the calls of it that take them
"""
