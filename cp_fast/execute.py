"""Running a lowered program, whichever schedule it was: messages travel while kernels run.

At the start of a step everything is posted: operands that others need, results that are handed over. Kernels are
launched after that, so they hide the messages. What they yield waits in the input's dtype: a partial output until the
next step's messages are posted (its merge then hides them too), gradients of keys until this step's messages are in.
It is then added in float32 (float64 for float64).

What stands beside the schedule: the sink is merged in when all tiles are, max_logit is the largest over the launches,
and both are summed up over the ranks by `passes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cp_fast.backends import BackwardOperands, LaunchOptions
from cp_fast.backends.base import backward_letting_go
from cp_fast.bound import Ready
from cp_fast.program import OWN
from cp_fast.running import Inputs, Run

__all__ = ["Forward", "run_backward", "run_forward"]


class Forward(NamedTuple):
    """A rank's results, sinks included; packed rows."""

    out: torch.Tensor  # [t, h_q, d_v], in q's dtype, 0 where nothing was seen
    lse: torch.Tensor  # [h_q, t], -inf where nothing was seen
    max_logit: torch.Tensor | None  # [h_q], over this rank's launches; None if the kernel library has none
    kept: list[torch.Tensor]  # what the backward pass needs of buffers that are not the rank's own


def run_forward(given: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None) -> Forward:
    """q [t_q, h_q, d_qk], k [t_kv, h_kv, d_qk], v [t_kv, h_kv, d_v]: this rank's packed slices, contiguous, a tail
    allowed; sink [h_q]: each head's sink logit.
    """
    program = given.program
    run = Run(given, q, (q.shape[0], k.shape[0]), backward=False, sink=sink)
    run.hold(OWN["q"], (q,))
    run.hold(OWN["kv"], (k, v))
    max_logit: torch.Tensor | None = None
    has_max_logit, options = True, LaunchOptions(given.problem.scale, given.problem.softcap)
    for step in run.ready.steps:
        pending = run.post(step)
        for launch in step.launches:
            part = _forward(given, run, launch, options)
            if part is None:
                has_max_logit = False
            else:
                max_logit = _no_logit(run, q) if max_logit is None else max_logit
                here = max_logit[launch.first_head : launch.first_head + len(part)]
                torch.maximum(here, part, out=here)
        run.complete_step(step, pending)
    (out,), lse = run.results.home("out", q.shape[0])
    assert lse is not None
    kept = [x for name in program.saved if name not in OWN.values() for x in run.kept(name)]
    kept += [x for sums in program.saved_sums for x in run.results.sent(sums)]
    if has_max_logit and max_logit is None:  # nothing was launched
        max_logit = _no_logit(run, q)
    return Forward(out, lse, max_logit if has_max_logit else None, kept)


def _forward(given: Inputs, run: Run, launch: Ready, options: LaunchOptions) -> torch.Tensor | None:
    """One launch; its max_logit, where the library has one."""
    run.results.settle(launch.settled)
    (q_rows,), _ = run.take(launch.operands[0])
    (k_rows, v_rows), _ = run.take(launch.operands[1])
    part = given.backend.forward(q_rows, k_rows, v_rows, launch.segments, options)
    run.results.contribute(launch.results, (part.out,), part.lse)
    return part.max_logit


def _no_logit(run: Run, q: torch.Tensor) -> torch.Tensor:
    return torch.full((q.shape[1],), float("-inf"), dtype=run.wide, device=q.device)


def run_backward(
    given: Inputs,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    sizes: tuple[int, int],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    kept: Sequence[torch.Tensor],
    *,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv in the input's dtype, 0 in padding and tail.

    inputs: q, k, v as in `run_forward`; None where the program does not need them. sizes: rows of q and of k. dout, out
    [t_q, h_q, d_v], dlse, lse [h_q, t_q]: final, all own rows; dlse None for zero on every rank. kept: see `Forward`.
    """
    program = given.program
    run = Run(given, out, sizes, backward=True, has_dlse=dlse is not None)
    if inputs is not None:
        run.hold(OWN["q"], inputs[:1])
        run.hold(OWN["kv"], inputs[1:])
    run.hold(OWN["do"], (dout,), () if dlse is None else (dlse,))
    run.hold(OWN["res"], (out,), (lse,))
    rest = iter(kept)
    for name in program.saved:
        if name not in OWN.values():
            run.hold(name, [next(rest) for _ in range(2 if program.buffers[name].kind == "kv" else 1)])
    for name in program.saved_sums.values():
        run.hold(name, [next(rest)], [next(rest)])
    options = LaunchOptions(given.problem.scale, given.problem.softcap, deterministic)
    for step in run.ready.steps:
        pending = run.post(step)
        for launch in step.launches:
            _backward(given, run, launch, options)
        run.complete_step(step, pending)
    (dq,), _ = run.results.home("dq", sizes[0])
    (dk, dv), _ = run.results.home("dkv", sizes[1])
    return dq, dk, dv


def _backward(given: Inputs, run: Run, launch: Ready, options: LaunchOptions) -> None:
    """One launch. What it yielded is let go when it returns, before the next one asks for memory; what it read as soon
    as the library lets it go, for it alone has it.
    """
    results = run.results
    results.settle(launch.settled)
    part = backward_letting_go(given.backend, [_operands(run, launch)], launch.segments, options)
    results.contribute(launch.results, (part.dq,))
    results.contribute(launch.results_kv, (part.dk, part.dv))


def _operands(run: Run, launch: Ready) -> BackwardOperands:
    q, kv, do, res = launch.operands
    (q_rows,), _ = run.take(q)
    (k_rows, v_rows), _ = run.take(kv)
    (dout_rows,), dlse_rows = run.take(do)
    (out_rows,), (lse_rows,) = run.take(res)
    for slot in launch.last_use:
        run.held[slot] = None
    return BackwardOperands(dout_rows, q_rows, k_rows, v_rows, out_rows, lse_rows, dlse_rows[0] if dlse_rows else None)
