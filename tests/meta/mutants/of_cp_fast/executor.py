"""Bugs of the lowering of a schedule, and of the executor: what is accumulated in which dtype, in which order."""

from __future__ import annotations

from typing import Any

from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]


def _rotated(home: Any, self: Any, kind: str, size: int) -> Any:
    """Results of other ranks' heads are put into the places of the next ones."""
    boxes = [box for _, of_kind, box in self._arrived if of_kind == kind]
    if all(box.rows[0].shape == boxes[0].rows[0].shape for box in boxes):
        turned = iter([*boxes[1:], *boxes[:1]])
        self._arrived = [(into, of, next(turned) if of == kind else box) for into, of, box in self._arrived]
    return home(self, kind, size)


def _rounded(handed_over: Any, self: Any, number: int) -> Any:
    held = handed_over(self, number)
    return held._replace(rows=[x.bfloat16().to(x.dtype) for x in held.rows])


def _columns_left_behind(parcels: Any, self: Any, peer: int, tag: int, rows: Any, columns: Any) -> Any:
    """The lse of the first row travels for all rows."""
    return parcels(self, peer, tag, rows, [x[:, :1].expand(x.shape) for x in columns])


def _first_largest(forward: Any, *arguments: Any) -> Any:
    done = forward(*arguments)
    return done if done.max_logit is None else done._replace(max_logit=done.max_logit[:1].expand(done.max_logit.shape))


def _last_taken(_: Any, one: Any, other: Any) -> bool:
    """Rows that were gathered for one launch are believed to be those of the next."""
    return one.heads == other.heads


_RUN = "cp_fast.running.Run"

MUTANTS: dict[str, Mutant] = {
    "heads-come-home-rotated": Mutant(
        "heads come home to the next rank's place", f"{_RUN}.home", wrap(_rotated), "logic"
    ),
    "results-rounded-before-they-travel": Mutant(
        "results that are handed over are rounded to bfloat16", f"{_RUN}._handed_over", wrap(_rounded), "logic"
    ),
    "one-lse-travels-for-all-rows": Mutant(
        "of the lse that travels every row has the first row's", f"{_RUN}._parcels", wrap(_columns_left_behind), "logic"
    ),
    "one-max-logit-for-all-heads": Mutant(
        "max_logit is the first head's", "cp_fast.passes.run_forward", wrap(_first_largest), "logic"
    ),
    "rows-taken-for-the-last-ones": Mutant(
        "a launch gets the rows of the one before", "cp_fast.running._same", wrap(_last_taken), "probes"
    ),
    "accumulators-in-the-inputs-dtype": Mutant(
        "partial results are accumulated in the inputs' dtype",
        "cp_fast.running.wide_dtype cp_fast.passes.wide_dtype",
        lambda _: lambda dtype: dtype,
        "budget",
    ),
}
