"""`compare_step`: one optimizer step over ranks, and in one process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from conformance.step.diagnosis import diagnose
from conformance.step.jobs import Job, StepError, run_jobs
from conformance.step.judge import Row, judge, norm_of
from conformance.step.places import Places, describe
from conformance.step.report import StepReport
from cp_ref.spec import CP_COMM_TYPES, LAYOUTS, check_choice

__all__ = ["compare_step"]

_NOISES = (1, 2)  # seeds


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
) -> StepReport:
    """Compare one optimizer step of a model over ranks with the same step in one process.

    Every rank is a process (gloo on the CPU, NCCL on GPUs), and so is the one process. Each calls build once.

    Args:
        build: build(cp) -> (model, step) or (model, step, optimizer); or its name, "module:function". cp is None in the
            one process, else this rank's `cp_fast.ContextParallel`. torch.distributed is initialized, in the one process
            with a world of one. step(batch) is the user's code: it cuts the batch, computes the loss, runs the backward
            pass and reduces gradients. It returns the loss, or (loss, losses of this rank's tokens). With an optimizer
            the parameters after two steps are compared too; step may call it, or leave it to compare_step.
        batch: what step takes, the same on every rank; or a function without arguments that makes it; or the name of
            either.
        cp_size: ranks that share each sequence. dp_size: groups of these; rank = dp_rank * cp_size + cp_rank.
        cp_comm_type, layout: of the context. "a2a+p2p" has inner groups of two.
        loss: "mean" if each rank returns the whole batch's loss, "sum" if it returns its share.
        device: "cpu" or "cuda".
        dtype: whose rounding errors are allowed; by default the narrowest of the weights' dtypes. Under autocast it is
            autocast's.
        timeout_s: how long the processes may take.

    Returns:
        The report: `right`, and `str` as a table with the diagnosis.

    Raises:
        ValueError, TypeError: an argument makes no sense. StepError: build or step raised, a process died or did not end.
    """
    _check(build, cp_size, dp_size, cp_comm_type, layout, loss, device)
    world = cp_size * dp_size
    if device == "cuda" and torch.cuda.device_count() < world:
        raise StepError(f"{world} ranks need {world} GPUs, and there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        threads = max(1, (os.cpu_count() or 1) // world)
        how: dict[str, Any] = {"cp_size": cp_size, "cp_comm_type": cp_comm_type, "layout": layout, "device": device}
        how |= {"threads": threads, "limit_s": timeout_s}
        runs = Runs(Job(build, batch, "", Path(folder), "", **how), world)
        first = runs.measured()
        rows, wrong_tokens = _judged(first, loss, dtype)
        title = f"{cp_size} ranks" if dp_size == 1 else f"{dp_size} x {cp_size} ranks"
        title = f"{title}, {cp_comm_type}, {layout}, {str(dtype or first.one['dtype']).removeprefix('torch.')}"
        report = StepReport(title, tuple(rows))
        if report.right:
            return report

        def vanishes(part: str) -> bool:
            return StepReport("", tuple(_judged(runs.measured(without=part), loss, dtype)[0])).right

        found = diagnose(runs.measured(look=True), loss, dtype, vanishes)
        return replace(report, findings=tuple(found.findings), first=found.first or wrong_tokens)


class Measured:
    """What the processes found: the one, those with moved weights, and the ranks."""

    def __init__(self, one: Any, noisy: list[Any], ranks: list[Any]) -> None:
        self.one, self.noisy, self.ranks = one, noisy, ranks
        self.cp_size, self.dp_size = 1, 1

    def of_rank(self, what: str, rank: int) -> dict[str, Any]:
        """Gradients ("grads") or parameters ("params") of a rank, all of them."""
        return self.ranks[0][what] | self.ranks[rank][what]

    def places(self, forward: int = 0) -> Places | None:
        """Where the tokens of a forward pass are; None where no call of attention says it."""
        problems = []
        for first in range(0, len(self.ranks), self.cp_size):
            found = self.ranks[first]
            calls = found.get("look", {}).get("calls", [])
            of_forward = [call["problem"] for call in calls if call["forward"] == forward] or found["plans"]
            problems.append(of_forward[min(forward, len(of_forward) - 1)] if of_forward else None)
        if any(problem is None or problem.cp_size != self.cp_size for problem in problems):
            return None
        return Places(problems)


class Runs:
    """Runs the processes of a comparison, as often as it takes."""

    def __init__(self, job: Job, world: int) -> None:
        self._job, self._world, self._count = job, world, 0

    def measured(self, *, look: bool = False, without: str = "") -> Measured:
        """The step in all processes: on a CPU all at the same time, on GPUs each alone on its GPUs."""
        self._count += 1
        job = replace(self._job, look=look, without=without)
        alone = [self._alone(job, 0), *(self._alone(job, seed) for seed in _NOISES)]
        store = str(job.folder / f"{self._count}.ranks")
        ranks = [
            replace(job, name=f"rank {rank}", rank=rank, world=self._world, store=store, folder=self._folder())
            for rank in range(self._world)
        ]
        waves = [[*alone, *ranks]] if job.device == "cpu" else [*([job] for job in alone), ranks]
        one, *found = [each for wave in waves for each in run_jobs(wave)]
        made = Measured(one, found[: len(_NOISES)], found[len(_NOISES) :])
        made.cp_size, made.dp_size = job.cp_size, self._world // job.cp_size
        return made

    def _alone(self, job: Job, noise: int) -> Job:
        name = "the one process" + f" (weights rounded, {noise})" * bool(noise)
        store = str(job.folder / f"{self._count}.{noise}")
        return replace(job, name=name, noise=noise, store=store, folder=self._folder())

    def _folder(self) -> Path:
        folder = self._job.folder / str(self._count)
        folder.mkdir(exist_ok=True)
        return folder


def _judged(found: Measured, loss: str, dtype: torch.dtype | None) -> tuple[list[Row], str]:
    """All rows, and in words where the first wrong token is."""
    one, noisy, dtype = found.one, found.noisy, dtype or found.one["dtype"]
    rows = []
    for number, value in enumerate(one["losses"]):
        mine = [rank["losses"][number] for rank in found.ranks]
        mine = [sum(mine)] if loss == "sum" else mine
        name = "loss" if number == 0 else f"loss of step {number + 1}"
        rows.append(judge(name, mine, [value] * len(mine), [[x["losses"][number]] * len(mine) for x in noisy], dtype))
    norms = [norm_of(found.of_rank("grads", 0)), norm_of(one["grads"]), *(norm_of(x["grads"]) for x in noisy)]
    rows.append(judge("gradient norm", norms[0], norms[1], norms[2:], dtype))
    for what, words in (("grads", "gradient of"), ("params", "after two steps:")):
        if set(one[what]) != set(found.of_rank(what, 0)):
            odd = sorted(set(one[what]) ^ set(found.of_rank(what, 0)))
            raise StepError(f"the one process and the ranks have other parameters: {', '.join(odd[:5])}")
        for name, value in one[what].items():
            yards = [x[what][name] for x in noisy]
            rows.append(judge(f"{words} {name}", found.of_rank(what, 0)[name], value, yards, dtype))
            for rank in range(1, len(found.ranks)):
                if name in found.ranks[rank][f"unlike_{what}"]:
                    row = judge(f"{words} {name}, rank {rank}", found.ranks[rank][what][name], value, yards, dtype)
                    rows += [] if row.ok else [row]
    tokens, where = _tokens(found, dtype)
    return rows + tokens, where


def _tokens(found: Measured, dtype: torch.dtype) -> tuple[list[Row], str]:
    """The losses of tokens that step returned."""
    rows, where = [], ""
    for number, one in enumerate(found.one["tokens"] or []):
        places = found.places(number)
        parts = [rank["tokens"][number] if rank["tokens"] else None for rank in found.ranks]
        beside = None if places is None else places.together(parts, one)
        if beside is None:
            continue
        got, index, rank, key = beside
        exact, yards = one.reshape(-1)[index], [x["tokens"][number].reshape(-1)[index] for x in found.noisy]
        rows.append(judge("losses of tokens", got, exact, yards, dtype))
        if not rows[-1].ok and not where:
            wrong = ((got - exact).abs() > rows[-1].max_bound).nonzero()[:, 0].tolist()
            if wrong:
                at = min(wrong, key=lambda n: key[n])
                where = f"the first token with a wrong loss is {describe(int(key[at]))}, on rank {rank[at]}"
    return rows, where


def _check(build: Any, cp_size: Any, dp_size: Any, comm: Any, layout: Any, loss: Any, device: Any) -> None:
    if not (callable(build) or (isinstance(build, str) and ":" in build)):
        raise TypeError(f"build is {build!r}; it must be a function, or its name as module:function")
    for name, value in {"cp_size": cp_size, "dp_size": dp_size}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a positive integer")
    check_choice("cp_comm_type", comm, CP_COMM_TYPES)
    check_choice("layout", layout, LAYOUTS)
    check_choice("loss", loss, ("mean", "sum"))
    check_choice("device", device, ("cpu", "cuda"))
    if comm == "a2a+p2p" and cp_size % 2:
        raise ValueError(f"cp_size is {cp_size}; 'a2a+p2p' has inner groups of two, which must divide it")
