"""The schedule that `cp_comm_type="auto"` takes, by a formula in counts of rows and pairs.

Every schedule is right for every problem that it takes, so the choice is one of time and of memory. It is made when a
problem is read, before anything is planned. From then on the problem names its schedule, as if the user had. A problem
decides alone: the counts are integers, and the rest is arithmetic on Python's floats. So all ranks choose the same, and
both packages do.

The estimate of a schedule is the time of its slowest rank, forward and backward:

    kernels    by visible pairs, and by query rows: each costs some keys more in every launch
    launches   a schedule of more steps has more of them, and more partial results to add up
    messages   what no kernel hides: of a2a the rows before attention and the results after it, of the others the last
               gradients, and whatever takes longer than the kernels beside it
    the host   if it needs longer than all of that

Memory counts: a GiB more on a rank has to save `Prices.of_a_gib` of the time. The prices are those of H200s, on every
machine, so all ranks use the same ones. To compile every schedule and to price its instructions is more exact
(`cp_fast.tools.cost`), but takes several times as long as the plan itself.

Skip this on a first reading: each schedule also has its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cp_ref.schedules.areas import UNBOUNDED, pairs
from cp_ref.schedules.planners.visibility import Visibility
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.table import Column
from cp_ref.schedules.verify.costs import ITEM_BYTES

__all__ = [
    "PRICES",
    "Estimate",
    "Prices",
    "choose_schedule",
    "estimates",
    "why_chosen",
]


class Prices(NamedTuple):
    """The costs of work on H200s with 16-bit operands, in microseconds, or the amount of it in one microsecond.

    A test holds those above `grad_copies` to the machine of the cost model (`cp_fast/compile/machines`). The others are
    fitted to records (`python -m benchmarks.cost_model.choices`).

    Attributes:
        flops_per_us: of attention kernels, the mean of both passes.
        edge: the extra keys that a query row costs in each launch.
        inside_per_us, outside_per_us: bytes of a rank's messages, each way, among up to `domain` ranks and among more.
        exchange_us: an exchange, without its bytes.
        launch_us: a launch and its step, without the flops.
        host_us: the host, for a step.
        copied_per_us: bytes that packing and adding read and write.
        idle_rows: the query rows that could be attended to in the time that a launch loses at its end.
        grad_copies: how often gradients that come home are read and written.
        split: the share of their time that kernels lose, on very many ranks, where the keys of a row come in several
            launches. On n ranks it is 1 - 2 / n of that.
        of_a_gib: the share of the time that a GiB of a rank's memory is worth.
    """

    flops_per_us: float = 612e6
    edge: int = 370
    inside_per_us: float = 340e3
    outside_per_us: float = 45e3
    domain: int = 8
    exchange_us: float = 75.0
    launch_us: float = 42.0
    host_us: float = 459.0
    copied_per_us: float = 3.9e6
    idle_rows: int = 64 * 132
    grad_copies: int = 3
    split: float = 0.04
    of_a_gib: float = 0.01


PRICES = Prices()


class Estimate(NamedTuple):
    """A schedule's cost for a problem: microseconds of both passes, and the most bytes of a rank that depend on it."""

    name: str
    us: float
    size: float

    def price(self, least: float, at: Prices) -> float:
        """The time, with the worth of the bytes above the least."""
        return self.us * (1 + at.of_a_gib * (self.size - least) / 2**30)


