"""Implementations for the suite's own tests: samples, an outsider's ring, bad habits."""
