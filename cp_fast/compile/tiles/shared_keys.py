"""LaunchSegments without a mask whose queries share keys, as few segments with the same pairs.

factor_keys      few rectangles, many of them in one launch.
dedupe_queries   one segment for all queries with the same keys, without repeated queries.

    block-causal, 4 blocks, without the diagonal        factor_keys: b and c have no row in common
        a . . .         a: block 0 for 1                    b . . .       launch 1: a
        b b . .         b: blocks 0, 1 for 2                a a . .       launch 2: b, c
        c c c .         c: blocks 0, 1, 2 for 3             a a c .
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import and_, or_

import numpy as np

from cp_fast.compile.pass_table import bit_of
from cp_fast.compile.tiles.atoms import Atoms, atoms_of, rows_in
from cp_fast.compile.tiles.segments import LaunchSegments
from cp_ref.schedules.table import constant

__all__ = ["dedupe_queries", "factor_keys"]

Group = tuple[list[int], int]  # Atoms of queries, and the set of atoms of keys that they see.


def factor_keys(segments: LaunchSegments) -> LaunchSegments:
    """LaunchSegments without a mask as few rectangles with the same pairs. Queries that share most of their keys take
    the shared keys together. The remaining keys, and queries that share fewer, are halved, the half with more keys
    first.

    >>> q, k = [(0, 1, 2), (1, 2, 3), (2, 3, 4)], [(0, 0, 1), (1, 0, 2), (2, 0, 3)]
    >>> found = factor_keys(LaunchSegments.of_rows(q, k))
    >>> list(found.q.rows()), list(found.k.rows())
    ([(0, 2, 4), (1, 3, 4), (2, 1, 2)], [(0, 0, 2), (1, 2, 3), (2, 0, 1)])
    """
    q, k = Atoms(segments.q), Atoms(segments.k)
    return _as_segments(segments, q, k, list(_rectangles(_groups(segments, q, k), k.sizes)), "factor_keys")


def dedupe_queries(segments: LaunchSegments, most: float = math.inf) -> LaunchSegments | None:
    """LaunchSegments without a mask, merged into one for all queries that see the same keys. None if they have more
    than `most` rows of keys in total.

    >>> q, k = [(0, 1, 2), (1, 1, 2), (2, 2, 3)], [(0, 0, 1), (1, 1, 2), (2, 0, 2)]
    >>> found = dedupe_queries(LaunchSegments.of_rows(q, k))
    >>> list(found.q.rows()), list(found.k.rows())
    ([(0, 1, 3)], [(0, 0, 2)])
    """
    q, k = Atoms(segments.q), Atoms(segments.k)
    groups = _groups(segments, q, k)
    if sum(rows_in(its, k.sizes) for _, its in groups) > most:
        return None
    return _as_segments(segments, q, k, groups, "dedupe_queries")


def _groups(segments: LaunchSegments, q: Atoms, k: Atoms) -> list[Group]:
    """Groups of queries that see the same keys, by these keys. No two segments share a pair, so the keys of two
    neighbouring atoms of queries differ only by the segments that begin or end between them.
    """
    keys = k.sets(segments)
    changes: dict[int, int] = {}
    for segment, begin, end in zip(segments.q.segment.tolist(), *q.places, strict=True):
        for edge in (begin, end):
            changes[edge] = changes.get(edge, 0) ^ keys[segment]
    by_keys: dict[int, list[int]] = {}
    its, before = 0, 0
    for edge in sorted(changes):
        if its:
            by_keys.setdefault(its, []).extend(range(before, edge))
        its, before = its ^ changes[edge], edge
    return [(by_keys[its], its) for its in sorted(by_keys)]


def _as_segments(segments: LaunchSegments, q: Atoms, k: Atoms, found: Sequence[Group], made_by: str) -> LaunchSegments:
    """Groups as segments without a mask."""
    area = np.array([segments.area[0]] * len(found))
    queries, keys = q.spans([mine for mine, _ in found]), k.spans([atoms_of(its) for _, its in found])
    return LaunchSegments.dense(area, constant(bit_of(made_by), area), queries, keys)


def _rectangles(groups: list[Group], sizes: Sequence[int]) -> Iterator[Group]:
    """Groups of queries, sorted by their keys, as rectangles. sizes: of atoms of keys, see `Atoms.sizes`."""
    pending = [(groups, 0, sizes)]  # Keys are shifted down by a number of atoms: small sets are fast.
    while pending:
        groups, shift, sizes = pending.pop()
        groups = [group for group in groups if group[1]]
        if not groups:
            continue
        common = reduce(and_, (its for _, its in groups))
        if common and 2 * rows_in(common, sizes) >= max(rows_in(its, sizes) for _, its in groups):
            yield [atom for mine, _ in groups for atom in mine], common << shift
            pending.append(([(mine, its & ~common) for mine, its in groups], shift, sizes))
            continue
        parts = _components(groups)
        if len(parts) == 1:
            parts = [groups[len(groups) // 2 :], groups[: len(groups) // 2]]
        for part in reversed(parts):
            every = reduce(or_, (its for _, its in part))
            down = (every & -every).bit_length() - 1
            some = (1 << every.bit_length() - down) - 1
            pending.append(
                ([(mine, its >> down) for mine, its in part], shift + down, [x >> down & some for x in sizes])
            )


def _components(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups joined by common keys, directly or through others; the part of the last group is the last."""
    parts: dict[int, tuple[int, list[Group]]] = {}  # By number: the keys and the groups of a part.
    covered, into = 0, list(range(len(groups)))  # Into: the part that absorbed each part.
    owner = np.zeros(max(its.bit_length() for _, its in groups), dtype=np.int64)  # Of atoms of keys: a part.
    for number, group in enumerate(groups):
        every, some = group[1], [group]
        owner[atoms_of(every & ~covered)] = number
        rest = every & covered
        while rest:
            met = int(owner[(rest & -rest).bit_length() - 1])
            while into[met] != met:
                into[met] = met = into[into[met]]
            keys, others = parts.pop(met)
            into[met] = number
            every, some, rest = every | keys, others + some, rest & ~keys
        parts[number] = every, some
        covered |= every
    return [sorted(part, key=lambda group: group[1]) for _, part in parts.values()]
