"""The THD helpers, declared: parameters, docstrings, and the checks of arguments that need no length's value.

Lengths are called GLOBAL where they are those of the whole packed buffer, and LOCAL where they are those of a rank's
slice: the global ones divided by cp_size. All helpers take any number of sequences, sequences of length 0, a tail
behind the last one, int32 and int64 lengths. What cannot be done right is refused with a ValueError or TypeError that
names the argument, its value and the rule.
"""
