"""The proof on integers that a schedule computes its problem, and its costs."""
