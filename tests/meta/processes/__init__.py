"""The suite over processes: workers, entry points, replayed problems."""
