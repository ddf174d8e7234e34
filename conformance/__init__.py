"""Conformance: plays an implementation of context-parallel attention against the oracle, on problems drawn by
Hypothesis.

python -m conformance --impl cp_fast --profile quick
"""

from conformance.budgets import Row, compare
from conformance.case import Case
from conformance.implementation import Implementation, load
from conformance.yardstick import eager_attention

__all__ = ["Case", "Implementation", "Row", "compare", "eager_attention", "load"]
