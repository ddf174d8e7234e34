"""The maps that each fragment composes in a linear layer, as a text picture."""

from __future__ import annotations

from cp_ref.spec.linear.document_fragments import document_fragments
from cp_ref.spec.tables.problem import Problem

__all__ = ["states_picture"]


def states_picture(problem: Problem) -> str:
    """A triangle for each document. A row is a fragment, a column a map that it composes, from left to right.

    A number is the rank that sends the map, "own" a map that the fragment's rank makes, "." a map of the fragment
    itself or of a later one. In the backward pass the maps above these go the other way, composed from right to left.

    >>> from cp_ref.spec.tables.problem import Sequence
    >>> print(states_picture(Problem(2, (Sequence(8, 8, 8, 8), Sequence(3, 3, 4, 4)), qkv_format="thd")))
    document 0          map of   [0:2]   [2:6]   [6:8]
    fragment   rank    of rank       0       1       0
    [0:2]         0                  .       .       .
    [2:6]         1                  0       .       .
    [6:8]         0                own       1       .
    document 1          map of   [8:9]  [9:11]
    fragment   rank    of rank       0       1
    [8:9]         0                  .       .
    [9:11]        1                  0       .
    """
    documents: dict[int, list[tuple[str, int]]] = {}
    for document, _, rank, start, stop, _ in document_fragments(problem).rows():
        documents.setdefault(document, []).append((f"[{start}:{stop}]", rank))
    width = max((len(name) for rows in documents.values() for name, _ in rows), default=0) + 2
    left = max(width, 11)
    lines: list[str] = []
    for document, rows in documents.items():
        names, ranks = ("".join(f"{cell:>{width}}" for cell in column) for column in zip(*rows, strict=True))
        lines.append(f"{f'document {document}':<{left + 4}}{'map of':>{11}}{names}")
        lines.append(f"{'fragment':<{left}}rank{'of rank':>{11}}{ranks}")
        for place, (name, rank) in enumerate(rows):
            cells = ["own" if other == rank else str(other) for _, other in rows[:place]] + ["."] * (len(rows) - place)
            shown = "".join(f"{cell:>{width}}" for cell in cells)
            lines.append(f"{name:<{left}}{rank:>4}{'':>{11}}{shown}")
    return "\n".join(lines)
