"""The room of a plan that is updated in place: sizes that stay fixed while the lengths of batches change.

A CUDA graph has every address and every size baked in. So such a plan is made for the largest batch that is to come,
and `plan.update` gives it other lengths: fewer or more sequences, shorter or longer ones, as long as they fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from cp_ref.problems.read_problem import Sizes, check_layout, read_sequences
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.values import FURTHEST, read_count
from cp_ref.schedules.words import Feature, Unsupported

__all__ = [
    "Agreement",
    "Room",
    "check_room",
    "next_batch",
    "read_room",
]

MOST_SEQUENCES = 2**20  # every launch of such a plan has a table of this many lengths
_NAMES = ("max_sequences", "max_tokens_q", "max_tokens_kv")


@dataclass(frozen=True, slots=True)
class Room:
    """`max_tokens_*` are global, padding and tail included; `rows_*` are a rank's share, the size of its buffers.

    >>> Room(max_sequences=4, max_tokens_q=64, max_tokens_kv=32, cp_size=2).rows_q
    32
    """

    max_sequences: int
    max_tokens_q: int
    max_tokens_kv: int
    cp_size: int

    @property
    def rows_q(self) -> int:
        """Rows of every rank's q."""
        return self.max_tokens_q // self.cp_size

    @property
    def rows_kv(self) -> int:
        """Rows of every rank's k and v."""
        return self.max_tokens_kv // self.cp_size


class Agreement(NamedTuple):
    """The problem, the room and the options that all ranks must have in common: see `agree`.

    `extras`: other values that decide which messages are sent, by name, such as ("return_max_logit", True). `compared`:
    those that differ from call to call, such as a seed. They are compared too where the ranks compare anything, but an
    agreement is known by the others alone.
    """

    problem: Problem
    room: Room | None = None
    extras: tuple[tuple[str, object], ...] = ()
    compared: tuple[tuple[str, object], ...] = ()

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that are equal where all of it but `compared` is equal."""
        return blake2b(self.problem.fingerprint + repr((self.room, self.extras)).encode()).digest()[:32]

    def __str__(self) -> str:
        """The problem's canonical text, with the rest before its last bracket."""
        room = [] if self.room is None else [(name, getattr(self.room, name)) for name in _NAMES]
        words = "".join(f", {name}={value}" for name, value in (*room, *self.extras, *self.compared))
        return f"{str(self.problem).removesuffix(')')}{words})"


def read_room(problem: Problem, arguments: Mapping[str, Any]) -> Room | None:
    """The room that the arguments of `make_plan` ask for, by name; None if they ask for none.

    Raises:
        ValueError, TypeError: naming the argument, its value and the rule. Unsupported: areas do not change in place.
    """
    max_sequences, max_tokens_q, max_tokens_kv = (arguments.get(name) for name in _NAMES)
    if max_sequences is None:
        for name, value in (("max_tokens_q", max_tokens_q), ("max_tokens_kv", max_tokens_kv)):
            if value is not None:
                raise ValueError(f"{name} is {value!r}, but max_sequences is None; it is for plans that can be updated")
        return None
    if problem.areas is not None:
        raise Unsupported("a plan with areas and max_sequences", {"an update in place": {Feature.AREAS}})
    if problem.qkv_format != "thd":
        raise ValueError(
            f"max_sequences is {max_sequences!r}, but qkv_format is {problem.qkv_format!r}; it needs 'thd'"
        )
    tokens_q = sum(problem.lengths.slots_q) if max_tokens_q is None else _tokens("max_tokens_q", max_tokens_q)
    if max_tokens_kv is None:
        own_kv = any(arguments.get(name) is not None for name in ("cu_seqlens_kv", "cu_seqlens_kv_padded"))
        tokens_kv = sum(problem.lengths.slots_kv) if own_kv else tokens_q
    else:
        tokens_kv = _tokens("max_tokens_kv", max_tokens_kv)
    for name, value in (("max_tokens_q", tokens_q), ("max_tokens_kv", tokens_kv)):
        if value % problem.cp_size:
            raise ValueError(f"{name} is {value}; it must be a multiple of cp_size = {problem.cp_size}")
    sequences = read_count("max_sequences", max_sequences, at_least=1, at_most=MOST_SEQUENCES)
    room = Room(sequences, tokens_q, tokens_kv, problem.cp_size)
    check_room(problem, room)
    return room


def check_room(problem: Problem, room: Room) -> None:
    """Raise ValueError unless a batch fits, naming what does not."""
    found = {
        "max_sequences": (len(problem.lengths), "sequences in cu_seqlens_q"),
        "max_tokens_q": (sum(problem.lengths.slots_q), "tokens in cu_seqlens_q_padded"),
        "max_tokens_kv": (sum(problem.lengths.slots_kv), "tokens in cu_seqlens_kv_padded"),
    }
    for name, (value, what) in found.items():
        if value > getattr(room, name):
            raise ValueError(f"there are {value} {what}, but the plan has room for {name} = {getattr(room, name)}")


def next_batch(problem: Problem, room: Room | None, cu_seqlens: Mapping[str, Any]) -> Problem:
    """The plan's problem with other lengths: the four arguments of `plan.update`, by name.

    Raises:
        ValueError, TypeError: the lengths are wrong, there is no room for them, or there is no room at all.
    """
    if room is None:
        raise ValueError("this plan cannot be updated; make it with max_sequences=..., or make a new plan")
    sizes = Sizes(problem.heads_q, problem.heads_kv, problem.d_qk, problem.d_v, problem.dtype)
    sequences = read_sequences(cu_seqlens, problem.qkv_format, problem.attn_mask_type, sizes)
    read = replace(problem, sequences=sequences)
    check_layout(read)
    check_room(read, room)
    return read


def _tokens(name: str, value: Any) -> int:
    return read_count(name, value, at_least=1, at_most=FURTHEST)
