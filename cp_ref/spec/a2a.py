"""The a2a schedules: heads are exchanged for sequence before attention and back after it (Ulysses), in a ring (USP).

Inside a group of `a2a_size` ranks every rank starts with all heads of its own rows and ends up with all rows of the
group for its own heads. Attention then needs no merging inside the group, whatever the mask.

    a2a_size 2, 4 heads            before            exchanged           the result goes the other way
                                h 0 1 2 3            h 0 1 2 3
        rows of rank 0            0 0 0 0              0 0 1 1
        rows of rank 1            1 1 1 1              0 0 1 1           the number is the rank that has it

`a2a` is one group of all ranks. `a2a+p2p` has cp_size / a2a_size groups: global rank = p2p_rank * a2a_size + a2a_rank,
and the ranks with equal a2a_rank form a ring across the groups.

With fewer kv heads than ranks in the group, a kv head goes to every rank that has one of its query heads, and its
gradients are added up at home. The exchanged q and kv are kept for the backward pass.

From DeepSpeed-Ulysses (Jacobs et al., 2023) and USP (Fang and Zhao, 2024).
"""

from __future__ import annotations

from cp_ref.spec.p2p import Place, ring_programs
from cp_ref.spec.problem import Problem
from cp_ref.spec.schedule import Message, Piece, Program, Step, tag
from cp_ref.spec.units import Units, common, real_rows

__all__ = ["head_ranges", "plan_a2a_rank"]


def head_ranges(problem: Problem, a2a_rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The query heads of a rank of an a2a group, and the kv heads that they use.

    >>> eight_over_two = Problem(4, (), "a2a", 4, heads_q=8, heads_kv=2)
    >>> [head_ranges(eight_over_two, r) for r in range(4)]
    [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 6), (1, 2)), ((6, 8), (1, 2))]
    """
    share = problem.heads_q // problem.a2a_size
    first, last = a2a_rank * share, (a2a_rank + 1) * share
    return (first, last), (first // problem.group_size, -(-last // problem.group_size))


def plan_a2a_rank(units: Units, rank: int) -> tuple[Program, Program]:
    """One rank's forward and backward program: exchange, a ring across the groups (one step in `a2a`), exchange
    back.
    """
    problem = units.problem
    unit, a2a_rank = divmod(rank, problem.a2a_size)
    q_heads, kv_heads = head_ranges(problem, a2a_rank)
    place = Place(unit, lambda other: other * problem.a2a_size + a2a_rank, q_heads, kv_heads, first_step=1)
    ring_forward, ring_backward = ring_programs(units, place)
    forward = (
        _gather_rows(units, rank, ("q", "kv"), 0),
        *ring_forward,
        _return_rows(units, rank, ("out",), len(ring_forward) + 1),
    )
    backward = (
        _gather_rows(units, rank, ("do",), 0),
        *ring_backward,
        _return_rows(units, rank, ("dq", "dkv"), len(ring_backward) + 1),
    )
    return forward, backward


def _gather_rows(units: Units, rank: int, kinds: tuple[str, ...], number: int) -> Step:
    """Give every rank of the group its heads of the own rows, and get the own heads of its rows."""
    peers = _group(units, rank)
    return Step(
        tuple(m for what in kinds for peer in peers for m in _message(units, what, rank, peer, peer, number)),
        tuple(m for what in kinds for peer in peers for m in _message(units, what, peer, rank, peer, number)),
    )


def _return_rows(units: Units, rank: int, kinds: tuple[str, ...], number: int) -> Step:
    """The way back: results for the own heads to the owners of the rows."""
    there = _gather_rows(units, rank, kinds, number)
    return Step(there.recvs, there.sends)


def _group(units: Units, rank: int) -> list[int]:
    """The other ranks of the a2a group, the next one first, so that not all of them begin with the same."""
    size = units.problem.a2a_size
    return [rank - rank % size + (rank + n) % size for n in range(1, size)]


def _message(units: Units, what: str, rows_of: int, heads_of: int, peer: int, number: int) -> list[Message]:
    """The rows of one rank, as far as they see or are seen by anything, for the heads of another."""
    problem, side = units.problem, "kv" if what in ("kv", "dkv") else "q"
    q_heads, kv_heads = head_ranges(problem, heads_of % problem.a2a_size)
    heads = kv_heads if side == "kv" else q_heads
    rows = common(real_rows(problem, rows_of, side), units.active(rows_of // problem.a2a_size, side))
    pieces = tuple(Piece(p.seq, p.start, p.stop, heads) for p in rows)
    return [Message(what, pieces, peer, tag(number, what))] if pieces else []
