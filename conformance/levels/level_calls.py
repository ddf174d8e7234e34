"""The common part of the lower levels: calls of an implementation's functions, and the form of what they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from conformance.implementation import Implementation, Missing
from conformance.judge.ranks import UnsupportedCase
from conformance.judge.reference import describe_error, is_out_of_memory

__all__ = ["Raised", "call", "parts_of", "shape_findings"]


class Raised(Exception):
    """The implementation raised what it should not have."""


def call(impl: Implementation, fn: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """`fn(*arguments, **options)`.

    Raises:
        UnsupportedCase: it raised the implementation's `Unsupported`, or NotImplementedError.
        Raised: it raised anything else; but for Missing, and for what says that memory is out.
    """
    try:
        return fn(*arguments, **options)
    except (impl.Unsupported, NotImplementedError) as refusal:
        raise UnsupportedCase(str(refusal)) from refusal
    except (Exception, SystemExit) as error:
        if isinstance(error, Missing) or is_out_of_memory(error):
            raise
        raise Raised(f"{getattr(fn, '__name__', 'it')} raised {describe_error(error)}") from error


def parts_of(name: str, returned: Any, *parts: str) -> tuple[torch.Tensor, ...]:
    """The tuple of tensors that a function returned, named `parts`. Raises Raised for anything else."""
    found = [type(x).__name__ for x in returned] if isinstance(returned, tuple | list) else []
    if len(found) != len(parts) or not all(isinstance(x, torch.Tensor) for x in returned):
        what = f"({', '.join(found)})" if found else type(returned).__name__
        raise Raised(f"{name} returned {what}; it must return tensors ({', '.join(parts)})")
    return tuple(returned)


def shape_findings(name: str, got: Any, shape: Sequence[int] | torch.Size, dtypes: Sequence[torch.dtype]) -> list[str]:
    """Findings about a result's type, shape and dtype."""
    if not isinstance(got, torch.Tensor):
        return [f"{name} is a {type(got).__name__}; it must be a tensor"]
    found = []
    if list(got.shape) != list(shape):
        found.append(f"{name} has shape {list(got.shape)}, but should have {list(shape)}")
    if got.dtype not in dtypes:
        found.append(f"{name} has dtype {got.dtype}, but should have {' or '.join(map(str, dict.fromkeys(dtypes)))}")
    return found
