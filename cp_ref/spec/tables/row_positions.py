"""Where rows of the global buffer lie in their documents."""

from __future__ import annotations

import numpy as np

from cp_ref.spec.tables.problem import Problem
from cp_ref.spec.tables.table import Column

__all__ = ["check_one_document", "row_positions"]


def row_positions(problem: Problem, side: str, rows: Column) -> tuple[Column, Column]:
    """The document of each row of the global buffer, and the row's slot, from the document's first.

    Args:
        side: "q" or "kv".
        rows: int64 [n], rows of documents, padding included.

    >>> from cp_ref.spec import Sequence
    >>> p = Problem(2, (Sequence(8, 8, 8, 8), Sequence(0, 0, 0, 0), Sequence(4, 4, 4, 4)), qkv_format="thd")
    >>> document, slot = row_positions(p, "q", np.array([0, 7, 8, 11]))
    >>> document.tolist(), slot.tolist()
    ([0, 0, 2, 2], [0, 7, 0, 3])
    """
    starts = np.array(problem.starts(side), dtype=np.int64)
    document = np.searchsorted(starts[:-1], rows, side="right") - 1
    return document, rows - starts[document]


def check_one_document(problem: Problem, name: str) -> None:
    """Raise ValueError if attention slices connect documents: a score that depends on positions, by the argument of
    this name, has none there.
    """
    if problem.areas is None:
        return
    areas = problem.workload.areas
    edges = (("q", areas.q_start), ("q", areas.q_stop - 1), ("kv", areas.k_start), ("kv", areas.k_stop - 1))
    documents = np.stack([row_positions(problem, side, rows)[0] for side, rows in edges])
    crossing = np.flatnonzero((documents != documents[0]).any(axis=0))
    if len(crossing):
        one = areas.take(crossing[:1])
        raise ValueError(
            f"{name} is given, and areas connect documents {documents[:, crossing[0]].min()} and "
            f"{documents[:, crossing[0]].max()}: {str(one).strip()}. Positions belong to one document; give "
            "cu_seqlens_q and cu_seqlens_kv of one document, [0, total]"
        )
