"""The three tables: areas, ownership and schedule; and the problem that they describe."""
