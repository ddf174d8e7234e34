"""Linear attention by chunks in plain PyTorch: on any device, in any float dtype."""
