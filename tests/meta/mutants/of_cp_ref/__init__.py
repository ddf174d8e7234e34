"""Mutants of `cp_ref`."""

from tests.meta.mutants.model import Mutant
from tests.meta.mutants.of_cp_ref import (
    arithmetic,
    backward,
    corners,
    helpers,
    linear,
    masks,
    memory,
    schedules,
    scores,
)

__all__ = ["MUTANTS"]

MUTANTS: dict[str, Mutant] = {
    **arithmetic.MUTANTS,
    **backward.MUTANTS,
    **corners.MUTANTS,
    **helpers.MUTANTS,
    **linear.MUTANTS,
    **masks.MUTANTS,
    **memory.MUTANTS,
    **schedules.MUTANTS,
    **scores.MUTANTS,
}
