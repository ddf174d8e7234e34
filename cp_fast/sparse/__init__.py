"""Sparse attention: keys chosen by indices, over documents that are spread over ranks."""
