"""Backends "cpu" and "torch": attention by PyTorch's own matrix products."""
