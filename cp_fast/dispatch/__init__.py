"""Attention as PyTorch sees it: an autograd function, operators for torch.compile, a graph break."""
