"""The implementation under test: what it has to export, and how it is found by name."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from cp_ref.spec import Problem

__all__ = ["Implementation", "context", "load"]


class Implementation(Protocol):
    """A module, or any object, with these members. Signatures as in DESIGN section 4."""

    ContextParallel: Any
    attention: Any
    make_plan: Any
    shard: Any
    unshard: Any
    position_ids: Any
    supports: Any
    Unsupported: Any


def load(name: str) -> Implementation:
    """The implementation called `pkg.module`, or `pkg.module:object`.

    Raises:
        ValueError: it cannot be imported, or lacks members; all of them are named.
    """
    module, _, attribute = name.partition(":")
    try:
        impl: Any = importlib.import_module(module)
        for part in attribute.split(".") if attribute else ():
            impl = getattr(impl, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot load the implementation {name!r}: {error}") from error
    missing = [member for member in Implementation.__annotations__ if not hasattr(impl, member)]
    if missing:
        raise ValueError(f"the implementation {name!r} does not export {', '.join(missing)}")
    return cast("Implementation", impl)


def context(impl: Implementation, problem: Problem, member: Any) -> Any:
    """One rank's ContextParallel for the problem; `member` is its place in the simulated group."""
    split = getattr(member, "split", None) if problem.cp_comm_type == "a2a+p2p" else None
    group = member if split is None else split(problem.a2a_size)
    return impl.ContextParallel(group, problem.cp_comm_type, layout=problem.layout)