def choose_schedule(problem: Problem, names: Sequence[str], at: Prices = PRICES) -> Problem:
    """The problem by the schedule of the lowest price.

    Args:
        problem: by "p2p" or "all_gather". The result keeps its tables.
        names: "all_gather", "a2a" and "p2p", or some of them. Of equal ones the first is taken, and "a2a" never where
            it refuses the heads.

    >>> from cp_ref.schedules.problem import Sequence
    >>> sizes = {"heads_q": 32, "heads_kv": 8, "d_qk": 128, "d_v": 128, "dtype": "bfloat16"}
    >>> def chosen(tokens, ranks, **more):
    ...     problem = Problem(ranks, (Sequence(*[tokens] * 4),), **sizes | more)
    ...     return choose_schedule(problem, ["all_gather", "a2a", "p2p"]).cp_comm_type
    >>> chosen(32_768, 2), chosen(65_536, 4), chosen(65_536, 4, window_size=(4096, 0)), chosen(1 << 20, 64)
    ('all_gather', 'a2a', 'all_gather', 'p2p')
    """
    found = estimates(problem, names, at)
    least = min(one.size for one in found)
    return _by(problem, min(found, key=lambda one: one.price(least, at)).name)


def why_chosen(problem: Problem, names: Sequence[str]) -> str:
    """What was chosen, and the estimates, that of the problem's own schedule first.

    >>> from cp_ref.schedules.problem import Sequence
    >>> sizes = {"heads_q": 32, "heads_kv": 8, "d_qk": 128, "d_v": 128, "dtype": "bfloat16"}
    >>> why_chosen(Problem(2, (Sequence(*[32_768] * 4),), "all_gather", **sizes), ["all_gather", "a2a"])
    "'auto' took all_gather by estimates for H200s, both passes: all_gather 27.1 ms, a2a 27.4 ms and 0.19 GiB more"
    """
    found = sorted(estimates(problem, names), key=lambda one: one.name != problem.cp_comm_type)
    least = min(one.size for one in found)
    more = [f" and {(one.size - least) / 2**30:.2f} GiB more" if one.size > least else "" for one in found]
    said = ", ".join(f"{one.name} {one.us / 1000:,.1f} ms{words}" for one, words in zip(found, more, strict=True))
    return f"'auto' took {problem.cp_comm_type} by estimates for H200s, both passes: {said}"


def estimates(problem: Problem, names: Sequence[str], at: Prices = PRICES) -> list[Estimate]:
    """Those of the schedules of these that take the problem's heads."""
    work = _Work(problem, at)
    makers: dict[str, Callable[[], Estimate]] = {"all_gather": work.gathered, "p2p": work.ring, "a2a": work.exchanged}
    size, h_q, h_kv = problem.cp_size, problem.heads_q, problem.heads_kv
    shared = h_q % size == 0 and (h_kv % size == 0 or size % h_kv == 0)
    return [makers[name]() for name in names if name != "a2a" or shared]


def _by(problem: Problem, name: str) -> Problem:
    """The problem by another schedule, with all tables that it has already."""
    if name == problem.cp_comm_type:
        return problem
    size = problem.cp_size if name == "a2a" else 1
    made = replace(problem, cp_comm_type=name, a2a_size=size)
    vars(made).update(lengths=problem.lengths, slots=problem.slots, workload=replace(problem.workload, a2a_size=size))
    return made


# ---- what the ranks have to do


class _Share(NamedTuple):
    """One rank's part of some areas: its query rows, their visible pairs, the key rows of others that they see, and how
    many of its query rows see any of these.
    """

    rows: int
    pairs: int
    received: int
    again: int


