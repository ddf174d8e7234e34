"""An exchange of a layer on one rank: rows are gathered, and results for them given back, by two programs.

    exchange = RowExchange("keys", messages, device)
    ((keys, values),) = exchange.gather(group, (k, v))          the rows that the rank computes with
    ((dk, dv),) = exchange.give_back(group, (dkeys, dvalues))   the sums of all ranks for the own rows

The programs run as attention's do (`cp_fast.runtime.run`): with prepared messages, the movers' kernels, and the memory
of peers where the group's messages go that way. Operations are resolved on the first call with tensors of some shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cp_fast.compile.exchange_program import RowMessages, lower_exchange
from cp_fast.compile.pipeline import upload
from cp_fast.compile.program import Program, Programs
from cp_fast.movers.mover_protocol import Rows
from cp_fast.runtime.operations import wait
from cp_fast.runtime.pass_buffers import Operation, Shapes, State, Tensors
from cp_fast.runtime.prepared_exchange import prepares
from cp_fast.runtime.run import resolve
from cp_ref.groups.group import Group

__all__ = ["RowExchange"]

_Given = Sequence[torch.Tensor]


class _Resolved(NamedTuple):
    """A program for tensors of some shapes.

    Attributes:
        before, after: its operations up to the first wait, and from there on.
        results: of each kind the number of a buffer, and what it is if nothing was written to it.
    """

    before: Sequence[Operation]
    after: Sequence[Operation]
    results: Sequence[tuple[int, Callable[[], Tensors]]]


class RowExchange:
    """The exchange of some kinds of rows among the ranks of one batch.

    Each kind has its tensors, at most eight: [rows, heads, ...], or [rows, ...] where all heads travel together. They
    may differ in their last axes and dtypes. Kinds have the order of `RowMessages`.

    Attributes:
        programs: forward gathers, backward gives back.
    """

    def __init__(self, name: str, messages: RowMessages, device: torch.device) -> None:
        self.programs: Programs[Rows] = upload(lower_exchange(name, messages), device)
        self._kinds, self._results = tuple(messages.rows), tuple(messages.results)
        every = {**messages.rows, **messages.results}
        self._together = {kind: rows.count == 1 for kind, rows in every.items()}
        self._own = {kind: rows.own.total for kind, rows in every.items()}
        own = self.programs.forward.results
        self._stays = all(own[kind] == number for number, kind in enumerate(self._kinds))
        self._device = device
        self._resolved: dict[Any, _Resolved] = {}

    def __str__(self) -> str:
        return str(self.programs)

    def gather(
        self, group: Group, *given: _Given, meanwhile: Callable[[], None] | None = None
    ) -> list[Sequence[torch.Tensor]]:
        """The rows that this rank computes with, given its own rows of the tensors of each kind.

        meanwhile: work to do while the first messages travel.
        """
        if self._stays and not self.programs.forward.instructions:
            if meanwhile is not None:
                meanwhile()
            return [list(some) for some in given]
        return self._run(self.programs.forward, self._kinds, group, given, meanwhile)

    def give_back(self, group: Group, *given: _Given) -> list[Sequence[torch.Tensor]]:
        """The sums of all ranks' results for the own rows, given results for the gathered rows. The sums may be formed
        in the memory of the given tensors.
        """
        return self._run(self.programs.backward, self._results, group, given, None)

    def _run(
        self,
        program: Program[Rows],
        kinds: Sequence[str],
        group: Group,
        given: Sequence[_Given],
        meanwhile: Callable[[], None] | None,
    ) -> list[Sequence[torch.Tensor]]:
        sizes = tuple([(x.shape, x.dtype) for some in given for x in some])
        key = program.direction, sizes, tuple(map(len, given)), group if prepares(group) else None
        if (resolved := self._resolved.get(key)) is None:
            resolved = self._resolved.setdefault(key, self._resolve(program, kinds, given, group))
        own = [Tensors(some, ()) for some in given]
        state = State([*own, *[None] * (len(program.buffers) - len(own))], group)
        for operation in resolved.before:
            operation(state)
        if meanwhile is not None:
            meanwhile()
        for operation in resolved.after:
            operation(state)
        return [(state.buffers[number] or nothing()).rows for number, nothing in resolved.results]

    def _resolve(
        self, program: Program[Rows], kinds: Sequence[str], given: Sequence[_Given], group: Group
    ) -> _Resolved:
        by_kind = dict(zip(kinds, given, strict=True))
        axes = {kind: [self._axes(kind, x) for x in some] for kind, some in by_kind.items()}
        dtypes = {kind: tuple(x.dtype for x in some) for kind, some in by_kind.items()}
        shapes = Shapes(self._own, axes, dtypes, self._device)
        operations = resolve(program, shapes, group)
        first = operations.index(wait) if wait in operations else len(operations)
        numbers = [program.results[kind] for kind in kinds]
        results = [(number, shapes.allocation(program.buffers[number]).nothing) for number in numbers]
        return _Resolved(operations[:first], operations[first:], results)

    def _axes(self, kind: str, x: torch.Tensor) -> Sequence[int]:
        """See `Shapes.axes`."""
        return x.shape[1:] if self._together[kind] else (-1, *x.shape[2:])
