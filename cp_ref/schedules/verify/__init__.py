"""The proof of a schedule on integers: every visible pair is computed once, every row arrives, nothing is lost."""
