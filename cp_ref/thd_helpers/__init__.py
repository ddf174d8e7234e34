"""Helpers for packed batches (THD), declared: `cp_ref.thd` and `cp_fast.thd` implement them."""
