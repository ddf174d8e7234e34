"""Megatron, torchtitan and TransformerEngine."""
