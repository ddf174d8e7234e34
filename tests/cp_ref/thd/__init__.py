"""The helpers for packed batches of `cp_ref.thd`."""
