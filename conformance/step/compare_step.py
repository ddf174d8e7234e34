"""`compare_step`: one optimizer step over ranks, and in one process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from conformance.checks.budgets import Row
from conformance.runner.processes import LONGEST_S
from conformance.step.bits import of_bits
from conformance.step.diagnosis import diagnose
from conformance.step.judge import judge, norm_of
from conformance.step.report import StepReport
from conformance.step.runs import Measured, Runs
from conformance.step.step_record import Job, StepError
from conformance.step.tokens import describe
from cp_ref.schedules.values import MOST_RANKS, check_choice
from cp_ref.schedules.words import CP_COMM_TYPES, LAYOUTS, canonical_layout

__all__ = ["check_step", "compare_step", "report_of"]

_CLEAR = 10.0  # times its bound is a gradient that is more than rounding errors


def compare_step(
    build: Callable[[Any], Any] | str,
    batch: Any,
    cp_size: int,
    *,
    dp_size: int = 1,
    cp_comm_type: str = "p2p",
    layout: str = "dual_chunk",
    loss: str = "mean",
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    timeout_s: float = 600.0,
    bits: bool = False,
    on_progress: Callable[[str, str, str], None] = lambda run, process, stage: None,
) -> StepReport:
    """Compare one optimizer step of a model over ranks with the same step in one process.

    Every rank is a process, and so is the one process. Each calls build once. Messages go over gloo for tensors on the
    CPU, over NCCL for those on GPUs. With fewer GPUs than ranks, ranks share a GPU, which is right and slow.

    Args:
        build: build(cp) -> (model, step) or (model, step, optimizer); or its name, "module:function". cp is None in
            the one process, else this rank's `cp_fast.ContextParallel`. torch.distributed is initialized; the one
            process has a world of its own. step(batch) is the user's code: it cuts the batch, computes the loss, runs
            the backward pass and reduces gradients. It returns the loss, or (loss, losses of this rank's tokens). With
            an optimizer the parameters after two steps are compared too; step may call it, or leave it to compare_step.
        batch: what step takes, the same on every rank; or a function without arguments that makes it; or the name of
            either.
        cp_size: ranks that share each sequence. dp_size: groups of these; rank = dp_rank * cp_size + cp_rank.
        cp_comm_type, layout: of the context; "zigzag" is "dual_chunk". "a2a+p2p" has inner groups of two.
        loss: "mean" if each rank returns the whole batch's loss, "sum" if it returns its share.
        device: "cpu" or "cuda".
        dtype: whose rounding errors are allowed; by default the narrowest in which the step uses weights, under
            autocast autocast's.
        timeout_s: how long the processes of one run may take, in seconds, at most a million.
        bits: whether the report also says which outputs, losses and gradients have the bits of the one process.
        on_progress: called where a process goes on, with the run ("the step", "the step, recorded"), the process
            ("rank 3") and what it does now ("step 1 of 2").

    Returns:
        The report: `right`, and `str` as a table with the diagnosis.

    Raises:
        ValueError, TypeError: an argument makes no sense. StepError: build or step raised, or a process died or did
        not end.
    """
    layout = canonical_layout(layout)
    how: dict[str, Any] = {"dp_size": dp_size, "cp_comm_type": cp_comm_type, "layout": layout, "loss": loss}
    check_step(build, cp_size, **how, device=device, timeout_s=timeout_s)
    world = cp_size * dp_size
    with tempfile.TemporaryDirectory() as folder:
        threads = max(1, (os.cpu_count() or 1) // world)
        how = {"cp_size": cp_size, "cp_comm_type": cp_comm_type, "layout": layout, "device": device}
        how |= {"threads": threads, "limit_s": timeout_s, "dtype": dtype}
        return report_of(Runs(Job(build, batch, "", Path(folder), "", **how), world, on_progress), loss, dtype, bits)


def report_of(runs: Runs, loss: str = "mean", dtype: torch.dtype | None = None, bits: bool = False) -> StepReport:
    """`compare_step` of processes that are given."""
    first = runs.measured()
    rows, wrong_tokens = _judged(first, loss, dtype)
    title = f"{first.cp_size} ranks" if first.dp_size == 1 else f"{first.dp_size} x {first.cp_size} ranks"
    title = f"{title}, {runs.job.cp_comm_type}, {first.layout}, {str(dtype or first.dtype).removeprefix('torch.')}"
    report = StepReport(title, tuple(rows), ranks=len(first.ranks), notes=tuple(_notes(first)))
    if report.right:
        return replace(report, bits=of_bits(runs.measured(look=True)) if bits else None)

    def vanishes(part: str) -> bool:
        return StepReport("", tuple(_judged(runs.measured(without=part), loss, dtype)[0])).right

    seen = runs.measured(look=True)
    found = diagnose(seen, loss, dtype, vanishes)
    modules, place = tuple(found.modules), found.first or wrong_tokens
    notes = (*report.notes, *found.notes)
    report = replace(report, findings=tuple(found.findings), first=place, modules=modules, notes=notes)
    return replace(report, bits=of_bits(seen) if bits else None)


def _notes(found: Measured) -> list[str]:
    """Notes that a reader of the report needs."""
    skipped = found.one["skipped"]
    if not skipped or any(rank["skipped"] != skipped for rank in found.ranks):
        return []
    words = f"all processes skip step{'s' * (len(skipped) > 1)} {', '.join(str(n + 1) for n in skipped)}"
    used = "" if len(skipped) == len(found.one["losses"]) else f"; gradients are those of step {_first(skipped)}"
    return [words + used]


def _first(skipped: list[int]) -> int:
    """The number, from 1, of the first step that is not skipped."""
    return next(n for n in range(len(skipped) + 1) if n not in skipped) + 1


def _judged(found: Measured, loss: str, dtype: torch.dtype | None) -> tuple[list[Row], str]:
    """All rows, and in words where the first wrong token is."""
    one, noisy = found.one, found.noisy
    kind: torch.dtype = dtype or found.dtype
    rows = []
    counts = [len(each["losses"]) for each in (one, *noisy, *found.ranks)]
    for number, value in enumerate(one["losses"][: min(counts)]):
        if all(number in each["skipped"] for each in (one, *found.ranks)):
            continue
        mine = [rank["losses"][number] for rank in found.ranks]
        mine = [sum(mine)] if loss == "sum" else mine
        name = "loss" if number == 0 else f"loss of step {number + 1}"
        rows.append(judge(name, mine, [value] * len(mine), [[x["losses"][number]] * len(mine) for x in noisy], kind))
    rows += _skips(found)
    norms = [norm_of(found.of_rank("grads", 0)), norm_of(one["grads"]), *(norm_of(x["grads"]) for x in noisy)]
    rows.append(judge("gradient norm", norms[0], norms[1], norms[2:], kind))
    bounds: dict[str, float] = {}  # of gradients
    for what, words in (("grads", "gradient of"), ("params", "after two steps:")):
        everything = [found.of_rank(what, rank) for rank in range(len(found.ranks))]
        odd = sorted(set(one[what]) ^ set(everything[0]))
        if not found.tied.issuperset(odd):
            raise StepError(f"the one process and the ranks have other parameters: {', '.join(odd[:5])}")
        for name in odd:
            note = f"tied {'in one process' if name in one['shared'] else 'on the ranks'} alone"
            rows.append(Row(f"{words} {name}", torch.inf, 0.0, torch.inf, 0.0, False, note))
        for name, value in one[what].items():
            if name in odd:
                continue
            ranks = [r for r, rank in enumerate(found.ranks) if r == 0 or name in rank[f"unlike_{what}"]]
            values = [value, *(x[what][name] for x in noisy), *(everything[r][name] for r in ranks)]
            if what == "params":
                grads = [one["grads"][name], found.of_rank("grads", 0)[name], *(x["grads"][name] for x in noisy)]
                values = _determined(values, grads, bounds.get(name, 0.0))
                apart = sum((x.double() - values[0]).abs() for x in values[1 : 1 + len(noisy)])
                values[1 : 1 + len(noisy)] = [values[0] + apart] * len(noisy)  # optimizers magnify roundings
            for rank, mine in zip(ranks, values[1 + len(noisy) :], strict=True):
                title = f"{words} {name}" + f", rank {rank}" * bool(rank)
                own = dtype or (value.dtype if what == "params" and value.dtype.is_floating_point else kind)
                row = judge(title, mine, values[0], values[1 : 1 + len(noisy)], own, finite=what == "grads")
                bounds.setdefault(name, row.max_bound)
                rows.append(row)
    tokens, where = _tokens(found, kind)
    return rows + _buffers(found, dtype) + tokens, where


def _skips(found: Measured) -> list[Row]:
    """A row for each rank that skips other steps than the one process."""
    rows, one = [], found.one["skipped"]
    for number, rank in enumerate(found.ranks):
        if rank["skipped"] != one:
            apart = float(len(set(one) ^ set(rank["skipped"])))
            rows.append(Row(f"skipped steps, rank {number}", apart, 0.0, apart, 0.0, False, "others are skipped"))
    return rows


def _buffers(found: Measured, dtype: torch.dtype | None) -> list[Row]:
    """Buffers that the step changed, where both sides have the same shape: caches may hold a slice."""
    rows, one = [], found.one["buffers"]
    everything = [found.of_rank("buffers", rank) for rank in range(len(found.ranks))]
    changed = {name for each in (found.one, *found.ranks) for name in each["changed"]}
    for name, value in one.items():
        if name not in changed or any(name not in x or x[name].shape != value.shape for x in everything):
            continue
        noise = [x["buffers"][name] for x in found.noisy]
        for rank, mine in enumerate(everything):
            title = f"buffer {name}" + f", rank {rank}" * bool(rank)
            rows.append(judge(title, mine[name], value, noise, dtype or found.dtype, finite=False))
    return rows


def _determined(values: list[Any], grads: list[Any], bound: float) -> list[Any]:
    """Parameters, weighed by the size of their gradients: optimizers such as Adam make steps of one size of all of
    them, and so steps of rounding errors where a gradient is little more. Values without any gradient count in full.

    Args:
        grads: of the one process, then of all others.
    """
    if any(grad is None for grad in grads) or any(x.shape != grads[0].shape for x in (*grads, *values)):
        return values
    size = grads[0].double().abs()
    weight = torch.where(size > _CLEAR * bound, size / size.max().clamp(min=1e-300), 0.0)
    weight[torch.stack([grad == 0 for grad in grads]).all(0)] = 1.0
    return [x.double() * weight for x in values]


def _tokens(found: Measured, dtype: torch.dtype) -> tuple[list[Row], str]:
    """The losses of tokens that step returned."""
    rows, where = [], ""
    counts = {len(each["tokens"] or []) for each in (found.one, *found.ranks)}
    for number, one in enumerate(found.one["tokens"] or []):
        given = found.place([(first, number) for first in range(0, len(found.ranks), found.cp_size)], number)
        parts = [rank["tokens"][number] for rank in found.ranks] if len(counts) == 1 else []
        beside = given.places.together(parts, one) if given is not None and parts else None
        if beside is None:
            shapes = [list(x.shape) for x in (one, *parts)]
            raise StepError(
                f"losses of tokens have the shapes {shapes} in one process and on the ranks; they are [b, s/cp] or "
                "[t/cp], one for each token, and one tensor for each call of the model"
            )
        got, index, rank, key = beside
        exact, noise = one.reshape(-1)[index], [x["tokens"][number].reshape(-1)[index] for x in found.noisy]
        rows.append(judge("losses of tokens", got, exact, noise, dtype))
        if not rows[-1].ok and not where:
            wrong = ((got - exact).abs() > rows[-1].max_bound).nonzero()[:, 0].tolist()
            if wrong:
                at = min(wrong, key=lambda n: key[n])
                where = f"the first token with a wrong loss is {describe(int(key[at]))}, on rank {rank[at]}"
    return rows, where


def check_step(
    build: Any, cp_size: Any, *, dp_size: Any, cp_comm_type: Any, layout: Any, loss: Any, device: Any, timeout_s: Any
) -> None:
    """Raise for arguments of `compare_step` that make no sense, before anything runs."""
    if not (callable(build) or (isinstance(build, str) and ":" in build)):
        raise TypeError(f"build is {build!r}; it must be a function, or its name as module:function")
    for name, value in {"cp_size": cp_size, "dp_size": dp_size}.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_RANKS:
            raise ValueError(f"{name} is {value!r}; it must be an integer from 1 to {MOST_RANKS}")
    if cp_size * dp_size > MOST_RANKS:
        ranks = cp_size * dp_size
        raise ValueError(f"cp_size {cp_size} and dp_size {dp_size} make {ranks} ranks; {MOST_RANKS} are the most")
    check_choice("cp_comm_type", cp_comm_type, CP_COMM_TYPES)
    check_choice("layout", canonical_layout(layout), LAYOUTS)
    check_choice("loss", loss, ("mean", "sum"))
    check_choice("device", device, ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.device_count():
        raise ValueError("device is 'cuda', but PyTorch sees no CUDA device")
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not 0 < timeout_s <= LONGEST_S:
        raise ValueError(
            f"timeout_s is {timeout_s!r}; it must be a number of seconds above 0, at most {LONGEST_S:,.0f}"
        )
    if cp_comm_type == "a2a+p2p" and cp_size % 2:
        raise ValueError(f"cp_size is {cp_size}; 'a2a+p2p' has inner groups of two, which must divide it")
