"""What a schedule costs: work, balance, bytes and buffers, counted on integers."""

from __future__ import annotations

from dataclasses import dataclass

from cp_ref.spec.layout import local_slots, q_fragments
from cp_ref.spec.problem import Problem
from cp_ref.spec.schedule import Message, Program, Schedule

__all__ = ["RankCost", "Report", "message_bytes", "message_rows", "report"]

_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class RankCost:
    """One rank's share. Pairs are visible (query, key) pairs times query heads; both passes have the same tiles."""

    tokens: int  # query slots that it owns, padding included
    tiles: int  # in the forward pass
    pairs: int  # in the forward pass
    forward_bytes: int  # sent
    backward_bytes: int  # sent
    held_rows: int  # most kv rows received and still needed at one time, in the forward pass


@dataclass(frozen=True, slots=True)
class Report:
    """The costs of all ranks."""

    ranks: tuple[RankCost, ...]

    @property
    def balance(self) -> float:
        """The mean rank's work over the busiest rank's: 1 is perfect, 1 / cp_size is one rank doing everything."""
        pairs = [r.pairs for r in self.ranks]
        return sum(pairs) / (len(pairs) * max(pairs)) if max(pairs) else 1.0

    @property
    def sent_bytes(self) -> int:
        """All bytes that all ranks send, both passes."""
        return sum(r.forward_bytes + r.backward_bytes for r in self.ranks)


def report(problem: Problem, schedule: Schedule) -> Report:
    """Count. The schedule is taken to be right: `verify` first."""
    return Report(
        tuple(
            RankCost(
                tokens=local_slots(q_fragments(problem, rank)),
                tiles=sum(len(step.tiles) for step in schedule.forward[rank]),
                pairs=_pairs(problem, schedule.forward[rank]),
                forward_bytes=_sent(problem, schedule.forward[rank]),
                backward_bytes=_sent(problem, schedule.backward[rank]),
                held_rows=_held_rows(schedule.forward[rank]),
            )
            for rank in range(problem.cp_size)
        )
    )


def message_rows(message: Message) -> int:
    """How many rows it has; a row of some of the heads counts as one."""
    return sum(p.stop - p.start for p in message.pieces)


def message_bytes(problem: Problem, message: Message) -> int:
    """How many bytes travel: operands in the problem's dtype, results in float32 (float64 for float64)."""
    item = _ITEM_BYTES[problem.dtype]
    wide = max(item, 4)
    heads = problem.heads_kv if message.what in ("kv", "dkv") else problem.heads_q
    row_bytes = {
        "q": problem.d_qk * item,
        "kv": (problem.d_qk + problem.d_v) * item,
        "do": problem.d_v * item + 2 * wide,
        "out": (problem.d_v + 1) * wide,
        "dq": problem.d_qk * wide,
        "dkv": (problem.d_qk + problem.d_v) * wide,
    }[message.what]
    return sum((p.stop - p.start) * _head_count(p.heads, heads) for p in message.pieces) * row_bytes


def _head_count(heads: tuple[int, int] | None, whole: int) -> int:
    return whole if heads is None else heads[1] - heads[0]


def _sent(problem: Problem, program: Program) -> int:
    return sum(message_bytes(problem, m) for step in program for m in step.sends)


def _pairs(problem: Problem, program: Program) -> int:
    pairs = 0
    for step in program:
        for tile in step.tiles:
            band = problem.band(problem.sequences[tile.seq])
            pairs += band.count(tile.rect) * _head_count(tile.heads, problem.heads_q)
    return pairs


def _held_rows(program: Program) -> int:
    """The high-water mark of received kv rows, each held from the step it travels in to the last step that uses it."""
    held = [0] * (len(program) + 1)
    for arrival, step in enumerate(program):
        for message in step.recvs:
            for piece in message.pieces if message.what == "kv" else ():
                last = arrival
                for later in range(arrival + 1, len(program)):
                    tiles = program[later].tiles
                    sent = [p for m in program[later].sends if m.what == "kv" for p in m.pieces]
                    used = any(t.seq == piece.seq and t.rect.k0 < piece.stop and piece.start < t.rect.k1 for t in tiles)
                    if used or any(p.seq == piece.seq and p.start < piece.stop and piece.start < p.stop for p in sent):
                        last = later
                for now in range(arrival, last + 1):
                    held[now] += piece.stop - piece.start
    return max(held, default=0)
