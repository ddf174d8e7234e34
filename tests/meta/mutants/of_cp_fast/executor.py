"""Bugs of the executor: what travels, what is accumulated in which dtype, in which order."""

from __future__ import annotations

from typing import Any

from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]


def _rotated(home: Any, self: Any, kind: str, size: int) -> Any:
    """Results of other ranks' heads are put into the places of the next ones."""
    mine = [n for n, (what, _) in enumerate(self.arriving) if what.kind == kind]
    for n in mine:
        what, box = self.arriving[n]
        self.arriving[n] = what, box._replace(rows=[x.roll(1, 0) for x in box.rows])
    return home(self, kind, size)


def _rounded(handed_over: Any, self: Any, number: int) -> Any:
    held = handed_over(self, number)
    return held._replace(rows=[x.bfloat16().to(x.dtype) for x in held.rows])


def _columns_left_behind(post: Any, self: Any, group: Any, sends: Any, recvs: Any) -> Any:
    """The lse of the first row travels for all rows."""
    return post(self, group, [x[:, :1].expand(x.shape).contiguous() if x.ndim == 2 else x for x in sends], recvs)


def _first_largest(forward: Any, *arguments: Any) -> Any:
    done = forward(*arguments)
    return done if done.max_logit is None else done._replace(max_logit=done.max_logit[:1].expand(done.max_logit.shape))


def _last_taken(_: Any, one: Any, other: Any) -> bool:
    """Rows that were gathered for one launch are believed to be those of the next."""
    return one.heads == other.heads


def _keys_travel_as_values(given_of: Any, self: Any, given: Any) -> Any:
    """Keys and values are exchanged."""
    found = given_of(self, given)
    if len(self.held[given.slot].rows) == 2:
        found = [found[n ^ 1] for n in range(len(found))]
    return found


def _last_row_left_out(copy_rows: Any, self: Any, copy: Any) -> None:
    copy_rows(self, copy)
    for x in self.held[copy.slot].rows:
        x[-1] = 0


def _columns_reversed(put: Any, into: Any, x: Any, rows: Any) -> None:
    put(into, x.flip(1), rows)


def _no_sink_on_the_way(add: Any, out: Any, lse: Any, sink: Any, rows: Any) -> None:
    """Outs that leave their rank complete have no sink."""
    if rows != slice(None):
        add(out, lse, sink, rows)


def _no_dlse_from_afar(take: Any, self: Any, what: Any) -> Any:
    held, name = take(self, what), list(self.ready.slots)[what.slot]
    if ": do " in name:
        return held._replace(columns=[x.new_zeros(x.shape) for x in held.columns])
    return held


def _last_part_forgotten(finish: Any, self: Any) -> Any:
    """What is still held when a total is finished is not added."""
    if self._total is not None:
        self.held = []
    return finish(self)


def _some_rows_are_all(is_whole: Any, rows: Any, size: int) -> bool:
    """A part with as many rows as the total, in whatever order, becomes the total."""
    return is_whole(rows, size) or (not isinstance(rows, slice) and len(rows) == size)


def _arrived_lse_left_out(home: Any, self: Any, kind: str, size: int) -> Any:
    """Complete results that arrive bring no lse."""
    self.arriving = [
        (what, box._replace(columns=[x.new_zeros(x.shape) for x in box.columns])) for what, box in self.arriving
    ]
    return home(self, kind, size)


_RUN = "cp_fast.running.Run"
_RESULTS = "cp_fast.results.Results"

MUTANTS: dict[str, Mutant] = {
    "heads-come-home-rotated": Mutant(
        "heads come home to the next rank's place", f"{_RESULTS}.home", wrap(_rotated), "logic"
    ),
    "results-rounded-before-they-travel": Mutant(
        "results that are handed over are rounded to bfloat16", f"{_RESULTS}._handed_over", wrap(_rounded), "logic"
    ),
    "one-lse-travels-for-all-rows": Mutant(
        "of the lse that travels every row has the first row's",
        "cp_fast.exchanges._ByGroup.post",
        wrap(_columns_left_behind),
        "logic",
    ),
    "one-max-logit-for-all-heads": Mutant(
        "max_logit is the first head's", "cp_fast.passes.run_forward", wrap(_first_largest), "logic"
    ),
    "rows-taken-for-the-last-ones": Mutant(
        "a launch gets the rows of the one before", "cp_fast.binding._same", wrap(_last_taken), "probes"
    ),
    "accumulators-in-the-inputs-dtype": Mutant(
        "partial results are accumulated in the inputs' dtype",
        "cp_fast.running.wide_dtype cp_fast.passes.wide_dtype",
        lambda _: lambda dtype: dtype,
        "budget",
    ),
    "keys-travel-as-values": Mutant(
        "keys arrive as values, and values as keys",
        f"{_RUN}._given",
        wrap(_keys_travel_as_values),
        "logic",
    ),
    "last-row-not-copied": Mutant(
        "of rows that are put together the last is zero", f"{_RUN}._copy", wrap(_last_row_left_out), "logic"
    ),
    "columns-reversed": Mutant(
        "the lse of rows that are put together is in reverse order",
        "cp_fast.running.put_columns",
        wrap(_columns_reversed),
        "logic",
    ),
    "no-sink-on-the-way": Mutant(
        "outs that travel complete have no sink", "cp_fast.results.add_sink", wrap(_no_sink_on_the_way), "logic"
    ),
    "no-dlse-from-afar": Mutant(
        "the gradient of the lse does not travel with that of out", f"{_RUN}.take", wrap(_no_dlse_from_afar), "logic"
    ),
    "last-part-forgotten": Mutant(
        "the last part is not added to a total", "cp_fast.merge.Total.finish", wrap(_last_part_forgotten), "logic"
    ),
    "rows-in-any-order-are-the-total": Mutant(
        "a part that has every row, in any order, becomes the total",
        "cp_fast.merge.is_all",
        wrap(_some_rows_are_all),
        "logic",
    ),
    "no-lse-of-complete-results": Mutant(
        "outs that arrive complete have lse zero", f"{_RESULTS}.home", wrap(_arrived_lse_left_out), "logic"
    ),
}
