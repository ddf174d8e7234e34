"""Transformers, its Trainer, and accelerate."""