def _shares(visibility: Visibility) -> list[_Share]:
    """The part of each ring member, in about the time of making its rows."""
    areas, own, theirs, count = visibility.areas, visibility.query_rows, visibility.key_rows, visibility.member_count
    lo, hi, first, last = areas.lo[own.area], areas.hi[own.area], areas.k_start[own.area], areas.k_stop[own.area]
    visible = _sums(own.member, pairs(own.start, own.stop, first, last, lo, hi), count)
    keys = np.maximum(np.minimum(last, own.stop + hi) - np.maximum(first, own.start + lo), 0)

    cells = count * len(areas)  # For each ring member the areas.
    cell, open_ = own.member * len(areas) + own.area, lo <= -UNBOUNDED
    seen = np.zeros(cells, dtype=np.int64)  # Without a left edge, the last rows of an area see what its first ones see.
    np.maximum.at(seen, cell[open_], keys[open_])
    if not open_.all():
        seen += _sums(cell[~open_], keys[~open_], cells)
    rows = _sums(cell, own.stop - own.start, cells)
    held = rows if theirs is own else _sums(theirs.member * len(areas) + theirs.area, theirs.stop - theirs.start, cells)
    received = np.maximum(np.minimum(seen, np.tile(areas.k_stop - areas.k_start, count)) - held, 0)
    of_areas = rows, received, np.minimum(rows, received)
    rows, received, again = (column.reshape(count, len(areas)).sum(axis=1).tolist() for column in of_areas)
    return [_Share(*some) for some in zip(rows, visible.tolist(), received, again, strict=True)]


def _sums(cell: Column, values: Column, cells: int) -> Column:
    """The sum of the values of each cell, exact below 2**53."""
    return np.bincount(cell, values, cells).astype(np.int64)


# ---- what that costs


