"""A simulated group: every rank a thread of one process."""
