"""Schedules in words: the idea of each of the four, the events of a step, and short names for rows and tiles.

q 2-3 x k 0-1       queries 2 and 3 against keys 0 and 1            s1 q 2-3 ...    in sequence 1, where there are more
kv 0-1, 14-15 h2    key and value rows, of head 2 only              (3 of 4)        visible pairs of a tile
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from cp_ref.spec import Message, Problem, Step, Tiles, Units, tile_pairs

__all__ = [
    "BACKWARD",
    "IDEA",
    "about",
    "layout_words",
    "legend",
    "message_words",
    "rows_words",
    "span",
    "step_words",
    "tile_words",
]

IDEA = (
    "A sequence that is too long for one GPU is spread over several ranks. Every token's query, key and value live on "
    "one rank, its owner; but a query has to meet keys of other ranks too. Who sends what to whom, and who computes "
    "which part of the score matrix (queries x keys) when, is the schedule."
)

_ABOUT = {
    "p2p": "Ring attention: queries stay where they are, keys and values travel round a ring of ranks. Every rank "
    "computes with the block in hand while the next one is on its way, and merges the partial outputs by their "
    "log-sum-exp (LSE).",
    "all_gather": "Queries stay where they are; every rank gathers the keys and values that its queries see from all "
    "other ranks, computing with its own meanwhile. In the backward pass the gradients of keys and values go home and "
    "are added up.",
    "a2a": "Heads are exchanged for sequence (Ulysses): attention treats every head by itself, so each rank gets all "
    "rows of some heads instead of some rows of all heads, computes these heads alone, and gives the results back.",
    "a2a+p2p": "Two levels (USP): inside a group the ranks exchange heads for sequence, so that each has all rows of "
    "the group for some heads; across the groups, keys and values of these heads travel round a ring, and partial "
    "outputs are merged by their log-sum-exp (LSE). At the end the results are given back.",
}

BACKWARD = (
    "The backward pass computes the same tiles again, now with the gradient of the output (do) and the final LSE: so "
    "each tile's weights are right at once, and gradients are simply added up. A query's gradient is complete where "
    "its output was; gradients of keys and values arise wherever a tile was, and have to get home."
)

_LAYOUT = {
    "dual_chunk": "each sequence is cut into {chunks} chunks; rank r has the chunks r and {last}-r. Under a causal "
    "mask an early chunk sees little and a late one much, so every rank gets the same work.",
    "contiguous": "rank r has the r-th of {ranks} equal parts.",
    "balanced": "documents stay whole on one of the {ranks} ranks where they fit, and are cut where rows or work would "
    "not be equal.",
    "given": "who holds what was given as a table.",
}

_TRAVELS = {
    "q": "query rows go to the rank that has their heads",
    "kv": "key and value rows go to ranks that need them",
    "do": "the output's gradient goes to the rank that has the head",
    "out": "output rows go home to their owner, with their LSE",
    "dq": "gradients of queries go home to their owner",
    "dkv": "gradients of keys and values go towards their owner, where they are added up",
}


def about(problem: Problem) -> str:
    """The problem's schedule in a few sentences."""
    said = _ABOUT[problem.cp_comm_type]
    if problem.cp_comm_type in ("p2p", "a2a+p2p") and Units(problem.workload).sparse:
        said += " As ranks see little of most others, nothing goes round: rows come straight from their owner."
    return said


def layout_words(problem: Problem) -> str:
    """The owners of the rows."""
    size = problem.cp_size
    return f"{problem.layout_name}: " + _LAYOUT[problem.layout_name].format(
        chunks=2 * size, last=2 * size - 1, ranks=size
    )


def legend(problem: Problem) -> str:
    """How the tables of steps are to be read."""
    said = "In the tables, q 2-3 x k 0-1 is a tile: queries 2 and 3 against keys 0 and 1"
    said += "; s0, s1, ... are the sequences" if len(problem.sequences) > 1 else ""
    said += "; h0-1 are its heads" if problem.a2a_size > 1 else ""
    return said + (
        "; (3 of 4) says how many of its pairs the mask leaves. Rows that travel are named q (queries), kv (keys and "
        "values), out (partial outputs with their LSE), do (the output's gradient), dq and dkv (gradients)."
    )


