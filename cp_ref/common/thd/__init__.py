"""Helpers for packed sequences (thd), declared: the small steps of attention on variable lengths.

    declared_indices       which tokens a rank holds; between sequence order and CP rank order
    declared_valid         how many of them are real; copying these alone
    declared_halves        reading the first or second half of every sequence
    declared_corrections   merging a ring step's LSE, output and gradients, in place
    declared_batches       padding a batch so that it divides, and cutting it
    head_dims              padding V, trimming the output
    checks, tuples         what the declarations share

GLOBAL lengths are those of the whole packed buffer. LOCAL lengths are those of a rank's slice: the global ones divided
by cp_size.

All of them take any number of sequences, sequences of length 0, a tail behind the last one, int32 and int64 lengths.
Anything else is refused with a ValueError or TypeError that names the argument, its value and the rule. Checks without
a length's value are in the modules of the declarations.
"""
