"""Deliberately wrong variants of both implementations, each by one change of a function. A suite that misses one is no
suite.

    cp_ref.mutants, cp_fast.mutants   the tables; `model` says what a row is
    functions                         what a row has no room for
    hunt                              whether a tier sees a mutant

Every mutant names the tier that has to see it within the quick profile; `docs/conformance/detection.md` has the
measured table of which tier sees which. Plant one by hand:

    with MUTANTS["lse-in-base-2"].planted():
        ...
"""

from tests.meta.mutants.model import Mutant, read_mutants

__all__ = ["MUTANTS", "Mutant"]

MUTANTS: dict[str, Mutant] = read_mutants("cp_ref") | read_mutants("cp_fast")
