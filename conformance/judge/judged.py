"""A tier's judgement of one problem: findings, how much of a budget was used, verdicts on a named problem's cases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from conformance.judge.run_record import Verdict

__all__ = ["Judged"]


class Judged(list[str]):
    """The findings, a list of sentences that is empty when all is well, and the measurements.

    A tier may as well return a plain list. `ratios` are error / bound, named "out max", "dq mean", ...; `cases` says of
    a named problem what became of each "Case(...)" that it plays.

    >>> judged = Judged([], {"out max": 0.5})
    >>> judged == [], judged.ratios
    (True, {'out max': 0.5})
    """

    def __init__(
        self,
        findings: Iterable[str] = (),
        ratios: Mapping[str, float] | None = None,
        cases: Mapping[str, Verdict] | None = None,
    ) -> None:
        super().__init__(findings)
        self.ratios = dict(ratios or {})
        self.cases: dict[str, Verdict] = dict(cases or {})
