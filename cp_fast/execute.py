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
from cp_fast.program import OWN
from cp_fast.running import Held, Inputs, Run

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
    program, problem = given.program, given.problem
    run = Run(given, program.forward, q, k, v, sink)
    max_logit: torch.Tensor | None = None
    has_max_logit, options = True, LaunchOptions(problem.scale, problem.softcap)
    for number, step in enumerate(program.forward):
        pending = run.post(f"forward, step {number} of {len(program.forward)}", step)
        for launch in step.launches:
            run.settle(launch.results)
            (q_rows,), _ = run.take(launch.q)
            (k_rows, v_rows), _ = run.take(launch.kv)
            part = given.backend.forward(q_rows, k_rows, v_rows, launch.segments, options)
            run.contribute(launch.results, [part.out], part.lse)
            if part.max_logit is None:
                has_max_logit = False
            else:
                max_logit = _no_logit(run, q) if max_logit is None else max_logit
                here = max_logit[launch.first_head : launch.first_head + len(part.max_logit)]
                torch.maximum(here, part.max_logit, out=here)
        run.complete_step(step, pending)
    (out,), lse = run.home("out", q.shape[0])
    assert lse is not None
    kept = [x for name in program.saved if name not in OWN.values() for x in run.held[name].tensors]
    kept += [x for sums in program.saved_sums for x in run.sent[sums].tensors]
    if has_max_logit and max_logit is None:  # nothing was launched
        max_logit = _no_logit(run, q)
    return Forward(out, lse, max_logit if has_max_logit else None, kept)


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
    program, problem = given.program, given.problem
    run = Run(given, program.backward, *(inputs or (None, None, None)), None, sizes=sizes, like=out)
    run.hold_own("do", [dout], [] if dlse is None else [dlse])
    run.hold_own("res", [out], [lse])
    rest = iter(kept)
    for name in program.saved:
        if name not in OWN.values():
            count = 2 if program.buffers[name].kind == "kv" else 1
            run.held[name] = Held([next(rest) for _ in range(count)], [])
    for name in program.saved_sums.values():
        run.held[name] = Held([next(rest)], [next(rest)])
    run.has_dlse = dlse is not None
    options = LaunchOptions(problem.scale, problem.softcap, deterministic)
    dq, last = None, len(program.backward) - 1
    for number, step in enumerate(program.backward):
        pending = run.post(f"backward, step {number} of {len(program.backward)}", step)
        for launch in step.launches:
            assert launch.do is not None
            assert launch.res is not None
            run.settle(launch.results)
            (q_rows,), _ = run.take(launch.q)
            (k_rows, v_rows), _ = run.take(launch.kv)
            (dout_rows,), dlse_rows = run.take(launch.do)
            (out_rows,), (lse_rows,) = run.take(launch.res)
            operands = BackwardOperands(
                dout_rows, q_rows, k_rows, v_rows, out_rows, lse_rows, dlse_rows[0] if dlse_rows else None
            )
            part = given.backend.backward(operands, launch.segments, options)
            run.contribute(launch.results, [part.dq])
            run.contribute(launch.results_kv, [part.dk, part.dv])
            del part, operands, q_rows, k_rows, v_rows, dout_rows, out_rows  # gone before the next launch
        if number == last and not any(recv.kind == "dq" for recv in step.result_recvs):
            (dq,), _ = run.home("dq", sizes[0])  # while the last gradients of keys travel home
        run.complete_step(step, pending, last=number == last)
    if dq is None:
        (dq,), _ = run.home("dq", sizes[0])
    (dk, dv), _ = run.home("dkv", sizes[1])
    return dq, dk, dv
