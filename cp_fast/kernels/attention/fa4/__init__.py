"""Backend "fa4": FlashAttention 4."""
