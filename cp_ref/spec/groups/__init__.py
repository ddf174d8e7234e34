"""A group of ranks as a schedule needs it."""
