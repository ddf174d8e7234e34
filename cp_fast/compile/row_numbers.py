"""Row numbers and the lengths of launches are int32: how many rows a buffer of a rank may have."""

from __future__ import annotations

from cp_ref.contract.room import Room
from cp_ref.schedules.problem import Problem

__all__ = ["MOST_ROWS", "check_row_numbers"]

MOST_ROWS = 2**31 - 1  # Of one buffer of a rank.


def check_row_numbers(problem: Problem, room: Room | None = None) -> None:
    """Refuse a problem, or room, for which a rank would hold more rows of q or of k and v than int32 numbers.

    Raises:
        ValueError: naming the lengths (or the room), and how many rows a rank would hold.
    """
    for side, total, most in (
        ("q", problem.starts_q[-1], None if room is None else room.max_tokens_q),
        ("kv", problem.starts_kv[-1], None if room is None else room.max_tokens_kv),
    ):
        gathered = side == "kv" and problem.cp_comm_type == "all_gather"
        ranks = problem.cp_size if gathered else problem.a2a_size  # The ranks that gather rows.
        what, tokens = f"max_tokens_{side} is", most
        if tokens is None:
            what, tokens = f"cu_seqlens_{side}, padding included, ends at", total
        rows = -(-tokens // problem.cp_size) * ranks
        if rows > MOST_ROWS:
            raise ValueError(
                f"{what} {tokens}: with cp_comm_type {problem.cp_comm_type!r} at cp_size {problem.cp_size} a rank would"
                f" hold {rows} rows of {side}; row numbers are int32, so it must be at most {MOST_ROWS}"
            )
