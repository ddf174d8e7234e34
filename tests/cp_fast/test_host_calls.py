"""What the host does for a planned call, in numbers that are the same on every machine."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import cp_fast
from tests.cp_fast.memory.one_rank import call_of

OURS = str(Path(cp_fast.__file__).parent)


class Operators(TorchDispatchMode):
    """Counts PyTorch's operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("comm", "size", "calls", "operators"), [("p2p", 2, 180, 41), ("p2p", 4, 340, 87), ("a2a", 2, 270, 86)]
)
def test_a_call_is_few_calls_of_the_host(comm: Any, size: int, calls: int, operators: int) -> None:
    """Forward and backward, calls of functions of `cp_fast` that are no comprehensions: a limit, and not far above."""
    call = call_of(comm, size, 0, 16, (8, 2), 16)
    call()
    found: Counter[str] = Counter()

    def look(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS) and not code.co_name.startswith("<"):
            found[code.co_name] += 1

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert 0.9 * calls <= found.total() <= calls, found.most_common(12)
    with Operators() as counted:
        call()
    assert 0.9 * operators <= counted.count <= operators
