"""Runs problems: over ranks, in worker processes, tier by tier."""
