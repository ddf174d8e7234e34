"""Small problems of linear layers: lengths with padding, empty documents, every layout, tables, every schedule."""

from __future__ import annotations

from hypothesis import strategies as st

from conformance.problems.linear import SIZES, LinearCase, batches
from cp_ref.schedules.problem import Problem

__all__ = ["linear_problems"]


def linear_problems(cp_sizes: tuple[int, ...] = SIZES) -> st.SearchStrategy[Problem]:
    """Self-attention problems of at most four documents, of at most 24 slots each."""
    return batches(cp_sizes, most=24, long=()).map(lambda fields: LinearCase(**fields).problem)
