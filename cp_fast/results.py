"""The results of a pass: partial results on their way to totals, totals that are handed over, and those that stay."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_fast.bound import Complete, Give, Held, Pass
from cp_fast.kernels.base import Kernels
from cp_fast.merge import Part, Total, add_sink
from cp_fast.program import LoweredProgram
from cp_fast.rows import Rows, columns_of, count, put_columns, rows_of
from cp_ref.spec import Problem

__all__ = ["Results"]


class _Totals(dict[int, Total]):
    """Totals by sums, each made when it is first asked for."""

    def __init__(self, ready: Pass, kernels: Kernels) -> None:
        super().__init__()
        self._ready, self._kernels = ready, kernels

    def __missing__(self, sums: int) -> Total:
        total = self[sums] = Total(self._ready.sums[sums].shape, self._kernels)
        return total


class Results:
    """The results of one pass of one rank."""

    def __init__(
        self,
        problem: Problem,
        program: LoweredProgram[Rows],
        ready: Pass,
        kernels: Kernels,
        like: torch.Tensor,
        wide: torch.dtype,
        sink: torch.Tensor | None,
    ) -> None:
        self._problem, self._program, self._ready, self._kernels = problem, program, ready, kernels
        self.dtype, self.device, self._wide, self._sink = like.dtype, like.device, wide, sink
        self._totals = _Totals(ready, kernels)
        self.handed: dict[int, Held] = {}  # by sums: results as they were sent
        self.arriving: list[tuple[Complete, Held]] = []  # what other ranks have computed of the rank's own rows
        self._own: dict[str, tuple[Sequence[torch.Tensor], torch.Tensor | None]] = {}

    def contribute(self, gives: Sequence[Give], rows: Sequence[torch.Tensor], lse: torch.Tensor | None = None) -> None:
        """Hand a partial result to the totals that it is a part of."""
        for give in gives:
            mine, its_lse = rows, lse
            if not give.whole:
                mine = rows_of(rows, give.rows, give.heads, self._kernels.take_rows)
                its_lse = None if lse is None else columns_of([lse], give.rows, give.heads)[0]
            self._totals[give.sums].add(Part(mine, its_lse, give.place))

    def settle(self, sums: Sequence[tuple[int, int]]) -> None:
        """Add up what waits for each of these sums, if that is at least so many parts."""
        for number, least in sums:
            total = self._totals[number]
            if len(total.held) >= least:
                total.settle()

    def handed_over(self, sums: int, rows: slice | None) -> list[torch.Tensor]:
        """Rows of sums that are sent (all, for None): complete ones final, in the input's dtype, all others in the wide
        one; then of outs the lse, contiguous.
        """
        held = self.handed.get(sums)
        if held is None:
            held = self.handed[sums] = self._handed_over(sums)
        if rows is None:
            return [*held.rows, *held.columns]
        return [x[rows] for x in held.rows] + [x[:, rows].contiguous() for x in held.columns]

    def sent(self, name: str) -> list[torch.Tensor]:
        """The tensors of complete results as they were sent."""
        number = next(n for n, one in enumerate(self._program.sums) if one == name)
        return [*self.handed[number].rows, *self.handed[number].columns]

    def _handed_over(self, number: int) -> Held:
        sums = self._ready.sums[number].sums
        rows, lse = self._totals[number].finish()
        del self._totals[number]
        if sums.complete and sums.kind == "out" and self._sink is not None:
            assert lse is not None
            add_sink(rows[0], lse, self._sink[slice(*sums.heads)], slice(None))
        assert not sums.narrow or all(x.dtype == self.dtype for x in rows), "the library said that it rounds"
        dtype = self.dtype if sums.complete or sums.narrow else self._wide
        # the only part may be some heads of what a launch yielded
        return Held([x.to(dtype).contiguous() for x in rows], [] if lse is None else [lse.contiguous()])

    def finish_own(self, kind: str, size: int) -> None:
        """Put together what this rank has computed of its own rows. What completes them may still be under way."""
        problem, program, mine = self._problem, self._program, self._ready.home[kind]
        arriving = [one for one in self.arriving if one[0].kind == kind]
        whole = problem.heads_kv if kind == "dkv" else problem.heads_q
        if len(mine) == 1 and not arriving and self._ready.sums[mine[0]].sums.heads == (0, whole):
            rows, lse = self._totals[mine[0]].finish()
        else:
            rows, lse = self._joined(kind, mine, arriving, size, whole)
        if kind == "out" and self._sink is not None:
            assert lse is not None
            add_sink(rows[0], lse, self._sink, program.real_q_rows)
        self._own[kind] = [x.to(self.dtype) for x in rows], lse

    def home(self, kind: str, size: int) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
        """The results of the rank's own rows, in the input's dtype: for all heads, sinks included."""
        if kind not in self._own:
            self.finish_own(kind, size)
        rows, lse = self._own.pop(kind)
        arrived = [one for one in self.arriving if one[0].kind == kind]
        return self._with(arrived, rows, lse, size) if arrived else (rows, lse)

    def _joined(
        self, kind: str, mine: Sequence[int], arriving: Sequence[tuple[Complete, Held]], size: int, whole: int
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
        """The totals of some heads each, side by side: zeros where there is neither a total nor a complete result that
        will be written there.
        """
        sums, device = self._ready.sums, self.device
        dtype = self._wide if kind == "out" and self._sink is not None else self.dtype
        all_written = not self._program.spare_rows and whole == sum(
            sums[n].sums.heads[1] - sums[n].sums.heads[0] for n in mine
        ) + sum(what.heads for what, _ in arriving if count(what.into) == size)
        new = torch.empty if all_written else torch.zeros
        rows = [new(size, whole, d, dtype=dtype, device=device) for d in self._ready.dims[kind]]
        lse = None
        if kind == "out":
            lse = torch.empty(whole, size, dtype=self._wide, device=device)
            if not all_written:
                lse.fill_(float("-inf"))
        for n in mine:
            heads, part = slice(*sums[n].sums.heads), self._totals[n].finish()
            here = [x[:, heads] for x in rows]
            self._kernels.put_rows_(here, [x.to(dtype) for x in part.rows], slice(0, size))
            if lse is not None and part.lse is not None:
                lse[heads] = part.lse
        return rows, lse

    def _with(
        self,
        arrived: Sequence[tuple[Complete, Held]],
        rows: Sequence[torch.Tensor],
        lse: torch.Tensor | None,
        size: int,
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
        """Results with the complete ones that arrived, unpacked by one kernel a tensor."""
        spare = self._program.spare_rows
        if spare:  # what pads a table is written behind the rows
            rows = [torch.cat([x, x.new_empty(spare, *x.shape[1:])]) for x in rows]
            lse = None if lse is None else torch.cat([lse, lse.new_empty(lse.shape[0], spare)], 1)
        for what, box in arrived:
            for into, x in zip(rows, box.rows, strict=True):
                self._kernels.heads_to_back_(into, x, what.into, what.first_heads, False)
            for first, x in zip(what.first_heads, box.columns, strict=False):
                assert lse is not None
                put_columns(lse[first : first + len(x)], x, what.into)
        if not spare:
            return rows, lse
        return [x[:size] for x in rows], None if lse is None else lse[:, :size].contiguous()
