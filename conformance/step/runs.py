"""The processes of a comparison, and their findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from conformance.step.evidence.token_places import Places
from conformance.step.jobs import Job, run_jobs
from cp_ref.spec import Problem, Sequence

__all__ = ["Measured", "Runs"]

_NOISES = (1, 2)  # seeds of the rounding errors that weights are given


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
        """Parameters that are others' on one side, and parameters of their own on the other."""
        one, ranks = (set(each["shared"]) for each in (self.one, self.ranks[0]))
        return (one & set(self.ranks[0]["grads"])) | (ranks & set(self.one["grads"]))

    def places(self, forward: int = 0) -> Places | None:
        """Where the tokens of a forward pass are; None where no call of attention says it."""
        problems = []
        for first in range(0, len(self.ranks), self.cp_size):
            found = self.ranks[first]
            calls = found.get("look", {}).get("calls", [])
            of_forward = [call["problem"] for call in calls if call["forward"] == forward] or found["plans"]
            problems.append(of_forward[min(forward, len(of_forward) - 1)] if of_forward else None)
        if all(problem is None for problem in problems):
            return self._by_layout()
        if any(problem is None or problem.cp_size != self.cp_size for problem in problems):
            return None
        return Places(problems)

    def _by_layout(self) -> Places | None:
        """The same by the context's layout, where no attention is called; if then the integers of modules agree."""
        for record in self.one.get("look", {}).get("modules", []):
            for name, x in record["inputs"].items():
                if x is None or x.is_floating_point() or x.ndim != 2 or self.layout == "balanced":
                    continue
                slots = -(-x.shape[1] // (2 * self.cp_size)) * 2 * self.cp_size
                sequences = (Sequence(x.shape[1], x.shape[1], slots, slots),) * (len(x) // self.dp_size)
                places = Places([Problem(self.cp_size, sequences, layout=self.layout)] * self.dp_size)
                alike = [[r for r in rank["look"]["modules"] if r["name"] == record["name"]] for rank in self.ranks]
                parts = [records[0]["inputs"].get(name) if records else None for records in alike]
                beside = places.together(parts, x)
                if beside is not None and torch.equal(beside[0], x.reshape(-1)[beside[1]]):
                    return places
        return None


class Runs:
    """Runs the processes of a comparison, as often as it takes; `on_progress` as in `compare_step`."""

    def __init__(self, job: Job, world: int, on_progress: Callable[[str, str, str], None]) -> None:
        self._job, self._world, self._count, self._on_progress = job, world, 0, on_progress

    def measured(self, *, look: bool = False, without: str = "") -> Measured:
        """The step in all processes: on a CPU all at the same time, on GPUs first those without a context."""
        self._count += 1
        job = replace(self._job, look=look, without=without)
        alone = [self._alone(job, 0), *(self._alone(job, seed) for seed in _NOISES)]
        store = str(job.folder / f"{self._count}.ranks")
        ranks = [
            replace(job, name=f"rank {rank}", rank=rank, world=self._world, store=store) for rank in range(self._world)
        ]
        waves = [[*alone, *ranks]] if job.device == "cpu" else [*_on_gpus(alone), ranks]
        run = "the step" + f" without {without}" * bool(without) + ", recorded" * look
        on_stage = partial(self._on_progress, run)
        one, *found = [each for wave in waves for each in run_jobs(wave, on_stage)]
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
