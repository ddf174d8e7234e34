"""The three tables: attention slices, ownership and schedule; and the problem that they describe."""
