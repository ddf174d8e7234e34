"""The API of `cp_fast`: attention, its context, plans, and their checks."""
