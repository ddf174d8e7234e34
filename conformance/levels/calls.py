"""The common part of the lower levels: calls of an implementation's functions, tensors against exact ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from conformance.implementation import Implementation, Missing
from conformance.reference import describe_error, is_out_of_memory
from conformance.run import UnsupportedCase

__all__ = ["Raised", "call", "dtype_of", "parts_of", "same_bytes", "shape_findings", "worst"]


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
    """What a function returned, a tuple of tensors called `parts`. Raises Raised where it is none."""
    found = [type(x).__name__ for x in returned] if isinstance(returned, tuple | list) else []
    if len(found) != len(parts) or not all(isinstance(x, torch.Tensor) for x in returned):
        what = f"({', '.join(found)})" if found else type(returned).__name__
        raise Raised(f"{name} returned {what}; it must return tensors ({', '.join(parts)})")
    return tuple(returned)


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of this name."""
    return getattr(torch, name)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shapes, dtypes and bits; NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, other = (x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(one, other)


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


def worst(name: str, got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor | float) -> list[str]:
    """A finding about the value that exceeds its bound by most. NaN is no value; infinities have to be equal."""
    got = got.detach().double()
    error = torch.where(got == exact, 0.0, (got - exact).abs()).nan_to_num(nan=torch.inf)
    over = error - bound
    if not over.numel() or over.max() <= 0:
        return []
    at = tuple(int(n) for n in torch.unravel_index(over.argmax(), over.shape))
    allowed = bound[at].item() if isinstance(bound, torch.Tensor) else bound
    return [
        f"{name}{list(at)} is {got[at].item():.9g}, but should be {exact[at].item():.9g} "
        f"(error {error[at].item():.2g}, allowed {allowed:.2g}; {int((over > 0).sum())} of {over.numel()} values are "
        "wrong)"
    ]
