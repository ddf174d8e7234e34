"""The steps of a recorded launch in the order that needs the least memory.

A library allocates all that it needs, and launches then. Here memory is allocated before its first use and let go
after its last; and of steps that do not hang on each other the one goes first that needs the least new memory.
FlashAttention 4 rounds dk, dv and dq at the end, each from an accumulator of its own: none of them is there while the
large kernel runs, and dq, the largest, comes when the accumulators of the others are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["Step", "in_little_memory"]


class Step(NamedTuple):
    """A call, with the arguments that are tensors of the record at `places`, by the tensor's number."""

    call: Callable[..., Any]
    arguments: list[Any]
    places: tuple[tuple[int, int], ...]
    options: dict[str, Any]
    made: int  # the number of the tensor that it makes, or changes and returns; -1 for none
    last: tuple[int, ...] = ()  # tensors that nobody needs after it

    @property
    def tensors(self) -> set[int]:
        """All tensors that it has to do with."""
        return {number for _, number in self.places} | ({self.made} if self.made >= 0 else set())


def in_little_memory(
    steps: Sequence[Step], sizes: Sequence[int], given: int, results: Sequence[int]
) -> tuple[Step, ...]:
    """The same steps. Two that share a tensor keep their order, but for tensors that are given: these are only read.

    Args:
        sizes: bytes of every tensor, by its number.
        given: how many there are before the first step, with the numbers from 0.
        results: those that stay to the end.

    >>> def step(name, *tensors, made=-1):
    ...     return Step(name, [], tuple(enumerate(tensors)), {}, made)
    >>> made = [step("a", made=1), step("b", made=2), step("sum a", made=3), step("sum b", made=4)]
    >>> ran = [step("add", 0, 3, 4), step("to a", 3, 1), step("to b", 4, 2)]
    >>> ordered = in_little_memory([*made, *ran], [0, 40, 10, 80, 20], 1, [1, 2])
    >>> [(one.call, one.last) for one in ordered[3:]]
    [('b', ()), ('to b', (4,)), ('a', ()), ('to a', (3,))]
    """
    makers = {one.made: one for one in steps if _is_maker(one, given)}
    waiting = [one for one in steps if makers.get(one.made) is not one]
    ordered: list[Step] = []
    while waiting:
        ready = [
            n
            for n, one in enumerate(waiting)
            if all(number < given for earlier in waiting[:n] for number in one.tensors & earlier.tensors)
        ]
        first = waiting.pop(min(ready, key=lambda n: sum(sizes[x] for x in waiting[n].tensors & makers.keys())))
        ordered += [makers.pop(number) for number in sorted(first.tensors & makers.keys())]
        ordered.append(first)
    ordered += [makers[number] for number in dict.fromkeys(results) if number in makers]
    needed = {*range(given), *results}
    for n in reversed(range(len(ordered))):
        last = ordered[n].tensors - needed
        needed |= last
        ordered[n] = ordered[n]._replace(last=tuple(sorted(last)))
    return tuple(ordered)


def _is_maker(step: Step, given: int) -> bool:
    """Whether it makes a tensor of nothing but what is given: it may wait until that is needed."""
    return step.made >= given and all(number < given for _, number in step.places)
