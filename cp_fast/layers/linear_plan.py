"""A rank's tables for the linear layers of one batch, which all layers share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from cp_fast.api.plan import Plan
from cp_fast.compile.exchange_program import RowMessages
from cp_fast.kernels.linear.linear_kernels import FragmentRows
from cp_fast.layers.halo_tables import HaloTables, halo_tables
from cp_fast.layers.layers import LayerTables
from cp_fast.layers.state_tables import StateTables, state_tables
from cp_fast.runtime.slices import OwnRows, taken
from cp_ref.batches.tensors import to_packed
from cp_ref.schedules.linear_schedules import DocumentFragments, document_fragments, make_rank_states
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.schedule import STATES as KINDS

__all__ = [
    "HALO",
    "REVERSED_STATES",
    "STATES",
    "LinearTables",
    "LocalRows",
    "linear_tables",
]

# ---- a rank's rows
#
# The rows of a rank's fragments in the user's tensors: packed side by side for kernels, and put back among zeros.
#
# Few rows of padding between fragments may stay where they are, as fragments of no document. Then nothing is copied.


_MOST = 8  # One row of padding for this many rows in fragments costs less than copies of all.


@dataclass(frozen=True, eq=False)
class LocalRows:
    """One rank's rows of one batch.

    Attributes:
        problem: the batch.
        fragments: the rank's own, in the order of their rows. Those of document -1 are padding.
        device: of the tensors.
    """

    problem: Problem
    fragments: DocumentFragments
    device: torch.device

    @cached_property
    def packed(self) -> FragmentRows:
        """The fragments, side by side."""
        sizes = self.fragments.stop - self.fragments.start
        return FragmentRows((0, *np.cumsum(sizes).tolist()), self.device)

    def with_padding(self) -> LocalRows:
        """The same with the padding between fragments as fragments of document -1, where that saves copies."""
        own = self.fragments
        ends = own.row + own.stop - own.start
        sizes = own.row - np.append(0, ends)[: len(ends)]
        n, some = self.packed.cu[-1], np.flatnonzero(sizes)
        if not len(some) or int(sizes.sum()) * _MOST > n:
            return self
        none, size = np.full(len(some), -1), sizes[some]
        padding = none, none, np.full(len(some), own.rank[0]), -size, np.zeros_like(size), own.row[some] - size
        columns = (np.concatenate(pair) for pair in zip(padding, own.columns, strict=True))
        both = DocumentFragments(*columns)
        return LocalRows(self.problem, both.take(both.row.argsort(kind="stable")), self.device)

    @cached_property
    def _padding(self) -> torch.Tensor | None:
        """Return the packed rows of padding, int64. None: the batch has no padding."""
        where = np.repeat(self.fragments.document < 0, self.fragments.stop - self.fragments.start)
        return torch.from_numpy(np.flatnonzero(where)).to(self.device) if where.any() else None

    @cached_property
    def _own(self) -> OwnRows:
        return OwnRows.of(self.problem, self.fragments, self.device)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """A slice of the user's as packed rows [n, ...], contiguous."""
        return taken(to_packed(x, self.problem.qkv_format), self._own.places).contiguous()

    def zeroed(self, x: torch.Tensor) -> torch.Tensor:
        """Packed rows [n, ...], with zeros in those of padding."""
        return x if self._padding is None else x.index_fill(0, self._padding, 0)

    def put(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Packed rows [n, ...], a tensor of the caller's own, as a slice with the leading axes of `like`, contiguous;
        zero in padding and tail.
        """
        return self._own.put(x if self._padding is None else x.index_fill_(0, self._padding, 0), like)


# ---- the tables


STATES, REVERSED_STATES, HALO = "states", "reversed states", "halo "  # exchanges; behind HALO is the kernel size


@dataclass(frozen=True, eq=False)
class LinearTables(LayerTables):
    """A rank's tables for the linear layers of one batch."""

    halos: dict[int, HaloTables] = field(default_factory=dict[int, HaloTables], repr=False)

    def messages(self, name: str) -> RowMessages:
        """See `LayerTables`."""
        if name in (STATES, REVERSED_STATES):
            return self.passes[name == REVERSED_STATES].messages
        return self.halo(int(name.removeprefix(HALO))).messages

    @cached_property
    def rows(self) -> LocalRows:
        """The rank's rows, without padding."""
        own = document_fragments(self.problem).of(self.rank)
        return LocalRows(self.problem, own.take(own.row.argsort(kind="stable")), self.device)

    @cached_property
    def sequences(self) -> LocalRows:
        """The rows as linear attention takes them, which may have padding among them."""
        return self.rows.with_padding()

    @cached_property
    def passes(self) -> tuple[StateTables, StateTables]:
        """Forward and backward."""
        fragments = document_fragments(self.problem), self.sequences.fragments
        steps = make_rank_states(self.problem, self.rank)
        forward, backward = (state_tables(*of, *fragments, self.device) for of in zip(KINDS, steps, strict=True))
        return forward, backward

    @cached_property
    def fragments(self) -> FragmentRows:
        """Those of `sequences`, side by side, with the maps that both passes need."""
        return replace(self.sequences.packed, mapped=tuple(tables.chosen for tables in self.passes))

    @cached_property
    def ends(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Int64 tables: own fragments that begin a document, and these documents; those that end one, likewise."""
        own, everywhere = self.sequences.fragments, document_fragments(self.problem)
        last = {int(document): int(place) for document, place, *_ in everywhere.rows()}
        begins = [(i, d) for i, (d, place, *_) in enumerate(own.rows()) if place == 0]
        ends = [(i, d) for i, (d, place, *_) in enumerate(own.rows()) if place == last.get(d)]
        columns = [[pair[n] for pair in pairs] for pairs in (begins, ends) for n in (0, 1)]
        a, b, c, d = (torch.tensor(column, dtype=torch.int64, device=self.device) for column in columns)
        return a, b, c, d

    @cached_property
    def forward_maps(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The fragments that both passes choose, by their numbers in the backward and in the forward pass, int64; None
        where both choose the same. The last fragment of a document may have no forward map, as it acts on nothing.
        """
        forward, backward = (tables.chosen for tables in self.passes)
        if forward == backward:
            return None
        place = {fragment: i for i, fragment in enumerate(forward)}
        both = [(i, place[fragment]) for i, fragment in enumerate(backward) if fragment in place]
        there, here = torch.tensor(both, dtype=torch.int64, device=self.device).view(-1, 2).unbind(1)
        return there, here

    @cached_property
    def empty(self) -> torch.Tensor:
        """The documents without tokens, int64."""
        found = [i for i, length in enumerate(self.problem.lengths.len_q) if not length]
        return torch.tensor(found, dtype=torch.int64, device=self.device)

    def halo(self, kernel_size: int) -> HaloTables:
        """The tables of convolutions with this kernel size."""
        if kernel_size not in self.halos:
            own = self.rows.fragments
            self.halos[kernel_size] = halo_tables(self.problem, self.rank, own, kernel_size, self.device)
        return self.halos[kernel_size]


def linear_tables(plan: Plan) -> LinearTables:
    """A plan's tables of linear layers, for its batch."""
    return plan.batch.tables_of(LinearTables)
