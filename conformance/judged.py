"""What a tier says of one problem: findings, and of the budgets how much of them was used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["Judged"]


class Judged(list[str]):
    """The findings, a list of sentences that is empty when all is well; and beside it measured ratios.

    A tier may as well return a plain list. `ratios` are error / bound, named "out max", "dq mean", ...

    >>> judged = Judged([], {"out max": 0.5})
    >>> judged == [], judged.ratios
    (True, {'out max': 0.5})
    """

    def __init__(self, findings: Iterable[str] = (), ratios: Mapping[str, float] | None = None) -> None:
        super().__init__(findings)
        self.ratios = dict(ratios or {})
