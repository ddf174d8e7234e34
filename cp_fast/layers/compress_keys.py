"""`compress_keys`: each window of tokens becomes one key, on the rank that has its last token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from cp_fast.api.plan import Plan
from cp_fast.compile.exchange_program import ExchangedRows, RowMessages
from cp_fast.layers.layer_operators import called
from cp_fast.layers.layers import Layer, LayerTables, Outputs, Run
from cp_fast.layers.sparse_tables import together
from cp_fast.runtime.slices import OwnRows
from cp_ref.batches.tensors import wide_dtype
from cp_ref.calls import compressed_calls
from cp_ref.calls.layer import public_function
from cp_ref.schedules.compressed import entry_problem, window_workload
from cp_ref.schedules.planners.all_gather import plan_all_gather_rank
from cp_ref.schedules.planners.visibility import Visibility
from cp_ref.schedules.schedule import Step
from cp_ref.schedules.table import Spans, ranges

__all__ = ["LAYER", "CompressionLayer", "WindowTables", "Windows", "compress_keys", "entries_alone"]

# ---- tables


class Windows(NamedTuple):
    """The windows of a rank's n entries, as rows of the gathered tokens.

    Attributes:
        name: of the exchange that gathers the tokens.
        messages: of this exchange.
        rows: int64 [n, rate].
        before: those of the windows before, int64 [n, rate]; of a first window its own.
        first: whether it is the first window of its document, bool [n].
    """

    name: str
    messages: RowMessages
    rows: torch.Tensor
    before: torch.Tensor
    first: torch.Tensor


@dataclass(frozen=True, eq=False)
class WindowTables(LayerTables):
    """A rank's tables for compressed keys of one batch.

    Attributes:
        made: its windows, by the names of their exchanges.
    """

    made: dict[str, Windows] = field(default_factory=dict[str, Windows], repr=False)

    @cached_property
    @torch.inference_mode(False)
    def own(self) -> OwnRows:
        """The rank's tokens."""
        return OwnRows.of(self.problem, self.problem.workload.ownership.q.of(self.rank), self.device)

    def messages(self, name: str) -> RowMessages:
        """See `LayerTables`."""
        return self.made[name].messages

    def windows(self, rate: int, *, overlap: bool) -> Windows:
        """The windows of the rank's entries, made once."""
        name = f"{'pairs of ' * overlap}windows of {rate}"
        found = self.made.get(name)
        return found or self.made.setdefault(name, self._windows(name, rate, overlap))

    @torch.inference_mode(False)
    def _windows(self, name: str, rate: int, overlap: bool) -> Windows:
        work = window_workload(self.problem, rate, overlap=overlap)
        forward, backward = plan_all_gather_rank(Visibility(work), self.rank)
        there, back = (Step(step.sends, step.recvs) for step in (forward[0], backward[-1]))
        own = work.ownership.kv.of(self.rank).spans
        arriving = [Spans(message.pieces.start, message.pieces.stop) for message in there.recvs]
        rows = ExchangedRows(own, together([own, *arriving]))
        held = ranges(rows.gathered.start, rows.gathered.size)
        entries = entry_problem(self.problem, rate).entries
        mine = entries.take(entries.rank == self.rank)
        first = mine.number == 0
        before = np.where(first, mine.start, mine.start - rate)
        slots = (
            np.searchsorted(held, x)[:, None] + np.arange(rate) for x in (mine.start, before if overlap else mine.start)
        )
        tables = (torch.from_numpy(x).to(self.device) for x in (*slots, first))
        return Windows(name, RowMessages({"kv": rows}, (there,), {"dkv": rows}, (back,)), *tables)


def window_tables(plan: Plan) -> WindowTables:
    """A plan's tables of windows, for its batch."""
    return plan.batch.tables_of(WindowTables)


# ---- the layer


class _Slots(NamedTuple):
    """What entries are made of, wide [n, slots, d]: values, and the weights of the softmax."""

    x: torch.Tensor
    weights: torch.Tensor


