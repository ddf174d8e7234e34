"""Expected and observed pairs of queries and keys: a failing problem's mask as a difference of pairs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from conformance.case import Case
from conformance.judge.visibility import seen

__all__ = ["MOST", "Difference", "Pair", "visibility_difference", "visible"]

MOST = 64  # tokens on either side of a picture
SEEN, HIDDEN, EXTRA, MISSING = "#.+-"  # the characters of a picture

Pair = tuple[int, int]
"""(query row, key row) of the global packed buffers: sequence after sequence with their padding, then the tail. In bshd
and sbhd, batch after batch.
"""


@dataclass(frozen=True)
class Difference:
    """A part of a problem's score matrix, at most `MOST` x `MOST`.

    `rows` are packed query rows, `columns` packed key rows. `expected`, `missing` (expected and not seen) and `extra`
    (seen and not expected) are the pairs inside; `wrong` counts missing and extra pairs over the whole problem, None
    where nobody knows what was seen.
    """

    case: Case
    rows: range
    columns: range
    expected: frozenset[Pair]
    missing: frozenset[Pair]
    extra: frozenset[Pair]
    wrong: tuple[int, int] | None

    @property
    def sentence(self) -> str:
        """The difference in words."""
        if self.wrong is None:
            return f"The observed pairs are not known; {SEEN} should be seen, {HIDDEN} should be hidden."
        missing, extra = self.wrong
        if not missing and not extra:
            return f"Every query saw the keys that it should see ({SEEN}): the error is not in the mask."
        parts = [f"{extra:,} {_pairs(extra)} seen that should be hidden ({EXTRA})"] if extra else []
        parts += [f"{missing:,} {_pairs(missing)} not seen that should be visible ({MISSING})"] if missing else []
        return f"{', '.join(parts)}; {SEEN} is seen, {HIDDEN} is hidden, as they should be."

    @property
    def picture(self) -> str:
        """One line for each query, one character for each key.

        >>> from cp_ref.spec import Problem, Sequence
        >>> print(visibility_difference(Case(Problem(2, (Sequence(2, 2, 2, 2),))), [(0, 0), (0, 1), (1, 1)]).picture)
        #+
        -#
        """
        marks = dict.fromkeys(self.expected, SEEN) | dict.fromkeys(self.extra, EXTRA)
        marks |= dict.fromkeys(self.missing, MISSING)
        return "\n".join("".join(marks.get((q, k), HIDDEN) for k in self.columns) for q in self.rows)

    @property
    def whole(self) -> bool:
        """Whether this is all of the score matrix."""
        return (self.rows, self.columns) == tuple(map(range, _sizes(self.case)))


def visible(case: Case) -> frozenset[Pair]:
    """Every pair that the mask lets through, of all sequences; padding and tails see nothing.

    >>> from cp_ref.spec import Problem, Sequence
    >>> sorted(visible(Case(Problem(1, (Sequence(1, 1, 2, 2), Sequence(2, 2, 2, 2)), qkv_format="thd"))))
    [(0, 0), (2, 2), (3, 2), (3, 3)]
    """
    return frozenset((row, key) for row, keys in seen(case.problem) for key in keys)


def visibility_difference(case: Case, got_pairs: Iterable[Pair] | None) -> Difference:
    """The part of the mask that a picture shows: all of it, or the part around the first wrong pair.

    Args:
        got_pairs: the pairs that were seen; None when that is not known.

    >>> from cp_ref.spec import Problem, Sequence
    >>> found = visibility_difference(Case(Problem(1, (Sequence(2, 2, 2, 2),))), [(0, 0), (0, 1), (1, 1)])
    >>> sorted(found.missing), sorted(found.extra), found.wrong
    ([(1, 0)], [(0, 1)], (1, 1))

    Raises:
        ValueError: a pair lies outside the buffers.
    """
    expected, (n, m) = visible(case), _sizes(case)
    got = expected if got_pairs is None else frozenset((q, k) for q, k in got_pairs)
    for q, k in got - expected:
        if not (0 <= q < n and 0 <= k < m):
            raise ValueError(f"the pair {(q, k)} is outside the buffers of {n} queries and {m} keys of {case}")
    missing, extra = expected - got, got - expected
    q, k = min(missing | extra, default=(0, 0))
    rows, columns = _around(q, n), _around(k, m)

    def inside(pairs: frozenset[Pair]) -> frozenset[Pair]:
        return frozenset((q, k) for q, k in pairs if q in rows and k in columns)

    wrong = None if got_pairs is None else (len(missing), len(extra))
    return Difference(case, rows, columns, inside(expected), inside(missing), inside(extra), wrong)


def _pairs(count: int) -> str:
    return "pair is" if count == 1 else "pairs are"


def _sizes(case: Case) -> tuple[int, int]:
    return case.problem.starts_q[-1] + case.tail_q, case.problem.starts_kv[-1] + case.tail_kv


def _around(at: int, size: int) -> range:
    """At most `MOST` of [0, size), `at` in the middle unless an end is near."""
    start = max(0, min(at - MOST // 2, size - MOST))
    return range(start, min(size, start + MOST))
