"""A function of another library's signature, as a call of `cp_fast.attention`: one decorator reads every argument. An
argument error on one rank before the ranks agree, an unknown keyword too, is raised on all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, NoReturn, ParamSpec

import torch

from cp_fast.api.attention import attention
from cp_fast.api.fast_context import ContextParallel
from cp_ref.contract.call_checks import check_context
from cp_ref.contract.collectives import told_to_all
from cp_ref.schedules.values import check_data, kind_of

__all__ = ["Asked", "drop_in", "refuse_names", "taking_kv", "taking_qkv"]

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
    in_graph: Callable[..., Any] | None = None,
) -> Callable[[Callable[P, Asked]], Callable[P, Any]]:
    """A decorator for a function that reads a call's arguments into `Asked` and sends nothing; returns the call itself.
    Collective.

    Args:
        context_of: finds the ranks to tell of an error, in the unchecked arguments by name.
        in_graph: what torch.compile makes of a call; by default a graph break.

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
                if in_graph is not None:
                    return in_graph(*args, **kwargs)
                from cp_fast.dispatch.graph_break import graph_break  # Imports Dynamo, as slow as PyTorch's import.

                return graph_break(call, *args, **kwargs)
            with told_to_all(context_of(dict(zip(names, args, strict=False)) | kwargs)):
                asked = read(*args, **kwargs)
            arguments = asked.arguments | asked.gathered()
            return asked.give(attention(asked.q, asked.k, asked.v, cp=asked.cp, **arguments))

        call.__signature__ = inspect.signature(read).replace(return_annotation=Any)  # type: ignore[attr-defined]
        return call

    return decorate


def taking_kv(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """The same drop-in with keys and values as one tensor kv [..., 2, h, d], for k and v.

    Args:
        name: of the result; by default the function's, with "_kvpacked_func" for "_func".

    >>> from cp_ref import SimGroup
    >>> @drop_in()
    ... def full_func(q, k, v, *, cp):
    ...     return Asked(q, k, v, cp, {"attn_mask_type": "no_mask"}, lambda out: out.sum().item())
    >>> packed = taking_kv(full_func)
    >>> packed.__name__
    'full_kvpacked_func'
    >>> list(inspect.signature(packed).parameters)
    ['q', 'kv', 'cp']
    >>> q, kv = torch.ones(1, 2, 1, 8), torch.ones(1, 2, 2, 1, 8)
    >>> SimGroup(2).run(lambda member: packed(q, kv, cp=ContextParallel(member)))
    [16.0, 16.0]
    """
    return _as_one(function, name, "kv", ("k", "v"))


def taking_qkv(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """The same drop-in with one tensor qkv [..., 3, h, d], for q, k and v."""
    return _as_one(function, name, "qkv", ("q", "k", "v"))


def _as_one(function: Callable[..., Any], name: str, one: str, parts: tuple[str, ...]) -> Callable[..., Any]:
    read: Callable[..., Asked] = inspect.unwrap(function)
    whole = inspect.signature(read)
    kept = [x for x in whole.parameters.values() if x.name not in parts[1:]]
    signature = whole.replace(parameters=[x.replace(name=one) if x.name == parts[0] else x for x in kept])

    def packed(*args: Any, **kwargs: Any) -> Asked:
        given = signature.bind(*args, **kwargs).arguments
        x = given.pop(one)
        axes = f"[..., {len(parts)}, h, d]"
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{one} is {kind_of(x)}; it must be a tensor {axes}")
        check_data(one, x)
        if x.ndim < 4 or x.shape[-3] != len(parts):
            raise ValueError(f"{one} has shape {list(x.shape)}; it must be {axes}")
        return read(**given, **dict(zip(parts, x.unbind(-3), strict=True)))

    packed.__signature__ = signature  # type: ignore[attr-defined]
    packed.__name__ = packed.__qualname__ = name or read.__name__.replace("_func", f"_{one}packed_func")
    packed.__module__ = read.__module__
    packed.__doc__ = (
        f"`{read.__name__}` with {one} [..., {len(parts)}, h, d], a tensor of {', '.join(parts)}. Collective."
    )
    return drop_in()(packed)


def refuse_names(module: str, instead: dict[str, str]) -> Callable[[str], NoReturn]:
    """A module's `__getattr__` that names the replacement of what other libraries have and this package has not.

    Args:
        instead: by name, what to use.

    >>> refuse_names("ring", {"stripe": "use zigzag"})("stripe")
    Traceback (most recent call last):
        ...
    ImportError: ring has no stripe; use zigzag
    """

    def missing(name: str) -> NoReturn:
        if name in instead:  # an AttributeError's words would be lost in `from module import name`
            raise ImportError(f"{module} has no {name}; {instead[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing
