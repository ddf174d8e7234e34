"""Compressed keys over ranks: each window of tokens becomes one key, on the rank that has its last token.

An entry reads the tokens of its windows as a query reads keys. So rows of other ranks arrive as in all_gather: see
`cp_ref.schedules.compressed.window_workload`. Their gradients go back on the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cp_ref.batches.tensors import to_format, to_packed, wide_dtype
from cp_ref.calls import compressed_calls
from cp_ref.calls.layer import public_function
from cp_ref.reference.executor.play_schedule import run_rank_schedule
from cp_ref.reference.executor.rank_tensors import RankTensors
from cp_ref.reference.layer_calls import Done, Passes, Run, called
from cp_ref.schedules.compressed import entry_problem, window_workload
from cp_ref.schedules.planners.all_gather import plan_all_gather_rank
from cp_ref.schedules.planners.visibility import Visibility
from cp_ref.schedules.schedule import RankSchedule

__all__ = ["compress_keys"]


class _Windows(NamedTuple):
    """The windows of a rank's entries.

    Attributes:
        held: all tokens that it has or that arrive, in rows of the global buffer.
        rows: of the tokens of each window [n, rate].
        first: whether it is the first window of its document [n].
        backward: the messages of gradients.
    """

    held: RankTensors
    rows: torch.Tensor
    first: torch.Tensor
    backward: RankSchedule


def _windows(run: Run, values: torch.Tensor, gates: torch.Tensor) -> _Windows:
    (plan, cp, call), problem = run, run.plan.problem
    work = window_workload(problem, call.rate, overlap=call.overlap)
    forward, backward = plan_all_gather_rank(Visibility(work), cp.rank)
    held = RankTensors(work, cp.rank, values.device)
    held.put_own("kv", *(to_packed(x, problem.qkv_format)[:, None] for x in (values, gates)))
    run_rank_schedule("forward", forward, held, cp.comm, lambda tile: None)
    entries = entry_problem(problem, call.rate).entries
    own = entries.take(entries.rank == plan.rank)
    start, number = (torch.as_tensor(x, device=values.device) for x in (own.start, own.number))
    rows = start[:, None] + torch.arange(call.rate, device=values.device)
    return _Windows(held, rows, number == 0, backward)


def entries_of_windows(
    values: torch.Tensor,
    gates: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    first: torch.Tensor,
    overlap: bool,
) -> torch.Tensor:
    """The entries [n, d] of windows, of values and gates [t, c], bias [rate, c] and rows [n, rate]. Slots are added one
    after the other, whatever n is.

    >>> values, gates = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.0]])
    >>> entries_of_windows(values, gates, None, torch.tensor([[0, 1]]), torch.tensor([True]), False).tolist()
    [[2.0]]
    """
    x, z = values[rows], gates[rows] if bias is None else gates[rows] + bias
    if overlap:
        hidden = first[:, None, None]
        rows = torch.where(first[:, None], rows, rows - rows.shape[1])  # the window before
        x_before, z_before = values[rows], gates[rows] if bias is None else gates[rows] + bias
        half = x.shape[-1] // 2
        x = torch.cat([x_before[..., :half].masked_fill(hidden, 0.0), x[..., half:]], dim=1)
        z = torch.cat([z_before[..., :half].masked_fill(hidden, float("-inf")), z[..., half:]], dim=1)
    weights = torch.exp(z - z.detach().amax(dim=1, keepdim=True))
    entry, total = weights[:, 0] * x[:, 0], weights[:, 0]
    for slot in range(1, x.shape[1]):
        entry, total = entry + weights[:, slot] * x[:, slot], total + weights[:, slot]
    return entry / total


def compress_forward(run: Run, values: torch.Tensor, gates: torch.Tensor, bias: torch.Tensor | None) -> Done:
    """The entries; kept are the windows."""
    windows, wide = _windows(run, values, gates), wide_dtype(values.dtype)
    x, z = (rows[:, 0].to(wide) for rows in windows.held.tensors["kv"])
    bias = None if bias is None else bias.to(wide)
    found = entries_of_windows(x, z, bias, windows.rows, windows.first, run.call.overlap)
    return Done((found.to(values.dtype),), kept=windows)


def compress_backward(
    run: Run, tensors: Sequence[Any], _: Any, windows: _Windows, dentries: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    """Gradients of values, gates and bias."""
    (values, gates, bias), problem, wide = tensors, run.plan.problem, wide_dtype(dentries.dtype)
    held = windows.held
    given = [x[:, 0] for x in held.tensors["kv"]] + ([] if bias is None else [bias])
    with torch.enable_grad():
        leaves = [x.to(wide).requires_grad_() for x in given]
        of_bias = None if bias is None else leaves[2]
        found = entries_of_windows(leaves[0], leaves[1], of_bias, windows.rows, windows.first, run.call.overlap)
    dx, dz, *dbias = torch.autograd.grad(found, leaves, dentries.to(wide))
    held.tensors["dkv"] = (dx[:, None], dz[:, None])
    run_rank_schedule("backward", windows.backward, held, run.cp.comm, lambda tile: None)
    fmt, batch_size = problem.qkv_format, len(problem.sequences)
    own = [torch.zeros_like(to_packed(x, fmt), dtype=wide)[:, None] for x in (values, gates)]
    held.copy_out("dkv", *own)
    results = (to_format(g[:, 0].to(x.dtype), fmt, batch_size) for g, x in zip(own, (values, gates), strict=True))
    return *results, None if bias is None else dbias[0].to(bias.dtype)


COMPRESSION = Passes(compressed_calls.COMPRESSION, compress_forward, compress_backward)
compress_keys = public_function(compressed_calls.compress_keys, called, COMPRESSION, __name__)
