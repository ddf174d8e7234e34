"""The bars that run while the ranks and the oracle work."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from cp_fast.tools.cli.demo.job import Job
from cp_fast.tools.cli.demo.rank import STAGES

__all__ = ["Bars"]


class Bars:
    """Two bars, one after the other; they vanish when all is done."""

    def __init__(self, console: Console, job: Job) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True)
        self._size = job.ranks
        self._ranks = self._progress.add_task("ranks", total=job.ranks * (len(STAGES) - 1))
        self._oracle = self._progress.add_task("oracle", total=sum(n * n for n in job.lengths), start=False)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bars away."""
        self._progress.stop()

    def ranks(self, reached: list[int]) -> None:
        """Which stage each rank has reached."""
        words = f"ranks: the last one {STAGES[min(reached)]}"
        self._progress.update(self._ranks, completed=sum(reached), description=words)

    def stage(self, stage: str) -> None:
        """The same where only this rank is known (under torchrun)."""
        self.ranks([STAGES.index(stage)] * self._size)

    def document(self, length: int) -> None:
        """The oracle has done a document of this length."""
        if not self._progress.tasks[self._oracle].started:
            self._progress.start_task(self._oracle)
        self._progress.update(self._oracle, advance=length * length)
