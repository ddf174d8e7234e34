"""Which sequences of a batch a step of a window needs to look at: those in which a query sees a key, and no others."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from cp_fast.planning.batch import Batch
from cp_fast.planning.views import Views

from cp_ref.spec import Problem, Sequence

CHUNKS = (1, 2, 3, 5, 0, 8, 4, 2)


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
@pytest.mark.parametrize("cp_size", [2, 3, 5])
def test_near_are_the_sequences_in_which_a_query_sees_a_key(layout: str, mask: str, cp_size: int) -> None:
    """Every sequence is full, so that it is near exactly if some pair of positions lies in the band."""
    lengths = [2 * cp_size * chunk for chunk in CHUNKS]
    some = tuple(Sequence(n, n, n, n) for n in lengths)
    fewer = 0
    for left, right in product((0, 1, 2, 3, 7, 12, 40), (0, 1, 4, 30)):
        # contiguous thd is not cut alike, and in bshd all are as long: one sequence at a time
        batches = [(some, "thd")] if layout == "dual_chunk" else [((one,), "bshd") for one in some]
        for sequences, fmt in batches:
            problem = Problem(
                cp_size, sequences, layout=layout, qkv_format=fmt, attn_mask_type=mask, window_size=(left, right)
            )
            batch = Batch(problem)
            for reader, owner in product(range(cp_size), range(cp_size)):
                near = Views(batch, reader).of(reader, owner).batch
                if near.numbers is None:
                    continue  # all of them
                fewer += 1
                for n, sequence in enumerate(sequences):
                    if sequence.slots_q:
                        assert (n in near.numbers) == sees(problem, sequence, reader, owner), (problem, reader, owner)
    assert fewer


def sees(problem: Problem, sequence: Sequence, reader: int, owner: int) -> bool:
    """Whether any query of `reader` sees a key of `owner`, pair by pair."""
    q, k = (positions(problem, sequence, unit) for unit in (reader, owner))
    band, away = problem.band(sequence), k[None, :] - q[:, None]
    assert band.lo is not None
    assert band.hi is not None
    return bool(((away >= band.lo) & (away <= band.hi)).any())


def positions(problem: Problem, sequence: Sequence, unit: int) -> np.ndarray:
    n = problem.cp_size
    if problem.layout == "contiguous":
        return np.arange(sequence.slots_q).reshape(n, -1)[unit]
    return np.arange(sequence.slots_q).reshape(2 * n, -1)[[unit, 2 * n - 1 - unit]].ravel()
