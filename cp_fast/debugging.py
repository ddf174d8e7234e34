"""The names of `cp_ref` that debug, as `cp_fast` has them: looked up when they are asked for.

Nothing of the fast path is computed by them. They are the oracle, the simulated group and the recorder of `cp_ref`, so
that a debugging session needs one import.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

__all__ = ["OF_THE_REFERENCE", "of_the_reference", "trace"]

OF_THE_REFERENCE = ("SimGroup", "Trace", "compare", "dense_attention")


def of_the_reference(name: str) -> Any:
    """One of these objects of `cp_ref`, which is imported now.

    >>> of_the_reference("SimGroup")(2).run(lambda member: member.rank)
    [0, 1]
    """
    return getattr(importlib.import_module("cp_ref"), name)


@contextmanager
def trace(call: int = 0) -> Generator[Any]:
    """Record every intermediate of one `cp_ref.attention` call in this block, as `cp_ref.trace` does.

    `cp_fast.attention` keeps no intermediates, so the block must call `cp_ref.attention`: write
    `import cp_ref as cp` in the model.

    Args:
        call: which call of each rank inside the block, from 0: in a model, the number of the layer.

    Yields:
        The `Trace`.

    Raises:
        RuntimeError: inside another trace; or the block made no such call.

    >>> with trace() as t:
    ...     pass
    Traceback (most recent call last):
        ...
    RuntimeError: trace(call=0) recorded nothing: the block made no such call of cp_ref.attention; a trace records \
cp_ref, so write 'import cp_ref as cp' where the model has 'import cp_fast as cp'
    """
    with of_the_reference("trace")(call) as recorded:
        yield recorded
    if not len(recorded):
        raise RuntimeError(
            f"trace(call={call}) recorded nothing: the block made no such call of cp_ref.attention; a trace records "
            "cp_ref, so write 'import cp_ref as cp' where the model has 'import cp_fast as cp'"
        )
