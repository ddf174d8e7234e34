"""Deliberately wrong variants of both implementations, each by one patched spot. A suite that misses one is no suite.

of_cp_ref   schedules    plans, messages, ownership            of_cp_fast   executor   lowering, accumulators
            masks        who sees which key                                 merges     partial results put together
            arithmetic   scales, sinks, precision                           passes     sinks, gradients of lse, state
            backward     what is added up, for which heads                  packing    formats, shards
            memory       formats, padding, state, checks                    kernels    movers, the backend for the CPU
            corners      what random small problems do not reach
            scores       ALiBi, score_mod, dropout                          scores     ALiBi, score_mod, dropout
            helpers      the THD helpers                                    helpers    the THD helpers

Every mutant names the tier that has to see it within the quick profile; `docs/conformance/detection.md` has the
measured table of which tier sees which. Plant one by hand:

    with MUTANTS["lse-in-base-2"].planted():
        ...
"""

from tests.meta.mutants import of_cp_fast, of_cp_ref
from tests.meta.mutants.model import Mutant

__all__ = ["MUTANTS", "Mutant"]

MUTANTS: dict[str, Mutant] = of_cp_ref.MUTANTS | of_cp_fast.MUTANTS
