"""Judges results: references, budgets, known failures, records."""
