"""The one module that imports `cp_ref`: its oracle and its simulated group. All others import at most
`cp_ref.schedules`, `cp_ref.problems` and `cp_ref.show`, which know no tensor.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from conformance.case import Case
from conformance.implementation import Implementation, Missing, context
from conformance.record import readable
from conformance.scores import score_arguments
from conformance.tensors import GlobalTensors, attention_arguments
from cp_ref import SimGroup, dense_attention, masks
from cp_ref.calls.score_mod import digest_of
from cp_ref.reference.linear.recurrence import dense_causal_conv1d, dense_linear_attention
from cp_ref.reference.simulator import RankScheduler
from cp_ref.reference.sparse_oracle import (
    chosen_keys,
    dense_compress_keys,
    dense_compressed_attention,
    dense_index_loss,
    dense_index_scores,
    dense_select_keys,
    dense_sparse_attention,
    documents_of,
)
from cp_ref.schedules.problem import Problem

__all__ = [
    "Hang",
    "Outcome",
    "RankRunner",
    "UnsupportedCase",
    "Watch",
    "chosen_keys",
    "context_of",
    "dense_causal_conv1d",
    "dense_compress_keys",
    "dense_compressed_attention",
    "dense_index_loss",
    "dense_index_scores",
    "dense_linear_attention",
    "dense_select_keys",
    "dense_sparse_attention",
    "describe_error",
    "digest_of",
    "documents_of",
    "exact_results",
    "is_out_of_memory",
    "masks",
    "results_of",
    "run_ranks",
    "running_ranks_by",
    "values_of_ranks",
    "watching",
]


class Hang(RuntimeError):
    """The ranks did not finish within the time limit. Their threads are left behind."""


class Outcome(NamedTuple):
    """The outcome of one rank's function: a value, or the error that it raised."""

    value: Any
    error: BaseException | None


RankRunner = Callable[[int, Callable[[Any], Any], float], list[Outcome]]


@dataclass
class Watch:
    """Events that `run_ranks` saw while a problem ran, in addition to the outcomes that it returned."""

    limit_s: float = float("inf")
    hung: list[str] = field(default_factory=list)
    out_of_memory: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


_watch = Watch()


@contextmanager
def watching(limit_s: float = float("inf")) -> Iterator[Watch]:
    """Inside, no `run_ranks` takes longer than `limit_s`, or the limit around it. `Watch` has what it sees."""
    global _watch
    before, _watch = _watch, Watch(min(limit_s, _watch.limit_s))
    try:
        yield _watch
    finally:
        _watch = before


def describe_error(error: BaseException) -> str:
    """An exception's type and message, and where it was raised: file name and line."""
    trace, described = error.__traceback__, getattr(error, "described", None)
    if described is not None:  # it was raised in another process, which said so
        return described
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" (at {trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {readable(str(error))}{place}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the host or on a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def run_ranks(cp_size: int, fn: Callable[[Any], Any], limit_s: float = 60.0) -> list[Outcome]:
    """`fn(member)` on every rank of a group: a simulated one, each rank in its thread, or as `running_ranks_by` says.

    Returns:
        One outcome per rank; a rank's exception is an outcome. A finding of the group itself (an unmatched message) is
        every rank's.

    Raises:
        Hang: after `limit_s` seconds, or the limit of `watching`.
        Missing: this kind of group cannot do it.
    """
    try:
        outcomes = _runner(cp_size, fn, min(limit_s, _watch.limit_s))
    except Hang as hang:
        _watch.hung.append(str(hang))
        raise
    except Missing as missing:
        _watch.missing.append(str(missing))
        raise
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome.error, Missing):
            _watch.missing.append(str(outcome.error))
        if outcome.error is not None and is_out_of_memory(outcome.error):
            _watch.out_of_memory.append(f"rank {rank} ran out of memory: {describe_error(outcome.error)}")
    return outcomes


def _run_simulated(cp_size: int, fn: Callable[[Any], Any], limit_s: float) -> list[Outcome]:
    outcomes: list[Outcome | None] = [None] * cp_size
    threads: list[int | None] = [None] * cp_size

    def guarded(member: Any) -> None:
        threads[member.rank] = threading.get_ident()
        try:
            outcomes[member.rank] = Outcome(fn(member), None)
        except BaseException as error:  # SystemExit too; the caller judges it
            outcomes[member.rank] = Outcome(None, error)

    def play() -> None:
        try:
            SimGroup(cp_size).run(guarded)
        except Exception as error:  # what is left on the wire after a rank's own failure says nothing new
            if not any(o and o.error for o in outcomes):
                outcomes[:] = [Outcome(None, error)] * cp_size

    watched = threading.Thread(target=play, daemon=True)
    watched.start()
    watched.join(min(limit_s, threading.TIMEOUT_MAX))
    if watched.is_alive():
        unfinished = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        raise Hang(f"the ranks did not finish within {limit_s:g} s: {_where_they_are(unfinished, threads)}")
    return [o or Outcome(None, RuntimeError("the rank did not run")) for o in outcomes]


