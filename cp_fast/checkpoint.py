"""Activation checkpointing that does not compute attention, or send its messages, a second time.

    from cp_fast.checkpoint import save_attention

    checkpoint(layer, x, use_reentrant=False, context_fn=save_attention())

To PyTorch's selective checkpointing each call of `attention` is one operator, `attention_forward` of this module. So
is each of `select_keys`, `sparse_attention` and `index_loss`: `SAVED` has all of them. A policy of your own may name
them too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from cp_fast.api.attention import FORWARD
from cp_fast.layers.sparse_attention import OPERATORS
from cp_fast.runtime.handles import hide_from_checkpointing
from cp_ref.schedules.values import check_flag
from cp_ref.schedules.words import Unsupported

__all__ = ["SAVED", "attention_forward", "save_attention"]

attention_forward = FORWARD
SAVED = FORWARD, *OPERATORS  # all operators whose results are saved
Policy = Callable[..., CheckpointPolicy | bool]


def save_attention(policy: Policy | None = None, *, offload: bool = False) -> Callable[[], tuple[Any, Any]]:
    """Make the `context_fn` of `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` that saves attention's
    results.

    Saved are out [.., h_q, d_v] and lse of each call; in the schedules that exchange heads (`a2a`, `a2a+p2p`) also the
    rows that the exchange has brought, as the backward pass needs them. The indices of `select_keys` and the results
    of `sparse_attention` and `index_loss` are saved too: no key is chosen twice. All else is recomputed, or goes by
    `policy`. The bits are those of a step without checkpointing.

    Args:
        policy: what happens to all other operators, as `create_selective_checkpoint_contexts` of PyTorch takes it:
            called with (context, operator, *args, **kwargs), it returns a `CheckpointPolicy` or a bool. None: every
            other operator is recomputed. It is not asked about attention.
        offload: whether the saved tensors wait in the host's memory, which is pinned on CUDA. They go there on a
            stream of their own in the forward pass. In the backward pass they come back one call ahead. Use one
            `save_attention(offload=True)` for all layers of a model: its calls form one sequence. Until the next
            call, the results of a call must not be changed in place.

    Returns:
        A function without arguments. Each call of it returns the two contexts of one checkpointed region.

    Raises:
        TypeError: policy cannot be called, or offload is not a bool. When a region runs, Unsupported: offload inside
        torch.compile, or in a CUDA graph. RuntimeError: results were changed in place before they had left.

    >>> from torch.utils.checkpoint import checkpoint
    >>> x = torch.ones(2, requires_grad=True)
    >>> y = checkpoint(torch.sin, x, use_reentrant=False, context_fn=save_attention())
    >>> y.sum().backward()
    >>> torch.equal(x.grad, x.detach().cos())
    True
    """
    check_flag("offload", offload)
    if policy is not None and not callable(policy):
        raise TypeError(f"policy is a {type(policy).__name__}; it must be a function or None")
    decide = policy or _recompute

    def contexts(of_attention: CheckpointPolicy) -> tuple[Any, Any]:
        def decided(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
            return of_attention if operator in SAVED else decide(context, operator, *args, **kwargs)

        return create_selective_checkpoint_contexts(decided)

    def saving_contexts() -> tuple[Any, Any]:
        return contexts(CheckpointPolicy.MUST_SAVE)

    last = LastCall()

    def offloading_contexts() -> tuple[Any, Any]:
        if torch.compiler.is_compiling():
            raise Unsupported(
                "save_attention(offload=True) inside torch.compile", {}, "compile what lies inside a layer"
            )
        around = None if policy is None else contexts(CheckpointPolicy.MUST_RECOMPUTE)  # `last` has the results.
        return offloading(last, around)

    return offloading_contexts if offload else saving_contexts


def _recompute(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


# ---- results of attention that wait for the backward pass in the host's memory
#
# The calls of a forward pass are in order, and each one knows the call before it. A call starts to copy its results to
# the host as soon as it has them. The next call waits for this copy, and then frees the results on the device. In the
# backward pass a call that restores its results prefetches those of the call before it. So the device holds the results
# of at most two calls, whatever the number of layers.
#
# Memory on the device belongs to the current stream, whose order alone frees it. The other stream begins a copy when
# the current one has come to it, and the current one waits for the end before it goes on.

_streams: dict[torch.device, torch.cuda.Stream] = {}


class LastCall(threading.local):
    """The last call of a forward pass, in each thread."""

    call: weakref.ref[_SavedCall] | None = None


class _Copies:
    """Copies to or from the host's memory, on a separate stream where there are streams."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> None:
        self._done: torch.cuda.Event | None = None
        with ExitStack() as stack:
            if device.type == "cuda":
                if device not in _streams:
                    _streams[device] = torch.cuda.Stream(device)
                stream = _streams[device]
                stream.wait_stream(torch.cuda.current_stream(device))
                stack.enter_context(torch.cuda.stream(stream))
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            if device.type == "cuda":
                self._done = torch.cuda.Event()
                self._done.record()

    def wait(self) -> None:
        """Let the current stream wait for them."""
        if self._done is not None:
            self._done.wait()


