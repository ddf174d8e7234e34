"""Draws problems: features, strategies, coverage."""
