"""Deliberately wrong variants of the reference, each by one patched spot. A suite that misses one is no suite.

    schedules    plans, messages, ownership          backward   what is added up, for which heads
    masks        who sees which key                  memory     formats, strides, padding, state, checks
    arithmetic   merges, scales, sinks, precision    helpers    the THD helpers

Every mutant names the tier that has to see it within the quick profile; `docs/detection.md` has the measured table of
which tier sees which. Run one by hand:

    with MUTANTS["lse-in-base-2"].planted():
        ...
"""

from tests.meta.mutants.model import Mutant
from tests.meta.mutants.of_cp_ref import arithmetic, backward, helpers, masks, memory, schedules

__all__ = ["MUTANTS", "Mutant"]

MUTANTS: dict[str, Mutant] = (
    schedules.MUTANTS | masks.MUTANTS | arithmetic.MUTANTS | backward.MUTANTS | memory.MUTANTS | helpers.MUTANTS
)
