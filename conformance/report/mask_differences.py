"""Expected and observed pairs of queries and keys: a failing problem's mask as a difference of pairs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

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

    Attributes:
        rows, columns: its packed query rows and packed key rows; `whole` if they are all of them.
        expected, seen: the pairs inside.
        wrong: the missing (expected and not seen) and the extra pairs (seen and not expected), counted over the whole
            problem; None where nobody knows what was seen.
    """

    rows: range
    columns: range
    whole: bool
    expected: frozenset[Pair]
    seen: frozenset[Pair]
    wrong: tuple[int, int] | None

    @property
    def sentence(self) -> str:
        """The difference in words."""
        if self.wrong is None:
            return f"The observed pairs are not known; {SEEN} should be seen, {HIDDEN} should be hidden."
        if not any(self.wrong):
            return f"Every query saw the keys that it should see ({SEEN}): the error is not in the mask."
        missing, extra = (f"{count:,} {'pair is' if count == 1 else 'pairs are'}" for count in self.wrong)
        parts = [f"{extra} seen that should be hidden ({EXTRA})"] if self.wrong[1] else []
        parts += [f"{missing} not seen that should be visible ({MISSING})"] if self.wrong[0] else []
        return f"{', '.join(parts)}; {SEEN} is seen, {HIDDEN} is hidden, as they should be."

    @property
    def picture(self) -> str:
        """One line for each query, one character for each key.

        >>> from cp_ref.schedules.problem import Problem, Sequence
        >>> print(visibility_difference(Case(Problem(2, (Sequence(2, 2, 2, 2),))), [(0, 0), (0, 1), (1, 1)]).picture)
        #+
        -#
        """
        marks = {(True, True): SEEN, (False, False): HIDDEN, (False, True): EXTRA, (True, False): MISSING}
        lines = [[((q, k) in self.expected, (q, k) in self.seen) for k in self.columns] for q in self.rows]
        return "\n".join("".join(marks[pair] for pair in line) for line in lines)


def visible(case: Case) -> frozenset[Pair]:
    """Every pair that the mask lets through, of all sequences; padding and tails see nothing.

    >>> from cp_ref.schedules.problem import Problem, Sequence
    >>> sorted(visible(Case(Problem(1, (Sequence(1, 1, 2, 2), Sequence(2, 2, 2, 2)), qkv_format="thd"))))
    [(0, 0), (2, 2), (3, 2), (3, 3)]
    """
    return frozenset((row, key) for row, keys in seen(case.problem) for key in keys)


def visibility_difference(case: Case, got_pairs: Iterable[Pair] | None) -> Difference:
    """The part of the mask that a picture shows: all of it, or the part around the first wrong pair.

    Args:
        got_pairs: the pairs that were seen; None when that is not known.

    >>> from cp_ref.schedules.problem import Problem, Sequence
    >>> found = visibility_difference(Case(Problem(1, (Sequence(2, 2, 2, 2),))), [(0, 0), (0, 1), (1, 1)])
    >>> sorted(found.expected - found.seen), sorted(found.seen - found.expected), found.wrong
    ([(1, 0)], [(0, 1)], (1, 1))

    Raises:
        ValueError: a pair lies outside the buffers.
    """
    expected, n, m = visible(case), case.rows("q"), case.rows("kv")
    got = expected if got_pairs is None else frozenset((q, k) for q, k in got_pairs)
    for q, k in got - expected:
        if not (0 <= q < n and 0 <= k < m):
            raise ValueError(f"the pair {(q, k)} is outside the buffers of {n} queries and {m} keys of {case}")
    missing, extra = expected - got, got - expected
    q, k = min(missing | extra, default=(0, 0))
    rows, columns = _around(q, n), _around(k, m)
    inside = frozenset(product(rows, columns))
    wrong = None if got_pairs is None else (len(missing), len(extra))
    return Difference(rows, columns, len(inside) == n * m, expected & inside, got & inside, wrong)


def _around(at: int, size: int) -> range:
    """At most `MOST` of [0, size), `at` in the middle unless an end is near."""
    start = max(0, min(at - MOST // 2, size - MOST))
    return range(start, min(size, start + MOST))
