"""Level `helpers`: every THD helper against its definition by row numbers, on buffers that show what it must not touch.

`rows`, `halves` and `batches` have one record for each helper: how a call of it is built, what it means, and which
calls have no answer. Lengths are GLOBAL or LOCAL, as the helper needs them (see `cp_ref.thd`). A unit of `slots` is 2 *
cp_size tokens for helpers that know ranks, 2 tokens (one for each half) for helpers that know halves, and 1 token for
the others, and where one rank has everything. A definition lists row numbers in plain Python, sequence by sequence, and
moves or computes these rows in one step. Where arithmetic is done the caller passes float64.
"""
