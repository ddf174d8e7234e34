"""The processes of a comparison, and their findings."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from conformance.runner.processes import run_together
from conformance.step.step_record import Job, StepError, table_of
from conformance.step.tokens import TokenPlaces
from cp_ref.schedules.problem import Problem, Sequence

__all__ = ["ForwardPass", "Measured", "Runs", "run_jobs"]

# ---- processes
#
# Processes that run a step: one alone, or the ranks of a group.


_PRELOADED = ["conformance.step.process", "torch._dynamo"]


def run_jobs(jobs: list[Job], on_stage: Callable[[str, str], None]) -> list[Any]:
    """Run the processes at the same time.

    Args:
        on_stage: see `run_together`.

    Returns:
        What each of them found.

    Raises:
        StepError: one of them raised (with its traceback), died, or did not end in `limit_s`. The others are ended.
    """
    context = _context_for(jobs)
    if context.get_start_method() == "fork":
        jobs = [replace(job, threads=1) for job in jobs]  # a copy of this process has none of OpenMP's threads
    limit_s = max(job.limit_s for job in jobs)
    return run_together(context, _run, {job.name: job for job in jobs}, StepError, limit_s, on_stage)


def _context_for(jobs: list[Job]) -> Any:
    """Processes from a server that has imported PyTorch; copies of this one for functions that only it knows."""
    build, batch = jobs[0].build, jobs[0].batch
    try:
        pickle.dumps((build, batch))
        given = [getattr(each, "func", each) for each in (build, batch)]  # of a partial function
        if not any(getattr(each, "__module__", "") == "__main__" for each in given):
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_PRELOADED)
            return context
    except Exception:  # a local function, a lambda
        pass
    if torch.cuda.is_initialized():
        raise StepError(
            "build is a function of the main program or a local one, and this process uses the GPU already; "
            "put build into a module of its own, or call compare_step before anything touches the GPU"
        )
    return multiprocessing.get_context("fork")


def _run(job: Job) -> Any:
    from conformance.step.process import run  # the process that starts others needs nothing of it

    try:
        return run(job)
    except StepError as error:
        raise StepError(f"{job.name}: {error}") from None
    except BaseException:
        raise StepError(f"{job.name} raised:\n{traceback.format_exc()}") from None


# ---- comparisons


_NOISES = (1, 2)  # seeds of the rounding errors that weights are given


@dataclass(frozen=True)
class ForwardPass:
    """A forward pass of the one process on the ranks: where its tokens are, and which pass of each rank has them."""

    places: TokenPlaces
    forwards: dict[int, int]


@dataclass(frozen=True)
class Measured:
    """The findings of all processes: the one, those with moved weights, and the ranks."""

    one: dict[str, Any]
    noisy: list[dict[str, Any]]
    ranks: list[dict[str, Any]]
    cp_size: int
    dp_size: int
    layout: str

    def of_rank(self, what: str, rank: int) -> dict[str, Any]:
        """Gradients ("grads"), parameters ("params") or buffers ("buffers") of a rank, all of them."""
        return self.ranks[0][what] | self.ranks[rank][what]

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest in which weights are used: those with moved weights see the casts."""
        return max((each["dtype"] for each in (self.one, *self.noisy)), key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def tied(self) -> set[str]:
        """Parameters that one side ties to another parameter, and the other side does not."""
        one, ranks = (set(each["shared"]) for each in (self.one, self.ranks[0]))
        return (one & set(self.ranks[0]["grads"])) | (ranks & set(self.one["grads"]))

    @cached_property
    def passes(self) -> dict[int, ForwardPass]:
        """The forward passes of the one process, by number, where their tokens could be found on the ranks.

        Either every pass has the documents of all groups, or each has those of one group's pass, with the same tokens.
        """
        groups = range(0, len(self.ranks), self.cp_size)
        counts = {first: _passes(self.ranks[first]) for first in groups}
        found: dict[int, ForwardPass] = {}
        free = [(first, number) for first in groups for number in range(counts[first])]
        for number in range(_passes(self.one)):
            if set(counts.values()) == {_passes(self.one)}:
                given = [self.place([(first, number) for first in groups], number)]
            else:
                tried = [each for source in free if (each := self.place([source], number)) is not None]
                alike = [self._alike(each, number) for each in tried]
                given = [tried[alike.index(max(alike))]] if any(alike) else []
            for each in given:
                if each is not None:
                    found[number] = each
                    free = [x for x in free if each.forwards.get(x[0]) != x[1]]
        return found

    @property
    def unmatched(self) -> str:
        """Why the records of the one process and of the ranks cannot be compared; "" where they can."""
        if set(range(_passes(self.one))) == set(self.passes):
            return ""
        counts = sorted({_passes(rank) for rank in self.ranks})
        said = f"{_passes(self.one)} forward passes in one process, {' or '.join(map(str, counts))} on the ranks"
        if counts == [_passes(self.one)]:
            said = "no call of cp_fast, and no integers of a module, say which tokens a rank has"
        elif self.passes:
            said += f"; only {len(self.passes)} have the tokens of one pass of the ranks"
        else:
            said += ", and no pass of the ranks has the tokens of one in one process"
        return f"modules and labels of some passes could not be compared: {said}"

    def place(self, sources: list[tuple[int, int]], number: int) -> ForwardPass | None:
        """The pass `number` of the one process, if it has the documents of these groups' passes.

        Args:
            sources: (a group's first rank, its forward pass).
        """
        problems = [_problem(self.ranks[first], forward) for first, forward in sources]
        ranks = [rank for first, _ in sources for rank in range(first, first + self.cp_size)]
        forwards = {rank: forward for first, forward in sources for rank in range(first, first + self.cp_size)}
        if all(problem is None for problem in problems):
            places = self._by_layout() if len(ranks) == len(self.ranks) else None
            return None if places is None else ForwardPass(places, forwards)
        known = [problem for problem in problems if problem is not None and problem.cp_size == self.cp_size]
        if len(known) < len(problems):
            return None
        return ForwardPass(TokenPlaces(known, ranks, _problem(self.one, number)), forwards)

    def _alike(self, given: ForwardPass, number: int) -> int:
        """How many of the integers that modules are given are the same, such as ids of tokens and positions."""
        tables = {rank: table_of(self.ranks[rank]) for rank in given.forwards}
        alike = 0
        for (forward, *key), record in table_of(self.one).items():
            for name, x in record["inputs"].items() if forward == number else ():
                if x is None or x.is_floating_point() or x.numel() < 2:
                    continue
                mine = [tables[rank].get((given.forwards[rank], *key)) for rank in given.places.ranks]
                parts = [None if record is None else record["inputs"].get(name) for record in mine]
                beside = given.places.together(parts, x)
                if beside is None:
                    continue
                whole = len(beside[0]) == given.places.lengths.sum()
                alike += whole and torch.equal(beside[0], x.reshape(-1)[beside[1]])
        return alike

    def _by_layout(self) -> TokenPlaces | None:
        """The places by the context's layout, where no attention is called; if then the integers of modules agree."""
        for record in self.one.get("look", {}).get("modules", []):
            for name, x in record["inputs"].items():
                if x is None or x.is_floating_point() or x.ndim != 2 or self.layout == "balanced":
                    continue
                slots = -(-x.shape[1] // (2 * self.cp_size)) * 2 * self.cp_size
                sequences = (Sequence(x.shape[1], x.shape[1], slots, slots),) * (len(x) // self.dp_size)
                places = TokenPlaces([Problem(self.cp_size, sequences, layout=self.layout)] * self.dp_size)
                alike = [[r for r in rank["look"]["modules"] if r["name"] == record["name"]] for rank in self.ranks]
                parts = [records[0]["inputs"].get(name) if records else None for records in alike]
                beside = places.together(parts, x)
                if beside is not None and torch.equal(beside[0], x.reshape(-1)[beside[1]]):
                    return places
        return None


def _passes(each: Any) -> int:
    return max(each.get("look", {}).get("forwards", 0), 1)


def _problem(each: Any, forward: int) -> Problem | None:
    """The calls of attention in a forward pass."""
    calls = each.get("look", {}).get("calls", [])
    problems = [call["problem"] for call in calls if call["forward"] == forward] or each["plans"]
    return problems[min(forward, len(problems) - 1)] if problems else None


class Runs:
    """Runs the processes of a comparison, as often as it takes.

    Args:
        on_progress: as in `compare_step`. run: runs jobs at the same time, as `run_jobs` does.
    """

    def __init__(
        self, job: Job, world: int, on_progress: Callable[[str, str, str], None], run: Callable[..., Any] = run_jobs
    ) -> None:
        self.job, self._world, self._count, self._on_progress, self._run = job, world, 0, on_progress, run

    def measured(self, *, look: bool = False, without: str = "") -> Measured:
        """The step in all processes: on a CPU all at the same time, on GPUs first those without a context."""
        self._count += 1
        job = replace(self.job, look=look, without=without)
        alone = [self._alone(job, 0), *(self._alone(job, seed) for seed in _NOISES)]
        store = str(job.folder / f"{self._count}.ranks")
        ranks = [
            replace(job, name=f"rank {rank}", rank=rank, world=self._world, store=store) for rank in range(self._world)
        ]
        waves = [[*alone, *ranks]] if job.device == "cpu" else [*_on_gpus(alone), ranks]
        run = "the step" + f" without {without}" * bool(without) + ", recorded" * look
        on_stage = partial(self._on_progress, run)
        one, *found = [each for wave in waves for each in self._run(wave, on_stage)]
        noisy, ranks = found[: len(_NOISES)], found[len(_NOISES) :]
        return Measured(one, noisy, ranks, job.cp_size, self._world // job.cp_size, job.layout)

    def _alone(self, job: Job, noise: int) -> Job:
        name = "the one process" + f" (weights rounded, {noise})" * bool(noise)
        store = str(job.folder / f"{self._count}.{noise}")
        return replace(job, name=name, noise=noise, store=store)


def _on_gpus(alone: list[Job]) -> list[list[Job]]:
    """Processes that run at the same time, one on each GPU."""
    count = torch.cuda.device_count()
    placed = [replace(job, device=f"cuda:{n % count}") for n, job in enumerate(alone)]
    return [placed[n : n + count] for n in range(0, len(placed), count)]
