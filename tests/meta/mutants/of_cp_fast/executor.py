"""Bugs of the lowering of a schedule, and of the executor: what is accumulated in which dtype, in which order."""

from __future__ import annotations

from tests.meta.mutants.model import Mutant

__all__ = ["MUTANTS"]

MUTANTS: dict[str, Mutant] = {
    "accumulators-in-the-inputs-dtype": Mutant(
        "partial results are accumulated in the inputs' dtype",
        "cp_fast.execute.wide_dtype cp_fast.passes.wide_dtype",
        lambda _: lambda dtype: dtype,
        "budget",
    ),
}
