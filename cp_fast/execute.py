"""Running a compiled program: the next block travels while this one is computed; two K/V buffers, whatever the
ring's size.

At the start of a step everything is posted: the block in hand goes on, the next one comes in, and in the backward pass
the gradients of the block before leave and those of the block in hand arrive. Kernels are launched after that, so they
hide the messages. What they yield waits in the input's dtype: a partial output until the next step's messages are
posted (its merge then hides them too), gradients until this step's are in. It is then added in float32 (float64 for
float64).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cp_fast.backends import Backend
from cp_fast.kernels.base import Kernels
from cp_fast.merge import Merged, Summed
from cp_fast.overlap import head_start
from cp_fast.program import Give, KVStep, RankProgram, Take
from cp_fast.rows import Rows
from cp_ref.common.processes import during
from cp_ref.spec import Group, Parcel, Problem

__all__ = ["Results", "run_backward", "run_forward", "wide_dtype"]


class Results(NamedTuple):
    """A rank's merged results, without the sink; packed rows."""

    out: torch.Tensor  # [t, h_q, d_v], 0 where nothing was seen; in q's dtype where one launch or two did it all
    lse: torch.Tensor  # [h_q, t], -inf where nothing was seen
    max_logit: torch.Tensor | None  # [h_q], over this rank's launches; None if the kernel library has none


class Pair(NamedTuple):
    """K and V of a block, or their gradients: what travels together."""

    k: torch.Tensor  # [m, h_kv, d_qk]
    v: torch.Tensor  # [m, h_kv, d_v]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What results are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def run_forward(
    problem: Problem,
    program: RankProgram,
    backend: Backend,
    comm: Group,
    kernels: Kernels,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> Results:
    """q [t_q, h_q, d_qk], k [t_kv, h_kv, d_qk], v [t_kv, h_kv, d_v]: this rank's packed slices, contiguous, a tail
    allowed.
    """
    wide = wide_dtype(q.dtype)
    final = q.dtype if problem.softmax_type == "vanilla" else None  # a sink still scales them
    merged = Merged((q.shape[0], q.shape[1], v.shape[2]), wide, final, q.device, kernels, program.spare_rows)
    max_logit = torch.full((q.shape[1],), float("-inf"), dtype=wide, device=q.device)
    blocks, operands = _Blocks(Pair(k, v), kernels), _Operands([q], [], kernels)
    for number, step in enumerate(program.forward):
        where = f"forward, step {number} of {len(program.forward)}"
        sends, boxes = blocks.give(step), blocks.boxes(step)
        with during(where):
            pending = comm.exchange(sends, boxes)
        if (sends or boxes) and step.launches:
            head_start(q.device)
        for launch in step.launches:
            merged.settle()
            (q_rows,) = operands.rows(launch.q_rows)
            k_rows, v_rows = kernels.take_rows(blocks.now, launch.kv_rows)
            part = backend.forward(
                q_rows,
                k_rows,
                v_rows,
                launch.segments,
                scale=problem.scale,
                softcap=problem.softcap,
            )
            merged.add(part.out, part.lse, launch.out_rows)
            max_logit = (
                None if max_logit is None or part.max_logit is None else torch.maximum(max_logit, part.max_logit)
            )
        with during(where):
            pending.wait()
        blocks.advance()
    return Results(*merged.results(), max_logit)