def _slots(windows: Windows, values: torch.Tensor, gates: torch.Tensor, bias: Any, *, overlap: bool) -> _Slots:
    """values, gates: gathered rows [m, c]. Sums have the order of the slots, whatever n is."""
    wide = wide_dtype(values.dtype)
    x, z = values[windows.rows].to(wide), gates[windows.rows].to(wide)
    z = z if bias is None else z + bias.to(wide)
    if overlap:
        half, hidden = x.shape[-1] // 2, windows.first[:, None, None]
        x_before, z_before = values[windows.before, :half].to(wide), gates[windows.before, :half].to(wide)
        z_before = z_before if bias is None else z_before + bias[:, :half].to(wide)
        x = torch.cat([x_before.masked_fill(hidden, 0.0), x[..., half:]], 1)
        z = torch.cat([z_before.masked_fill(hidden, float("-inf")), z[..., half:]], 1)
    weights = torch.exp(z - z.amax(1, keepdim=True))
    return _Slots(x, weights / _added(weights)[:, None])


def entries_alone(
    values: torch.Tensor, gates: torch.Tensor, bias: torch.Tensor | None, rate: int, *, overlap: bool
) -> torch.Tensor:
    """The entries [n, d] of one document in one process, of rows [s, c].

    >>> entries_alone(torch.tensor([[1.0], [3.0], [9.0]]), torch.zeros(3, 1), None, 2, overlap=False).tolist()
    [[2.0]]
    """
    start = torch.arange(len(values) // rate, device=values.device)[:, None] * rate
    rows = start + torch.arange(rate, device=values.device)
    first = start[:, 0] == 0
    windows = Windows("", RowMessages({}, ()), rows, torch.where(first[:, None], rows, rows - rate), first)
    of = _slots(windows, values, gates, bias, overlap=overlap)
    return _added(of.weights * of.x).to(values.dtype)


def _added(x: torch.Tensor) -> torch.Tensor:
    """The sum over slots [n, slots, d], one after the other: `sum` may add in an order that depends on n."""
    total = x[:, 0].clone()
    for slot in range(1, x.shape[1]):
        total += x[:, slot]
    return total


class CompressionLayer(Layer):
    """Keys that are made of windows: the rows before each cut arrive, and the gradients of these go back."""

    declared = compressed_calls.COMPRESSION
    tables = staticmethod(window_tables)
    as_operator = False  # how many entries a rank has is the plan's

    def forward(self, run: Run, *tensors: Any) -> Outputs:
        """The rank's entries."""
        (values, gates, bias), call = tensors, run.call
        windows = run.tables.windows(call.rate, overlap=call.overlap)
        x, z = run.gather(windows.name, run.tables.own.take(values), run.tables.own.take(gates))
        of = _slots(windows, x, z, bias, overlap=call.overlap)
        return (_added(of.weights * of.x).to(values.dtype),), ()

    def backward(self, run: Run, tensors: Any, results: Any, hidden: Any, grads: Any) -> Any:
        """Gradients of values, gates and bias; that of bias is this rank's share."""
        (values, gates, bias), (dentries,), call, own = tensors, grads, run.call, run.tables.own
        windows = run.tables.windows(call.rate, overlap=call.overlap)
        of_values, of_gates = run.gather(windows.name, own.take(values), own.take(gates))
        x, weights = _slots(windows, of_values, of_gates, bias, overlap=call.overlap)
        de = dentries.to(x.dtype)[:, None]
        of_x = weights * de
        of_z = weights * (x - _added(weights * x)[:, None]) * de
        found = [self._of_rows(windows, g, of_values.shape, overlap=call.overlap) for g in (of_x, of_z)]
        dvalues, dgates = run.give_back(windows.name, *found)
        dbias = None
        if bias is not None:
            share = of_z.sum(0)
            share = torch.cat(share.chunk(2), -1) if call.overlap else share
            dbias = share.to(bias.dtype)
        return own.put(dvalues.to(values.dtype), values), own.put(dgates.to(gates.dtype), gates), dbias

    def _of_rows(self, windows: Windows, grads: torch.Tensor, shape: Sequence[int], *, overlap: bool) -> torch.Tensor:
        """Gradients of slots [n, slots, d] as those of the gathered rows [m, c]. A row is in one window, and with
        overlap its first half in the next one.
        """
        found = grads.new_zeros(*shape)
        if not overlap:
            found[windows.rows] = grads
            return found
        of_before, of_window = grads.chunk(2, 1)
        half, later = shape[-1] // 2, ~windows.first
        found[:, half:].index_put_((windows.rows,), of_window)
        found[:, :half].index_put_((windows.before[later],), of_before[later])
        return found


LAYER = CompressionLayer()
compress_keys = public_function(compressed_calls.compress_keys, called, LAYER, __name__)
