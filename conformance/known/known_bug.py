"""A reported bug of a context-parallel system, and the entry that shows it."""

from __future__ import annotations

from dataclasses import dataclass

from conformance.case import Case
from conformance.judge.named_entries import TableEntry, every_schedule, problem
from cp_ref.schedules.problem import Sequence

__all__ = ["Known", "case", "reported"]


@dataclass(frozen=True)
class Known:
    """`where` is the project and the number of its issue or pull request: "NVIDIA/TransformerEngine#3331".

    `entry.text` says in one sentence what went wrong.
    """

    where: str
    entry: TableEntry

    @property
    def project(self) -> str:
        """The repository, owner/name."""
        return self.where.split("#")[0]


def case(cp_size: int, *sequences: Sequence, tails: tuple[int, int] = (0, 0), call: str = "", **fields: object) -> Case:
    """A case of `entries.problem`, with lse and its gradient; `call` names flags of the case, separated by spaces."""
    flags = dict.fromkeys(call.split(), True)
    return Case(
        problem(cp_size, *sequences, **fields),
        tail_q=tails[0],
        tail_kv=tails[1],
        seed=11,
        return_lse=True,
        loss="out+lse",
        **flags,  # pyright: ignore[reportArgumentType]
    )


def reported(
    where: str,
    text: str,
    *cases: Case,
    schedules: tuple[str, ...] = ("p2p",),
    tiers: tuple[str, ...] = ("logic", "probes"),
    errors: tuple[str, ...] = (),
) -> Known:
    """A report that cases show, under the schedules that had it."""
    played = tuple(c for one in cases for c in every_schedule(one, schedules))
    return Known(where, TableEntry(text, played, tiers, errors=errors))
