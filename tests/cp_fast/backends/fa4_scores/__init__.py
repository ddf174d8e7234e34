"""Scores on FlashAttention 4, as far as a CPU can show them: expressions, and their CuTe code as host functions."""
