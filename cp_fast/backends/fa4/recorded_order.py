"""The steps of a recorded launch in an order that needs little memory.

A library allocates all of its memory and then launches. Here memory is allocated before its first use and freed after
its last. Kernels and fills keep the library's order, because a kernel may start early, while its predecessor ends, and
relies on that predecessor. Independent kernels at the end are reordered: the one that needs the least new memory goes
first. FlashAttention 4 rounds dq, dk and dv at the end, each from a separate accumulator. None of the three exists
while the large kernel runs, and dq, the largest, is allocated once the accumulators of the others are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Step", "in_little_memory"]

_ALLOCATES = (torch.empty, torch.empty_like)  # They do nothing on the device.


class Step(NamedTuple):
    """A call. At `places` its arguments are tensors of the record, by number."""

    call: Callable[..., Any]
    arguments: list[Any]
    places: tuple[tuple[int, int], ...]
    options: dict[str, Any]
    made: int  # The number of the tensor that it makes, or changes and returns; -1 for none.
    last: tuple[int, ...] = ()  # Tensors without a later use.

    @property
    def tensors(self) -> set[int]:
        """All tensors that it reads, makes or changes."""
        return {number for _, number in self.places} | ({self.made} if self.made >= 0 else set())


def in_little_memory(
    steps: Sequence[Step], sizes: Sequence[int], given: int, results: Sequence[int]
) -> tuple[Step, ...]:
    """The same steps.

    Args:
        sizes: bytes of every tensor, by its number.
        given: how many there are before the first step, with the numbers from 0; they are only read.
        results: those that stay to the end.

    >>> def step(call, *tensors, made=-1):
    ...     return Step(call, [], tuple(enumerate(tensors)), {}, made)
    >>> made = [step(torch.empty, made=1), step(torch.empty, made=2), step(torch.empty, made=3), step("zeros", made=4)]
    >>> ran = [step("add", 0, 3, 4), step("round 3", 3, 1), step("round 4", 4, 2)]
    >>> ordered = in_little_memory([*made, *ran], [0, 40, 10, 80, 20], 1, [1, 2])
    >>> [one.made if one.call is torch.empty else (one.call, one.last) for one in ordered]
    [('zeros', ()), 3, ('add', (0,)), 2, ('round 4', (4,)), 1, ('round 3', (3,))]
    """
    allocated = {one.made: one for one in steps if one.call in _ALLOCATES and one.made >= given}
    ran = [one for one in steps if one is not allocated.get(one.made)]
    end, used = len(ran), set[int]()
    while end and used.isdisjoint(its := {number for number in ran[end - 1].tensors if number >= given}):
        end, used = end - 1, used | its
    ran[end:] = sorted(ran[end:], key=lambda one: sum(sizes[number] for number in one.tensors & allocated.keys()))
    ordered: list[Step] = []
    for one in ran:
        ordered += [allocated.pop(number) for number in sorted(one.tensors & allocated.keys())]
        ordered.append(one)
    ordered += [allocated[number] for number in dict.fromkeys(results) if number in allocated]
    needed = set(results)
    for n in reversed(range(len(ordered))):
        last = ordered[n].tensors - needed
        needed |= last
        ordered[n] = ordered[n]._replace(last=tuple(sorted(last)))
    return tuple(ordered)
