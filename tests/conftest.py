"""Hypothesis profiles: the same examples every time, here and in CI; `--hypothesis-profile random` to look further."""

from hypothesis import settings

settings.register_profile("deterministic", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("deterministic")
