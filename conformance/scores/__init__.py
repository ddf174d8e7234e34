"""Scores that depend on places, for all references and baselines of this suite, written without `cp_ref.contract`."""
