"""The part of `cp_fast` that `conformance.step` uses: contexts over processes, and a note of every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import cp_fast
from cp_fast.api import attention as api
from cp_fast.layers.layers import Run
from cp_ref.schedules.problem import Problem

__all__ = ["Seen", "context", "watched_calls"]

Seen = Callable[[Problem, Any, str], None]


def context(group: Any, cp_comm_type: Any, layout: Any) -> cp_fast.ContextParallel:
    """`cp_fast.ContextParallel` of a ProcessGroup, or of a pair of them for "a2a+p2p"."""
    return cp_fast.ContextParallel(group, cp_comm_type, layout=layout)


@contextmanager
def watched_calls(seen: Seen) -> Iterator[None]:
    """While it lasts, `seen(problem, softmax_offset, what)` is called before every forward pass, eager and compiled:
    of "attention" (dense, or of chosen or compressed keys), "linear_attention", "causal_conv1d" and "compress_keys".
    """
    original, layer_forward = api.forward_pass, Run.forward

    def watched(call: Any, cp: Any, q: Any, k: Any, v: Any, offset: Any, *more: Any, **how: Any) -> Any:
        seen(call.packing.problem, offset, "attention")
        return original(call, cp, q, k, v, offset, *more, **how)

    def watched_layer(run: Run, tensors: Any) -> Any:
        name = run.layer.name
        if name in ("linear_attention", "causal_conv1d", "compress_keys"):
            seen(run.plan.problem, None, name)
        elif name in ("sparse_attention", "compressed_attention"):
            seen(run.plan.problem, tensors[-1], "attention")
        return layer_forward(run, tensors)

    with ExitStack() as stack:
        stack.enter_context(patch.object(api, "forward_pass", watched))
        stack.enter_context(patch.object(Run, "forward", watched_layer))
        yield