_runner: RankRunner = _run_simulated


def running_ranks_by(runner: RankRunner) -> None:
    """From now on `run_ranks` uses another kind of group; for a process that is one rank of many."""
    global _runner
    _runner = runner


def _where_they_are(ranks: list[int], threads: list[int | None]) -> str:
    """The line that each rank is at; ranks that wait for their turn are only named."""
    frames, running, waiting = sys._current_frames(), [], []
    for rank in ranks:
        frame = frames.get(threads[rank] or 0)
        if frame is None or frame.f_code is RankScheduler.wait_to_run.__code__:
            waiting.append(str(rank))
        else:
            running.append(f"rank {rank} is at {frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}")
    return ", ".join(running + ([f"ranks {' '.join(waiting)} wait"] if waiting else [])) or "all ranks returned"


def exact_results(case: Case, tensors: GlobalTensors) -> dict[str, torch.Tensor]:
    """The oracle's results, float64."""
    device = str(tensors.q.device)
    arguments = attention_arguments(case.problem, device) | score_arguments(case, device)
    return results_of(partial(dense_attention, **arguments), case, tensors, torch.float64)


def results_of(
    attention: Callable[..., tuple[torch.Tensor, ...]], case: Case, tensors: GlobalTensors, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """out, lse, max_logit, dq, dk, dv, and d_offset where there is an offset.

    Gradients are those of sum(out * dout) + sum(lse * dlse), or of the term that `case.loss` names.

    Args:
        attention: (q, k, v, softmax_offset=...) -> out, lse and max_logit, all sequences at once. It gets zeros where
            the tensors have NaN or infinity.
        dtype: that it gets them in; None for their own.
    """
    given = {"dq": tensors.q, "dk": tensors.k, "dv": tensors.v, "d_offset": tensors.softmax_offset}
    leaves = {name: _clean(x).to(dtype or x.dtype).requires_grad_() for name, x in given.items() if x is not None}
    with torch.enable_grad():
        out, lse, max_logit = attention(leaves["dq"], leaves["dk"], leaves["dv"], softmax_offset=leaves.get("d_offset"))
    upstream = {"out": (out, tensors.dout), "lse": (lse, tensors.dlse)}
    losses = [upstream[name] for name in case.loss.split("+") if upstream[name][0].requires_grad]
    grads = [torch.zeros_like(leaf) for leaf in leaves.values()]
    if losses:
        outs, gradients = [x for x, _ in losses], [_clean(grad).to(x.dtype) for x, grad in losses]
        grads = torch.autograd.grad(outs, list(leaves.values()), gradients, materialize_grads=True)
    results = {"out": out.detach(), "lse": lse.detach(), "max_logit": max_logit.detach()}
    return results | dict(zip(leaves, grads, strict=True))


def _clean(x: torch.Tensor) -> torch.Tensor:
    return x.detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


# ---- values of all ranks
#
# A function of every rank: the values of all ranks, or findings, or a refusal.


class UnsupportedCase(Exception):
    """The implementation says, by `supports` and by raising `Unsupported` on every rank, that it does not have this."""


def values_of_ranks(
    cp_size: int, fn: Callable[[Any], Any], *refusals: type[BaseException], limit_s: float = 60.0
) -> tuple[list[Any], list[str]]:
    """`fn(member)` on every rank of a group.

    Returns:
        A value per rank, and no findings. Or no values, and findings: the ranks hang, or some of them raise.

    Raises:
        UnsupportedCase: every rank raised UnsupportedCase, or every rank raised one of `refusals`.
    """
    try:
        outcomes = run_ranks(cp_size, fn, limit_s)
    except Hang as hang:
        return [], [str(hang)]
    errors = [outcome.error for outcome in outcomes]
    if any(all(isinstance(error, kind) for error in errors) for kind in (UnsupportedCase, *refusals)):
        raise UnsupportedCase(str(errors[0]))
    found = [f"rank {rank} raised {describe_error(error)}" for rank, error in enumerate(errors) if error is not None]
    return ([] if found else [outcome.value for outcome in outcomes]), found


def context_of(impl: Implementation, problem: Problem, member: Any) -> Any:
    """One rank's ContextParallel for the problem. Raises UnsupportedCase if it is refused."""
    try:
        return context(impl, problem, member)
    except impl.Unsupported as refusal:
        raise UnsupportedCase(str(refusal)) from refusal
