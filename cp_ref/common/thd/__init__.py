"""Helpers for packed sequences (thd), declared: the small steps that attention on variable lengths is made of.

    indices       which tokens a rank holds; between sequence order and CP rank order
    valid         how many of them are real; copying these alone
    halves        reading the first or second half of every sequence
    corrections   merging a ring step's LSE, output and gradients, in place
    batches       padding a batch so that it divides, and cutting it
    head_dims     padding V, trimming the output

Lengths are called GLOBAL where they are those of the whole packed buffer, and LOCAL where they are those of a rank's
slice: the global ones divided by cp_size.

All of them take any number of sequences, sequences of length 0, a tail behind the last one, int32 and int64 lengths.
What cannot be done right is refused with a ValueError or TypeError that names the argument, its value and the rule. The
checks that need no length's value stand beside the declarations.
"""