class _SavedCall:
    """The results of one call, on their way to the host's memory and back."""

    def __init__(self, results: Sequence[torch.Tensor], last: LastCall) -> None:
        self._device = results[0].device
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise Unsupported("save_attention(offload=True) in a CUDA graph", {}, "capture without offload")
        self._before = last.call
        if (before := self._previous()) is not None:
            before.free_on_device()
        self._on_device: list[torch.Tensor] | None = [_alias(x) for x in results]
        self._versions = [x._version for x in self._on_device]
        self._on_host = [host_memory_for(x) for x in self._on_device]
        self._copies: _Copies | None = _Copies(list(zip(self._on_host, self._on_device, strict=True)), self._device)
        last.call = weakref.ref(self)

    def free_on_device(self) -> None:
        """Free the results on the device, once they are copied."""
        if self._on_device is None:
            return
        if [x._version for x in self._on_device] != self._versions:
            raise RuntimeError(
                "attention's results were changed in place while save_attention(offload=True) copied them; change a "
                "copy, or use save_attention()"
            )
        if self._copies is not None:
            self._copies.wait()
        self._on_device = self._copies = None

    def prefetch(self) -> None:
        """Start to copy the results back to the device, if they are not there."""
        if self._on_device is None:
            self._on_device = [torch.empty_like(x, device=self._device) for x in self._on_host]
            self._copies = _Copies(list(zip(self._on_device, self._on_host, strict=True)), self._device)
            self._versions = [x._version for x in self._on_device]

    def restore(self) -> list[torch.Tensor]:
        """The results, on the device; those of the call before are prefetched."""
        self.prefetch()
        results = self._on_device
        assert results is not None
        self.free_on_device()
        if (before := self._previous()) is not None:
            before.prefetch()
        return results

    def _previous(self) -> _SavedCall | None:
        return None if self._before is None else self._before()


def _alias(x: torch.Tensor) -> torch.Tensor:
    """The same memory and version, without the graph that x will belong to, which would hold the saved call."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def host_memory_for(x: torch.Tensor) -> torch.Tensor:
    """Memory of the host for a tensor, pinned where copies from and to its device need that."""
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)


class _OffloadMode(TorchDispatchMode):
    """The first pass of a region: the results of each call go to the host's memory."""

    def __init__(self, last: LastCall, calls: list[_SavedCall]) -> None:
        super().__init__()
        self._last, self._calls = last, calls

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func in SAVED:
            with (
                hide_from_checkpointing()
            ):  # a policy around it must not save copies, which the recomputation makes in another order
                self._calls.append(_SavedCall(results, self._last))
        return results


class _RestoreMode(TorchDispatchMode):
    """A region's recomputation: each call has its results already."""

    def __init__(self, calls: list[_SavedCall]) -> None:
        super().__init__()
        self._calls, self._number = calls, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self._number = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in SAVED:
            return func(*args, **(kwargs or {}))
        if self._number == len(self._calls):
            raise RuntimeError("a checkpointed region calls attention more often when it is recomputed than before")
        self._number += 1
        with hide_from_checkpointing():
            return self._calls[self._number - 1].restore()


class _Both:
    """Two contexts as one, the second inside the first. It may be entered again after its end."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._contexts, self._stack = (outer, inner), ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *raised: Any) -> Any:
        return self._stack.__exit__(*raised)


def offloading(last: LastCall, around: tuple[Any, Any] | None) -> tuple[Any, Any]:
    """The two contexts of one checkpointed region: of its first pass, and of its recomputation.

    Args:
        last: that of all regions of a model.
        around: the two contexts that decide about all other operators; None where all of them are recomputed.
    """
    calls: list[_SavedCall] = []
    first, again = _OffloadMode(last, calls), _RestoreMode(calls)
    return (first, again) if around is None else (_Both(around[0], first), _Both(around[1], again))