class _Work:
    """The work of a problem's ranks, priced."""

    def __init__(self, problem: Problem, at: Prices) -> None:
        self.at, self.ranks, self.tables = at, problem.cp_size, problem.workload
        self.shares = _shares(Visibility(replace(self.tables, a2a_size=1)))
        item = ITEM_BYTES[problem.dtype]
        self.heads_kv, self.wider = problem.heads_kv, max(item, 4) / item  # Sums are in float32 at least.
        self.q, self.out = (problem.heads_q * d * item for d in (problem.d_qk, problem.d_v))  # Bytes of a row.
        self.kv = problem.heads_kv * (problem.d_qk + problem.d_v) * item
        forward = 2 * problem.heads_q * (problem.d_qk + problem.d_v) / at.flops_per_us
        self.a_pair = forward, 2.5 * forward
        self.bytes_per_us = at.inside_per_us if self.ranks <= at.domain else at.outside_per_us

    def gathered(self) -> Estimate:
        """all_gather: forward all keys at once, the first head chunk's unhidden; backward own keys, then all others."""
        us = [
            self._gathering(one) + self._pass(one, min(one.received, 1), 1) + self._home(one, 1) for one in self.shares
        ]
        return self._by_keys("all_gather", max(us), steps=1, blocks=self.ranks - 1)

    def ring(self) -> Estimate:
        """p2p: own keys, then those of each other rank. Two blocks are there at a time."""
        steps = self.ranks - 1
        us = [
            sum(self._pass(one, steps if one.received else 0, n) for n in range(2)) + self._home(one, steps)
            for one in self.shares
        ]
        return self._by_keys("p2p", max(us), steps=steps, blocks=min(2, self.ranks - 1))

    def _by_keys(self, name: str, us: float, steps: int, blocks: int) -> Estimate:
        """Queries stay, and keys of others come in `steps` steps. `blocks` ranks' keys are there at a time."""
        travels = any(one.received for one in self.shares)
        on_host = (2 * steps + 3 if travels else 2) * self.at.host_us
        there = (1 + self.wider) * self.kv * blocks / max(self.ranks - 1, 1)  # Keys and their gradients.
        size = max(one.received * there + one.again * self.q * self.wider for one in self.shares)
        return Estimate(name, max(us, on_host), size)

    def _gathering(self, one: _Share) -> float:
        """Microseconds of one rank's forward pass with all keys at once. A head chunk needs a launch, which is worth it
        where the messages take longer. The step of the messages has no launch.
        """
        at, (a_pair, _) = self.at, self.a_pair
        kernels = a_pair * (one.pairs + at.edge * one.rows)
        travel = one.received * self.kv / self.bytes_per_us
        first = min(travel, travel / self.heads_kv + at.launch_us) if self.heads_kv > 1 else travel
        wait = at.exchange_us - at.launch_us
        unhidden = wait + first + max(0.0, travel - first - kernels) if one.received else 0.0
        return kernels + at.launch_us + unhidden

    def _pass(self, one: _Share, steps: int, number: int) -> float:
        """Microseconds of one rank's forward (0) or backward (1) pass. Its own keys attend first, then the others in
        `steps` steps. steps is 0 for a rank with all keys.
        """
        at, a_pair, row = self.at, self.a_pair[number], (self.out, self.q)[number]
        again = one.again * (1 + steps) / 2 if steps else 0.0  # Half of a ring's blocks are seen by late rows alone.
        lost = at.split * (1 - 2 / self.ranks) * one.again / one.rows if steps else 0.0
        travel = steps * at.exchange_us + one.received * self.kv / self.bytes_per_us
        kernels = (1 + lost) * a_pair * (one.pairs + at.edge * (one.rows + again))
        unhidden = max(0.0, travel - kernels * steps / (1 + steps))
        sums = 2 * again * row * self.wider / at.copied_per_us  # Each is read and written.
        return kernels + (1 + steps) * at.launch_us + unhidden + sums

    def _home(self, one: _Share, steps: int) -> float:
        """Microseconds until the gradients of other ranks' keys are at home. The last of the messages is not hidden."""
        at, grads = self.at, one.received * self.kv * self.wider
        home = at.exchange_us + grads / steps / self.bytes_per_us if one.received else 0.0
        return home + at.grad_copies * grads / at.copied_per_us

    def exchanged(self) -> Estimate:
        """a2a: all heads at once or in three head chunks. The faster one counts."""
        visibility = Visibility(replace(self.tables, a2a_size=self.ranks))
        home = _shares(visibility.at_home) if len(visibility.at_home.areas) else [_Share(0, 0, 0, 0)] * self.ranks
        alone = max(one.pairs + self.at.edge * one.rows for one in home)
        rows = [whole.rows - own.rows for whole, own in zip(self.shares, home, strict=True)]
        if not any(rows):
            us = sum(self.at.launch_us + a_pair * alone for a_pair in self.a_pair)
            return Estimate("a2a", max(us, 2 * self.at.host_us), 0.0)
        work = int(visibility.exchanged.areas.pairs.sum()) + self.at.edge * sum(rows)
        heads = self.heads_kv // self.ranks
        chunks = [(1, 1.0), *([(3, 1 / heads)] if heads >= 3 else [])]
        us = min(self._exchange(*some, alone, work, max(rows), sum(rows)) for some in chunks)
        return Estimate("a2a", us, 2 * max(rows) * (self.q + self.out + self.kv))

    def _exchange(self, chunks: int, ends: float, alone: int, work: int, most: int, rows: int) -> float:
        """Microseconds of both passes.

        Args:
            chunks: of heads.
            ends: the share of the heads in the first chunk, whose rows nothing hides, and in the last, whose results
                nothing hides.
            alone, work: pairs, with what rows cost: of documents at home, and of all others on all ranks.
            most, rows: that are exchanged, of a rank and of all.
        """
        at, copies = self.at, max(1, self.ranks // self.heads_kv)
        sent, kv, us = most * (self.ranks - 1) / self.ranks, self.kv * copies, 0.0
        for a_pair, come, leave in zip(self.a_pair, (self.q + kv, self.out), (self.out, self.q + kv), strict=True):
            kernels = a_pair * work / self.ranks
            tails = (chunks - 1) * kernels * at.idle_rows / rows
            hidden = max(0.0, (1 - ends) * sent * (come + leave) / self.bytes_per_us - kernels)
            us += kernels + tails + hidden + chunks * at.launch_us + 4 * sent * (come + leave) / at.copied_per_us
            us += max(at.exchange_us + ends * sent * come / self.bytes_per_us, a_pair * alone)
            us += at.exchange_us + ends * sent * leave / self.bytes_per_us
        return max(us, (4 + 2 * chunks) * at.host_us)
