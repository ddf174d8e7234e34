"""Activation checkpointing that does not compute attention, or send its messages, a second time.

    from cp_fast.checkpoint import save_attention

    checkpoint(layer, x, use_reentrant=False, context_fn=save_attention())

To PyTorch's selective checkpointing each call of `attention` is one operator, `attention_forward` of this module. So
is each of `select_keys`, `sparse_attention` and `index_loss`: `SAVED` has all of them. A policy of your own may name
them too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from cp_fast.checkpoint.offload import OPERATOR, SAVED, LastCall, offloading
from cp_ref.schedules.values import check_flag
from cp_ref.schedules.words import Unsupported

__all__ = ["SAVED", "attention_forward", "save_attention"]

attention_forward = OPERATOR
Policy = Callable[..., CheckpointPolicy | bool]


def save_attention(policy: Policy | None = None, *, offload: bool = False) -> Callable[[], tuple[Any, Any]]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` that saves attention's results.

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
