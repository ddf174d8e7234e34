"""A function of another library's signature, as a call of `cp_fast.attention`: one decorator reads every argument. An
argument error on one rank before the ranks agree, an unknown keyword too, is raised on all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec

import torch

from cp_fast.api.attention import attention
from cp_fast.api.fast_context import ContextParallel
from cp_ref.common.refusals import told_to_all
from cp_ref.spec import check_context

__all__ = ["Asked", "drop_in"]

P = ParamSpec("P")


class Asked(NamedTuple):
    """A call of `attention`.

    Attributes:
        cp: the context.
        arguments: of `attention`, without q, k, v and cp.
        give: makes the function's result from that of `attention`.
        gathered: further arguments, made of other ranks' tensors once every rank has read its own. Collective.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cp: ContextParallel
    arguments: dict[str, Any]
    give: Callable[[Any], Any] = lambda results: results
    gathered: Callable[[], dict[str, Any]] = dict


def argument_cp(given: dict[str, Any]) -> Any:
    """The context that a call was given as `cp`."""
    check_context(given.get("cp"), ContextParallel)
    return given["cp"]


def drop_in(
    context_of: Callable[[dict[str, Any]], ContextParallel] = argument_cp,
) -> Callable[[Callable[P, Asked]], Callable[P, Any]]:
    """A decorator for a function that reads a call's arguments into `Asked` and sends nothing; returns the call itself.
    Collective.

    Args:
        context_of: finds the ranks to tell of an error, in the unchecked arguments by name.

    Raises:
        Every error of the function. The other ranks, which are about to agree, raise a ValueError that quotes it.

    >>> from cp_ref import SimGroup
    >>> @drop_in()
    ... def full(q, *, cp):
    ...     return Asked(q, q, q, cp, {"attn_mask_type": "no_mask"}, lambda out: out.sum().item())
    >>> SimGroup(2).run(lambda member: full(torch.ones(1, 2, 1, 8), cp=ContextParallel(member)))
    [16.0, 16.0]
    >>> SimGroup(2).run(lambda member: full(cp=ContextParallel(member), q=torch.ones(1, 2, 1, 8), **{"k": 3}))
    Traceback (most recent call last):
        ...
    TypeError: full() got an unexpected keyword argument 'k'
    """

    def decorate(read: Callable[P, Asked]) -> Callable[P, Any]:
        names = list(inspect.signature(read).parameters)

        @wraps(read)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            if torch.compiler.is_compiling():
                from cp_fast.dispatch.graph_break import graph_break  # Imports Dynamo, as slow as PyTorch's import.

                return graph_break(call, *args, **kwargs)
            with told_to_all(context_of(dict(zip(names, args, strict=False)) | kwargs)):
                asked = read(*args, **kwargs)
            arguments = asked.arguments | asked.gathered()
            return asked.give(attention(asked.q, asked.k, asked.v, cp=asked.cp, **arguments))

        call.__signature__ = inspect.signature(read).replace(return_annotation=Any)  # type: ignore[attr-defined]
        return call

    return decorate
