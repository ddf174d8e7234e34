"""Whether two strided tensors share an element: a tensor that is changed in place must not be read at the same time.

Nothing here looks at a value; a tensor is its address, shape, strides and element size.
"""

from __future__ import annotations

from typing import Any

__all__ = ["check_apart", "overlap"]

_STEPS = 10_000  # The search limit; tensors with nested axes need a few.


def check_apart(name: str, written: Any, **read: Any) -> None:
    """Raise ValueError where one of the tensors `read` shares memory with the tensor `written`."""
    for other, x in read.items():
        if x.device == written.device and overlap(written, x):
            raise ValueError(f"{name} and {other} overlap in memory; {name} is changed in place, so they must not")


def overlap(a: Any, b: Any) -> bool:
    """Whether some byte belongs to an element of both. Interleaved views, such as K and V of one [t, 2, h, d], share
    none although each lies between the other's elements.

    >>> import torch
    >>> kv = torch.zeros(6, 2, 4)
    >>> overlap(kv[:, 0], kv[:, 1]), overlap(kv[:4, 0], kv[2:, 0]), overlap(kv, kv[5])
    (False, True, True)
    """
    if not a.numel() or not b.numel():
        return False
    # steps[stride] = (least, most): distances between elements of a and b, in multiples of each stride in bytes.
    steps: dict[int, tuple[int, int]] = {}
    for x, sign in ((a, 1), (b, -1)):
        for size, stride in zip(x.shape, x.stride(), strict=True):
            if size > 1 and stride:
                low, high = steps.get(stride * x.element_size(), (0, 0))
                reach = sign * (size - 1)
                steps[stride * x.element_size()] = (low + min(reach, 0), high + max(reach, 0))
    distance = b.data_ptr() - a.data_ptr()
    least, most = distance - a.element_size() + 1, distance + b.element_size() - 1
    return _reaches(sorted(steps.items(), reverse=True), least, most)


def _reaches(steps: list[tuple[int, tuple[int, int]]], least: int, most: int) -> bool:
    """Whether multiples of the strides, each within its bounds, add up to a number from `least` to `most`. True if the
    search takes too long.
    """
    rest = [(0, 0)]  # Sums of the strides from each one on.
    for stride, (low, high) in reversed(steps):
        rest.append((rest[-1][0] + stride * low, rest[-1][1] + stride * high))
    rest.reverse()
    pending = [(0, least, most)]
    for _ in range(_STEPS):
        if not pending:
            return False
        n, least, most = pending.pop()
        if least > rest[n][1] or most < rest[n][0]:
            continue
        if n == len(steps):
            return True
        stride, (low, high) = steps[n]
        first = max(low, -((rest[n + 1][1] - least) // stride))  # The rest reaches `least` from here.
        last = min(high, (most - rest[n + 1][0]) // stride)
        pending += [(n + 1, least - stride * k, most - stride * k) for k in range(first, min(last, first + _STEPS) + 1)]
    return True
