"""Traces of runs: recorded, saved, and compared."""
