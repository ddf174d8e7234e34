"""The rows of tokens among what a model's function of images returns, and a rank's share of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

__all__ = ["fields_of", "rows_in", "with_rows"]

_LAYERS = "deepstack_features"  # of each of some layers: rows, or lists of them
_PROJECTED, _PLAIN = ("pooler_output", _LAYERS), ("last_hidden_state",)
Take = Callable[[torch.Tensor], torch.Tensor]


def fields_of(out: Any) -> tuple[tuple[str, ...], int]:
    """The names of a function's outputs that have a row for each token, and how many these are.

    They are `pooler_output` and `deepstack_features`, or `last_hidden_state` where neither has rows.

    Raises:
        TypeError: it returns no such rows.
    """
    named = _named(out)
    for names in (_PROJECTED, _PLAIN):
        counts = {name: found for name in names if (found := _counts(named.get(name)))}
        if counts:
            count = max(next(iter(counts.values()))) if names[0] in counts else min(next(iter(counts.values())))
            return tuple(name for name, found in counts.items() if count in found), count
    raise TypeError(f"it returns {type(out).__name__} without rows of tokens")


def rows_in(out: Any, fields: Sequence[str]) -> int:
    """How many rows the first of these outputs has."""
    counts = _counts(_named(out).get(fields[0]))
    if not counts:
        raise TypeError(f"{fields[0]} of {type(out).__name__} has no rows of tokens")
    return min(counts) if fields[0] == _LAYERS else max(counts)


def with_rows(out: Any, count: int, take: Take, fields: Collection[str]) -> Any:
    """The outputs of a function of images with other rows: `take` makes them of all rows [count, d].

    A tensor [..., d] with `count` rows is one of all rows, and so is a list of tensors that have as many together. Both
    keep their number of axes.

    Args:
        fields: the names of the outputs with rows; all else stays as it is.

    Raises:
        ValueError: there are more rows, or fewer.

    >>> some = {"pooler_output": [torch.ones(2, 3), torch.zeros(1, 3)], "deepstack_features": [torch.ones(3, 4)]}
    >>> found = with_rows(some, 3, lambda rows: rows[:2], some)
    >>> found["pooler_output"][0].shape, found["deepstack_features"][0].shape
    (torch.Size([2, 3]), torch.Size([2, 4]))
    """
    names = _named(out)

    def other(value: Any, layers: bool) -> Any:
        if _is_rows(value) or _is_list_of_rows(value):
            some = [value] if isinstance(value, torch.Tensor) else value
            every = torch.cat([x.flatten(0, -2) for x in some])
            if len(every) == count:
                rows = take(every)
                rows = rows.view(*[1] * (some[0].dim() - 2), *rows.shape)
                return rows if isinstance(value, torch.Tensor) else type(value)([rows])
            if not layers or count not in _counts(value):
                raise ValueError(f"they have {len(every)} rows, and the batch has {count} tokens for them")
        if isinstance(value, list | tuple):
            return type(value)(
                [other(one, layers=False) if _is_list_of_rows(value) else other(one, layers) for one in value]
            )
        return value

    if not isinstance(out, Mapping):
        raise TypeError(f"a function of images returns {type(out).__name__}, without names: set return_dict to True")
    kind: Any = type(out)
    return kind(**{name: other(value, name == _LAYERS) if name in fields else value for name, value in names.items()})


def _named(out: Any) -> dict[str, Any]:
    return dict(out.items()) if isinstance(out, Mapping) else {}


def _is_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.is_floating_point()


def _is_list_of_rows(value: Any) -> bool:
    some = isinstance(value, list | tuple) and value and all(_is_rows(x) for x in value)
    return bool(some) and len({x.shape[-1] for x in value}) == 1


def _counts(value: Any) -> set[int]:
    """How many rows a tensor has, or a list of tensors together, or each one of several of these.

    >>> _counts([torch.ones(2, 3), torch.ones(4, 3)]), _counts([torch.ones(2, 3)] * 3), _counts([(7, torch.ones(5, 3))])
    ({6}, {2, 6}, {5})
    """
    if _is_rows(value):
        return {value[..., 0].numel()}
    if not isinstance(value, list | tuple):
        return set()
    each = [found for one in value if (found := _counts(one))]
    alike = set.intersection(*each) if each else set[int]()
    return alike | ({sum(x[..., 0].numel() for x in value)} if _is_list_of_rows(value) else set())