def step_words(direction: str, steps: Iterable[Step]) -> str:
    """The work of all ranks in one step.

    >>> from cp_ref.spec import Sequence, make_schedule
    >>> problem = Problem(2, (Sequence(8, 8, 8, 8),), "a2a", 2, heads_q=4, heads_kv=4)
    >>> print(step_words("forward", [program[1] for program in make_schedule(problem, head_chunks=(1, 1)).forward]))
    Every rank computes partial outputs from the rows that it has at the start of the step. Meanwhile query rows go to \
the rank that has their heads; key and value rows go to ranks that need them.
    """
    steps = list(steps)
    kinds = list(dict.fromkeys(m.kind for step in steps for m in step.sends))
    computes = any(len(step.tiles) for step in steps)
    if "q" in kinds and not computes:
        return (
            "Heads are exchanged for sequence: query, key and value rows go to the rank that has their head. "
            "Nothing can be computed yet."
        )
    travels = "; ".join(_TRAVELS[kind] for kind in kinds)
    if not computes:
        return f"Nothing is computed: {travels}." if travels else "Nothing is left to do."
    what = "partial outputs" if direction == "forward" else "gradients"
    said = f"Every rank computes {what} from the rows that it has at the start of the step."
    return f"{said} Meanwhile {travels}." if travels else f"{said} Nothing travels."


def rows_words(problem: Problem, side: str, rows: Iterable[Sequence[int]]) -> str:
    """Rows of the global buffer of one side ("q" or "kv"), by sequence and position, inclusive.

    rows: (start, stop, first head, last head + 1) each.

    >>> from cp_ref.spec import Sequence
    >>> two = Problem(2, (Sequence(8, 8, 8, 8), Sequence(4, 4, 4, 4)), qkv_format="thd", heads_q=4)
    >>> rows_words(two, "q", [(0, 2, 0, 4), (6, 7, 0, 4), (8, 12, 2, 4)])
    's0 0-1, 6; s1 0-3 h2-3'
    """
    by_sequence: dict[tuple[int, str], list[str]] = {}
    for start, stop, first, last in rows:
        for seq, a, b in _positions(problem, side, start, stop):
            by_sequence.setdefault((seq, _heads(problem, side, first, last)), []).append(span(a, b))
    many = len(problem.sequences) > 1
    return "; ".join(
        (f"s{seq} " if many else "") + ", ".join(spans) + heads for (seq, heads), spans in by_sequence.items()
    )


def tile_words(problem: Problem, tiles: Tiles) -> list[str]:
    """Tiles, and how many of its pairs the mask leaves of each.

    >>> from cp_ref.spec import Sequence
    >>> tile_words(Problem(2, (Sequence(8, 8, 8, 8),)), Tiles.of_rows([(0, 2, 4, 2, 4, 0, 1)]))
    ['q 2-3 x k 2-3 (3 of 4)']
    """
    found: list[str] = []
    for (_, q0, q1, k0, k1, first, last), seen in zip(
        tiles.rows(), tile_pairs(problem.workload.areas, tiles).tolist(), strict=True
    ):
        q, k = list(_positions(problem, "q", q0, q1)), list(_positions(problem, "kv", k0, k1))
        if len({seq for seq, _, _ in (*q, *k)}) == 1:
            where = f"s{q[0][0]} " if len(problem.sequences) > 1 else ""
            words = f"{where}q {span(*q[0][1:])} x k {span(*k[0][1:])}"
        else:  # Areas reach over several sequences.
            words = f"q {_places(q)} x k {_places(k)}"
        size = (q1 - q0) * (k1 - k0)
        part = f" ({seen} of {size})" if seen < size else ""
        found.append(f"{words}{_heads(problem, 'q', first, last)}{part}")
    return found


def _places(positions: Iterable[tuple[int, int, int]]) -> str:
    return ", ".join(f"s{seq} {span(first, last)}" for seq, first, last in positions)


def message_words(problem: Problem, message: Message, arrow: str) -> str:
    """A message; `arrow` points to or from the peer."""
    side = "kv" if message.kind in ("kv", "dkv") else "q"
    return f"{message.kind} {rows_words(problem, side, message.pieces.rows())} {arrow} {message.peer}"


def _positions(problem: Problem, side: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(sequence, first position, last position + 1) of rows that may reach over several sequences."""
    starts = problem.starts_q if side == "q" else problem.starts_kv
    while start < stop:
        seq = bisect_right(starts, start) - 1
        end = min(stop, starts[seq + 1])
        yield seq, start - starts[seq], end - starts[seq]
        start = end


def span(start: int, stop: int) -> str:
    """A half-open span as people write it: both ends included."""
    return str(start) if stop - start == 1 else f"{start}-{stop - 1}"


def _heads(problem: Problem, side: str, first: int, last: int) -> str:
    return "" if last - first == (problem.heads_q if side == "q" else problem.heads_kv) else f" h{span(first, last)}"
