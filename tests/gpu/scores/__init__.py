"""FlashAttention 4 with ALiBi, score_mod and dropout, launch by launch, on a GPU."""
