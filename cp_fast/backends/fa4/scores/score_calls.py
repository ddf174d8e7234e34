"""The library's two functions with a program of scores in place of a score_mod, as functions of tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from cp_fast.backends.fa4.scores.library_modules import library
from cp_fast.backends.fa4.scores.score_kernels import backward_kernel, forward_kernel

__all__ = ["score_arguments", "score_call"]


def score_arguments(count: int) -> tuple[str, ...]:
    """The names of `count` tensors that a program reads."""
    return tuple(f"score_tensor_{n}" for n in range(count))


def score_call(interface: ModuleType, name: str, count: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A function of the library that takes the arguments of `score_arguments`, `program` and `first_head` too."""
    function, names = getattr(interface, name), score_arguments(count)

    def call(*, program: Any, first_head: int, **arguments: Any) -> tuple[torch.Tensor, ...]:
        int32 = library("cutlass").Int32
        tensors = [arguments.pop(one) for one in names]
        mods = {"score_mod": program} | ({"score_mod_bwd": program} if name == "_flash_attn_bwd" else {})
        if program.dropout_p and name == "_flash_attn_fwd":
            mods["pack_gqa"] = False  # Rows 8 apart are queries 8 apart: they share random words.
        with _kernels(interface):
            return function(**arguments, **mods, aux_tensors=tensors, aux_scalars=(int32(first_head),))

    call.compile_cache = function.compile_cache  # type: ignore[attr-defined]
    return call


@contextmanager
def _kernels(interface: ModuleType) -> Iterator[None]:
    """The library compiles our kernels."""
    ours = {"FlashAttentionForwardSm90": forward_kernel(), "FlashAttentionBackwardSm90": backward_kernel()}
    theirs = {name: getattr(interface, name) for name in ours}
    try:
        vars(interface).update(ours)
        yield
    finally:
        vars(interface).update(theirs)
