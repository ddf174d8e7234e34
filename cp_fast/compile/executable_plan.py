"""The executable plan: one flat list of instructions for one rank and one pass, on numbered buffers.

The compiler makes it from the rank's schedule (`cp_fast.compile`), the runtime runs it in one loop (`cp_fast.runtime`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from cp_fast.compile.instructions import OWN, Accumulate, BufferSpec, Instruction, Recv, Send

__all__ = ["ExecutablePlan", "PassPlan"]

R = TypeVar("R")  # Rows.


class Accumulations(NamedTuple):
    """The accumulations of one sum, by the ids of the instructions.

    Attributes:
        rounded: those whose result may have the sum's final dtype: none of their rows gets a further partial result.
        written: those that only write, since all of their rows are new to the sum.
        filled: how many rows the latter have.
    """

    rounded: frozenset[int]
    written: frozenset[int]
    filled: int

    @staticmethod
    def of(spec: BufferSpec, some: Sequence[Accumulate[Any]]) -> Accumulations:
        """Those of a sum, in order. Rows by index may be any rows."""
        places = [one.target.rows for one in some]
        if any(one.target.heads != spec.all_heads for one in some):
            places = [None] * len(some)
        earlier = [sum(_meet(rows, other) for other in places[:n]) for n, rows in enumerate(places)]
        later = [any(_meet(rows, other) for other in places[n + 1 :]) for n, rows in enumerate(places)]
        once = all(n < 2 for n in earlier)  # No row is rounded, and then added to: the sum is never widened.
        return Accumulations(
            frozenset(id(one) for n, one in enumerate(some) if n + 1 == len(some) or (once and not later[n])),
            frozenset(id(one) for n, one in enumerate(some) if not earlier[n]),
            sum(x.stop - x.start for x, n in zip(places, earlier, strict=True) if isinstance(x, slice) and not n),
        )


def _meet(a: Any, b: Any) -> bool:
    """Whether rows of a sum may be the same.

    >>> _meet(slice(0, 4), slice(4, 6)), _meet(slice(0, 4), None)
    (False, True)
    """
    return not (isinstance(a, slice) and isinstance(b, slice)) or max(a.start, b.start) < min(a.stop, b.stop)


@dataclass(frozen=True)
class PassPlan(Generic[R]):
    """The executable plan of one pass.

    Attributes:
        direction: "forward" or "backward".
        steps: how many steps the schedule has.
        buffers: by number.
        instructions: in the order in which they run.
        results: by kind, the buffer of the rank's own results.
    """

    direction: str
    steps: int
    buffers: tuple[BufferSpec, ...]
    instructions: tuple[Instruction[R], ...]
    results: dict[str, int]

    def of(self, kind: type[Any]) -> Iterator[Any]:
        """The instructions of one type, in order."""
        return (one for one in self.instructions if type(one) is kind)

    @cached_property
    def accumulations(self) -> dict[int, Accumulations]:
        """How each sum is accumulated, sinks aside; by buffer."""
        found: dict[int, list[Accumulate[R]]] = {}
        for one in self.of(Accumulate):
            if not one.of_sink:
                found.setdefault(one.target.buffer, []).append(one)
        return {total: Accumulations.of(self.buffers[total], some) for total, some in found.items()}

    def __str__(self) -> str:
        from cp_fast.compile.instruction_text import lines_of

        return "\n".join(lines_of(self))


@dataclass(frozen=True)
class ExecutablePlan(Generic[R]):
    """Both passes of one rank.

    Attributes:
        forward, backward: the lists of instructions.
        saved: (buffer of the forward pass, buffer of the backward pass) of every buffer kept between the passes,
            including the own q and kv if the backward pass reads them.
        real_q_rows: the local rows that hold real query tokens; in a plan that is updated in place a mask of all rows.
        skipped: the compiler passes that did not run, and why.
        spare_rows: in a plan updated in place, the number of spare rows at the end of each buffer. Tables have a
            constant size there; their padding writes to the spare rows, which are never read.
        position_ids: int64 [t], in a plan that is updated in place.
    """

    forward: PassPlan[R]
    backward: PassPlan[R]
    saved: tuple[tuple[int, int], ...]
    real_q_rows: R
    skipped: Mapping[str, str] = field(default_factory=dict)
    spare_rows: int = 0
    position_ids: Any = None

    @property
    def needs_inputs(self) -> bool:
        """Whether the backward pass reads the rank's own q, k and v."""
        return any(number in (OWN["q"], OWN["kv"]) for number, _ in self.saved)

    @property
    def kept(self) -> tuple[tuple[int, int], ...]:
        """`saved` without the rank's own buffers."""
        return tuple(pair for pair in self.saved if pair[0] not in (OWN["q"], OWN["kv"]))

    @property
    def kept_tensors(self) -> str:
        """The tensors of `kept`: a letter for each one, "x" for rows of the input's dtype, "l" for an lse."""
        letters = {"kv": "xx", "out": "xl"}
        return "".join(letters.get(self.forward.buffers[number].kind, "x") for number, _ in self.kept)

    @property
    def sends_do(self) -> bool:
        """Whether rows of the output's gradient are sent; the same on every rank."""
        plan = self.backward
        sent = [one.source.buffer for one in plan.of(Send)] + [one.buffer for one in plan.of(Recv)]
        return any(plan.buffers[number].kind == "do" for number in sent)

    def __str__(self) -> str:
        skipped = [f"skipped {name}: {reason}\n" for name, reason in self.skipped.items()]
        return f"{''.join(skipped)}{self.forward}\n{self.backward}"
