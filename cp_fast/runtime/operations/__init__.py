"""The kinds of operations: copies, exchanges of messages, launches, sums and frees."""
