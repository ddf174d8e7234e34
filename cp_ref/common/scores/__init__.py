"""Scores that know where they are: ALiBi, score_mod and dropout. One definition for the oracle, for both packages and
for `conformance`.

The order of operations on a pair, query i and key j of one document:

    s = scale * q.k            softcap
    s = s + ALiBi              `alibi`
    s = score_mod(s, ...)      `score_mod`
    mask, softmax (sinks included)
    p = p * keep / (1 - dropout_p)      `philox`
    out = p v

i and j count from the document's first slot, h is the global query head, b the document's number in the batch. So no
score depends on the rank, the schedule or the layout.
"""
