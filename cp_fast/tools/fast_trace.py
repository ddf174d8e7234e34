"""`trace`, as `cp_fast` has it: that of `cp_ref`, which must not end empty."""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

__all__ = ["trace"]


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
    with importlib.import_module("cp_ref").trace(call) as recorded:
        yield recorded
    if not len(recorded):
        raise RuntimeError(
            f"trace(call={call}) recorded nothing: the block made no such call of cp_ref.attention; a trace records "
            "cp_ref, so write 'import cp_ref as cp' where the model has 'import cp_fast as cp'"
        )