def run_backward(
    problem: Problem,
    program: RankProgram,
    backend: Backend,
    comm: Group,
    kernels: Kernels,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    *,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv in float32 (float64), 0 in padding and tail; dq in q's dtype where one launch or two did it all. out,
    lse, dout, dlse are as `Backend.backward` takes them, all rows.
    """
    wide = wide_dtype(q.dtype)
    dq = Summed(q.shape, wide, q.dtype, q.device, kernels, program.spare_rows)
    own = Pair(*(x.new_zeros(x.shape[0] + program.spare_rows, *x.shape[1:], dtype=wide) for x in (k, v)))
    blocks, grads = _Blocks(Pair(k, v), kernels), own
    operands = _Operands([q, dout, out], [lse] if dlse is None else [lse, dlse], kernels)
    for number, step in enumerate(program.backward):
        where = f"backward, step {number} of {len(program.backward)}"
        boxes = [Pair(*(x.new_empty(t.size, *x.shape[1:]) for x in own)) for t in step.take_dkv]
        sends = blocks.give(step) + [parcel for give in step.give_dkv for parcel in _give(give, grads, kernels)]
        arriving = [parcel for t, box in zip(step.take_dkv, boxes, strict=True) for parcel in _parcels(t, box)]
        with during(where):
            pending = comm.exchange(sends, blocks.boxes(step) + arriving)
        parts: list[tuple[Rows, torch.Tensor, torch.Tensor]] = []
        for launch in step.launches:
            dq.settle()
            q_rows, dout_rows, out_rows, lse_rows, *dlse_rows = operands.rows(launch.q_rows)
            k_rows, v_rows = kernels.take_rows(blocks.now, launch.kv_rows)
            part = backend.backward(
                dout_rows,
                q_rows,
                k_rows,
                v_rows,
                out_rows,
                lse_rows,
                dlse_rows[0] if dlse_rows else None,
                launch.segments,
                scale=problem.scale,
                softcap=problem.softcap,
                deterministic=deterministic,
            )
            dq.add(part.dq, launch.out_rows)
            parts.append((launch.grad_rows, part.dk, part.dv))
        with during(where):
            pending.wait()
        grads = _collect(step, boxes, parts, own, kernels)
        blocks.advance()
    return dq.result(), own.k[: k.shape[0]], own.v[: v.shape[0]]


class _Operands:
    """The query side's operands, by rows. A ring asks for the same rows step after step: the last ones are kept."""

    def __init__(self, by_row: list[torch.Tensor], by_column: list[torch.Tensor], kernels: Kernels) -> None:
        self._by_row, self._by_column, self._kernels = by_row, by_column, kernels
        self._last: tuple[Rows, list[torch.Tensor]] | None = None

    def rows(self, rows: Rows) -> list[torch.Tensor]:
        """These rows of each, contiguous; of LSEs [h, t] the columns."""
        if self._last is None or self._last[0] is not rows:
            taken = self._kernels.take_rows(self._by_row, rows)
            self._last = rows, taken + [_take_columns(x, rows) for x in self._by_column]
        return self._last[1]


class _Blocks:
    """The block in hand and the one on its way, in two buffers that take turns; made when they are first needed."""

    def __init__(self, own: Pair, kernels: Kernels) -> None:
        self.own = self.now = own
        self._kernels = kernels
        self._coming: Pair | None = None
        self._held: Pair | None = None  # the buffer that `now` lies in
        self._spare: Pair | None = None  # the buffer for what comes next

    def give(self, step: KVStep) -> list[Parcel]:
        """What the step sends of the block in hand, or of the own one."""
        blocks = [(give, self.own if give.own else self.now) for give in step.give_kv]
        return [parcel for give, block in blocks for parcel in _give(give, block, self._kernels)]

    def boxes(self, step: KVStep) -> list[Parcel]:
        """Room for the next block, in the buffer of the block before this one, which has been waited for."""
        size = step.block_size
        if size == 0:
            return []
        if self._spare is None or self._spare.k.shape[0] < size:
            self._spare = Pair(*(x.new_empty(size, *x.shape[1:]) for x in self.own))
        self._coming = Pair(*(x[:size] for x in self._spare))
        return [parcel for t in step.take_kv for parcel in _parcels(t, Pair(*(x[t.rows] for x in self._coming)))]

    def advance(self) -> None:
        """The next block is the block in hand now, and the buffer of the old one is free."""
        if self._coming is not None:
            self.now, self._coming = self._coming, None
            self._held, self._spare = self._spare, self._held


def _collect(
    step: KVStep,
    boxes: list[Pair],
    parts: list[tuple[Rows, torch.Tensor, torch.Tensor]],
    own: Pair,
    kernels: Kernels,
) -> Pair:
    """The grads of the block in hand: what arrived for it and what this step's launches yielded."""
    here: list[tuple[Take, Pair]] = []
    for incoming, box in zip(step.take_dkv, boxes, strict=True):
        if incoming.home:
            kernels.add_rows_(own, box, incoming.rows)
        else:
            here.append((incoming, box))
    if step.own:
        grads = own
    elif len(here) == 1 and here[0][0].size == step.grad_size:
        grads = here[0][1]  # the usual ring: the same rows all the way, so the launches add to what arrived
    else:
        grads = Pair(*(x.new_zeros(step.grad_size, *x.shape[1:]) for x in own))
        for incoming, box in here:
            kernels.add_rows_(grads, box, incoming.rows)
    for rows, dk, dv in parts:
        kernels.add_rows_(grads, [dk, dv], rows)
    return grads


def _give(give: Give, pair: Pair, kernels: Kernels) -> list[Parcel]:
    """K and V are two parcels of one exchange: no copy into a common buffer."""
    return [Parcel(give.peer, 2 * give.tag + n, x) for n, x in enumerate(kernels.take_rows(pair, give.rows))]


def _parcels(incoming: Take, boxes: Pair) -> list[Parcel]:
    return [Parcel(incoming.peer, 2 * incoming.tag + n, x) for n, x in enumerate(boxes)]


def _take_columns(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Rows of an LSE [h, t], which has them on its second axis; contiguous."""
    return (x[:, rows] if isinstance(rows, slice) else x.index_select(1, rows)).contiguous()
