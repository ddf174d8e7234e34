"""One rank of a planned call, alone and on a CPU: peer memory without peers, a kernel library that only allocates.

What arrives means nothing. What the rank's host does, and what it holds meanwhile, is what it would on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cp_fast
from cp_fast.compile.instruction_passes import low_precision_grads, of_one_launch
from cp_fast.compile.program import Send
from cp_fast.kernels.attention.backend_protocol import Backend, BackwardOperands, Gradients, Partial
from cp_fast.transport.peer_exchange import PeerMessages, SharedMemory
from cp_fast.transport.watch import Watch
from cp_ref import SimGroup
from cp_ref.calls.declared import replaced
from cp_ref.groups.group import PaperGroup

__all__ = ["Allocated", "arguments_of", "call_of"]


class Allocates(Backend):
    """Allocates what FlashAttention 4 does on Hopper where heads are grouped, in the order of its recorded launches."""

    rounded_gradients = True

    def __init__(self, features: Any) -> None:
        self.name, self.features = "allocates", features

    def why_not(self) -> str | None:
        return None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Partial:
        out = q.new_empty(*q.shape[:2], v.shape[2])
        return Partial(out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32), None)

    def backward(self, given: list[BackwardOperands], *rest: Any) -> Gradients:
        dtype, (q, k, v) = given[0].q.dtype, [torch.empty_like(x, dtype=torch.float32) for x in given[0][1:4]]
        given.clear()  # the large kernel has read them; then each accumulator is rounded, and goes
        dk = torch.empty_like(k, dtype=dtype)
        del k
        dv = torch.empty_like(v, dtype=dtype)
        del v
        return Gradients(torch.empty_like(q, dtype=dtype), dk, dv)


class _Streams:
    """Nothing is copied, signalled or waited for."""

    filling, pulling = 1, 2

    def here(self) -> int:
        return 0

    def capturing(self) -> bool:
        return False

    def copy(self, stream: int, to: int, source: int, size: int) -> None:
        pass

    def signal(self, stream: int, *words: tuple[Any, int]) -> None:
        pass

    def wait(self, stream: int, word: Any, number: int) -> None:
        pass

    def fork(self, here: int, *streams: int) -> None:
        pass

    def meet(self) -> None:
        pass

    def mark(self) -> None:
        pass

    def join(self, here: int) -> None:
        pass


@dataclass(frozen=True)
class _Said(PaperGroup):
    """A rank that knows what everyone says."""

    everyone: tuple[Any, ...] = ()

    def all_gather_object(self, value: Any) -> list[Any]:
        return list(self.everyone)


def _messages(rank: int, size: int) -> PeerMessages:
    words, staging = list(range(size)), 2**40
    shared = SharedMemory(words, words, words, words, words, (staging,) * (size - 1), torch.zeros(1), None)
    watch = Watch([f"rank {n}" for n in range(size)], rank, 600, lambda: 2**30, 0, lambda why: None)
    return PeerMessages(PaperGroup(size, rank), shared, _Streams(), watch)


Arguments = tuple[cp_fast.ContextParallel, cp_fast.Plan, list[torch.Tensor], torch.Tensor]


def call_of(comm: Any, size: int, rank: int, tokens: int, heads: tuple[int, int], dim: int) -> Callable[[], Any]:
    """A call of this rank, forward and backward: `tokens` rows a rank of one causal sequence."""
    cp, plan, qkv, dout = arguments_of(comm, size, rank, heads, dim, [tokens * size])

    def call() -> Any:
        out = cp_fast.attention(*qkv, cp=cp, plan=plan)
        with torch.autograd.set_multithreading_enabled(False):
            return out, *torch.autograd.grad(out, qkv, dout)

    return call


def arguments_of(
    comm: Any,
    size: int,
    rank: int,
    heads: tuple[int, int],
    dim: int,
    lengths: Sequence[int],
    layout: Any = "dual_chunk",
) -> Arguments:
    """A context, a plan, (q, k, v) and dout of this rank, for causal sequences of these lengths in bfloat16; heads: of
    q and of k and v.
    """
    layout = layout or "dual_chunk"
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    how: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": ends, "device": "cpu", "dtype": torch.bfloat16}
    how |= {"heads_q": heads[0], "heads_kv": heads[1], "d_qk": dim, "d_v": dim}
    plans = SimGroup(size).run(
        lambda member: cp_fast.make_plan(cp=cp_fast.ContextParallel(member, comm, layout=layout), **how)
    )
    messages = _messages(rank, size)
    programs, backend = plans[rank].programs, Allocates(plans[rank].backend.features)
    if comm == "p2p":
        backward = [(plan.programs.backward, of_one_launch(plan.programs.backward)) for plan in plans]
        said = [[(x.peer, x.tag) for x in its.of(Send) if x.source.buffer in single] for its, single in backward]
        programs = low_precision_grads(programs, _Said(size, rank, tuple(said)), rounded=True)
    batch = replace(plans[rank].batch, backend=backend, messages=messages, programs=programs)
    plan = replaced(plans[rank], batch=batch)
    rows = sum(lengths) // size
    q, k, v, dout = (torch.zeros(rows, n, dim, dtype=torch.bfloat16) for n in (*heads, heads[1], heads[0]))
    qkv = [x.requires_grad_() for x in (q, k, v)]
    return cp_fast.ContextParallel(messages, comm, layout=layout), plan, qkv, dout


class Allocated(TorchDispatchMode):
    """Counts the bytes that operators allocate, until their memory goes."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._live:
                    self._live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._gone, storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
        return result

    def _gone(self, key: int) -> None:
        self.now -= self._live.pop(key)
