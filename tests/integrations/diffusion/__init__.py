"""diffusers' transformers over ranks."""
