"""Mutants of `cp_fast`."""

from tests.meta.mutants.model import Mutant
from tests.meta.mutants.of_cp_fast import (
    executor,
    helpers,
    kernels,
    linear,
    lowering,
    merges,
    packing,
    passes,
    scores,
)

__all__ = ["MUTANTS"]

MUTANTS: dict[str, Mutant] = {
    **executor.MUTANTS,
    **helpers.MUTANTS,
    **kernels.MUTANTS,
    **linear.MUTANTS,
    **lowering.MUTANTS,
    **merges.MUTANTS,
    **packing.MUTANTS,
    **passes.MUTANTS,
    **scores.MUTANTS,
}
