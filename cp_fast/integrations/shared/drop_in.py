"""A function of another library's signature, as a call of `cp_fast.attention`: one decorator reads every argument. An
argument error on one rank before the ranks agree, an unknown keyword too, is raised on all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from numbers import Number
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from cp_fast.api.attention import attention
from cp_fast.api.fast_context import ContextParallel
from cp_fast.runtime.handles import outside_of_graphs
from cp_ref.batches.masks import documents
from cp_ref.groups.agreement import agreed
from cp_ref.problems.call_checks import check_context, local_part
from cp_ref.schedules.values import (
    check_data,
    check_flag,
    check_lengths,
    check_tensor,
    kind_of,
    read_count,
    read_window,
    shown,
)

__all__ = [
    "Asked",
    "GivenLengths",
    "as_flash_attn",
    "check_floats",
    "check_tensors",
    "check_two_chunks",
    "context_for",
    "drop_in",
    "lengths_of_both",
    "lengths_of_one",
    "lengths_on_host",
    "of_whole_batch",
    "refuse",
    "taking_kv",
    "taking_qkv",
    "words_for",
]

# ---- arguments of other libraries
#
# Code shared by the integrations: cached contexts for all layers, checked arguments, refusals by name.


T = TypeVar("T")
_DROPOUT = (
    ": it has no seed that all ranks share. Use cp_fast.attention with dropout_p and dropout_seed, or a plan made with "
    "dropout_p"
)
_contexts: dict[Any, ContextParallel] = {}


def context_for(group: Any, cp_comm_type: Any, **options: Any) -> ContextParallel:
    """One cached context for a group (or a list of two), a schedule and its options."""
    group = tuple(group) if isinstance(group, list) else group
    key = group, cp_comm_type, tuple(sorted(options.items()))
    try:
        if (found := _contexts.get(key)) is not None:
            return found
    except TypeError:  # An object without a hash is not a group or option: the context raises.
        return ContextParallel(group, cp_comm_type, **options)
    return _contexts.setdefault(key, ContextParallel(group, cp_comm_type, **options))


def refuse(where: str, **given: Any) -> None:
    """Raise for the first argument with another value than None, False, 0 or "".

    Raises:
        NotImplementedError: naming it and its value; for dropout also the call that has it.

    >>> refuse("flash_attn_func", dropout_p=0.0, alibi_slopes=None)
    >>> refuse("flash_attn_func", block_table=[])
    Traceback (most recent call last):
        ...
    NotImplementedError: block_table is [], which flash_attn_func does not support under context parallelism
    """
    for name, value in given.items():
        if value is not None and (not isinstance(value, Number | str) or value):
            cure = _DROPOUT if "dropout" in name else ""
            raise NotImplementedError(
                f"{name} is {words_for(value)}, which {where} does not support under context parallelism{cure}"
            )


def words_for(value: Any) -> str:
    """A value in an error: of a tensor its shape, of a function its name, not its address.

    >>> words_for(torch.zeros(2, 3)), words_for([1])
    ('a tensor [2, 3]', '[1]')
    """
    if isinstance(value, torch.Tensor):
        return "a nested tensor" if value.is_nested else f"a tensor {list(value.shape)}"
    return getattr(value, "__qualname__", None) or shown(value)


def check_tensors(axes: str, **tensors: Any) -> None:
    """Check tensors with these axes and values in memory.

    >>> check_tensors("b h s/cp d", query=torch.zeros(2, 3))
    Traceback (most recent call last):
        ...
    ValueError: query has shape [2, 3]; it must be [b, h, s/cp, d]
    """
    form = f"[{axes.replace(' ', ', ')}]"
    for name, x in tensors.items():
        check_tensor(name, local_part(x), f"a tensor {form}")  # of a DTensor `attention` checks the placement
        if x.ndim != len(axes.split()):
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be {form}")


def check_floats(name: str, x: Any) -> None:
    """Check a tensor of a floating dtype with values in memory."""
    if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
        what = f"of dtype {x.dtype}" if isinstance(x, torch.Tensor) else kind_of(x)
        raise TypeError(f"{name} is {what}; it must be a tensor of a floating dtype")
    check_data(name, x)


def lengths_on_host(**lengths: Any) -> dict[str, torch.Tensor]:
    """Tensors of cumulative lengths on the CPU, by name. Lengths on a GPU are waited for, once for a tensor passed
    twice. `attention` checks the values.

    Raises:
        ValueError, TypeError: they are no such tensors.
    """
    for name, x in lengths.items():
        check_lengths(name, x)
    copies = {id(x): x.cpu() for x in lengths.values()}
    return {name: copies[id(x)] for name, x in lengths.items()}


def check_longest(name: str, longest: Any, cu_seqlens: torch.Tensor) -> None:
    """Check that a stated longest length, or None, holds for the lengths. Lengths on a GPU are not checked: reading
    them would wait for it.

    Raises:
        ValueError: a sequence is longer. TypeError: it is no integer.
    """
    if longest is None:
        return
    longest = read_count(name, longest, at_least=0, at_most=2**62)
    if cu_seqlens.device.type == "cpu" and len(cu_seqlens) > 1:
        found = int(cu_seqlens.diff().max())
        if found > longest:
            raise ValueError(f"{name} is {longest}, but a sequence has {found} tokens")


def check_two_chunks(cp: ContextParallel, **lengths: torch.Tensor) -> None:
    """Check that every sequence can have been cut in 2 * cp_size equal chunks, as Megatron and TransformerEngine cut.

    Args:
        lengths: by name, cumulative lengths on the CPU of the slots that sequences have in the buffer.

    Raises:
        ValueError: naming the sequence, and the argument that has room for padding.

    >>> from cp_ref.groups.group import PaperGroup
    >>> check_two_chunks(ContextParallel(PaperGroup(2)), cu_seqlens_q=torch.tensor([0, 4, 10]))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: cu_seqlens_q gives sequence 1 6 rows, which do not divide by 2 * cp_size = 4; pad each ...
    """
    for name, x in lengths.items():
        odd = (x.diff() % (2 * cp.size)).nonzero()
        if cp.size > 1 and len(odd):
            n = int(odd[0])
            raise ValueError(
                f"{name} gives sequence {n} {int(x[n + 1] - x[n])} rows, which do not divide by 2 * cp_size = "
                f"{2 * cp.size}; pad each sequence until it does, and give the padded lengths as "
                f"{name.removesuffix('_padded')}_padded"
            )


def of_whole_batch(other: str) -> Callable[[list[T]], T]:
    """Make a function that merges the values of an argument which every rank has whole: they must be equal
    (`cp_ref.groups.agreement.merged`).

    other: names the argument and its difference on another rank.

    >>> of_whole_batch("lengths has other values")([[4, 2], [4, 3]])
    Traceback (most recent call last):
        ...
    ValueError: lengths has other values on rank 1 than on rank 0; all ranks of a context get the same batch whole
    """

    def first(found: list[T]) -> T:
        for rank, theirs in enumerate(found):
            if theirs != found[0]:
                raise ValueError(
                    f"{other} on rank {rank} than on rank 0; all ranks of a context get the same batch whole"
                )
        return found[0]

    return first


# ---- functions of other libraries


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
                return outside_of_graphs(call, *args, **kwargs)
            cp = context_of(dict(zip(names, args, strict=False)) | kwargs)
            asked = agreed(cp, "an agreement on a call", lambda: read(*args, **kwargs))
            arguments = asked.arguments | asked.gathered()
            return asked.give(attention(asked.q, asked.k, asked.v, cp=asked.cp, **arguments))

        call.__signature__ = inspect.signature(read).replace(return_annotation=Any)  # type: ignore[attr-defined]
        return call

    return decorate


def taking_kv(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same drop-in with keys and values as one tensor kv [..., 2, h, d], for k and v. Its name has
    "_kvpacked_func" for "_func".

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
    return _as_one(function, "", "kv", ("k", "v"))


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
        check_tensor(one, x, f"a tensor {axes}")
        if x.ndim < 4 or x.shape[-3] != len(parts):
            raise ValueError(f"{one} has shape {list(x.shape)}; it must be {axes}")
        return read(**given, **dict(zip(parts, x.unbind(-3), strict=True)))

    packed.__signature__ = signature  # type: ignore[attr-defined]
    packed.__name__ = packed.__qualname__ = name or read.__name__.replace("_func", f"_{one}packed_func")
    packed.__module__ = read.__module__
    packed.__doc__ = (
        f"Compute `{read.__name__}` with {one} [..., {len(parts)}, h, d], a tensor of {', '.join(parts)}. Collective."
    )
    return drop_in()(packed)


# ---- functions of flash-attn's family


class GivenLengths(NamedTuple):
    """The lengths that a call of such a function gives.

    Attributes:
        same_lengths: whether each sequence has as many queries as keys.
        lengths: the arguments of `attention` that say so.
        cp: the context whose layout the slices have, where that is another than the call's.
    """

    same_lengths: bool
    lengths: dict[str, Any]
    cp: ContextParallel | None = None

    @classmethod
    def packed(
        cls, cu_q: torch.Tensor, cu_kv: torch.Tensor | None = None, cp: ContextParallel | None = None
    ) -> GivenLengths:
        """Of packed sequences of these lengths. cu_kv: of the keys, if they are others."""
        return cls(cu_kv is None, {"qkv_format": "thd", "cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}, cp)


_SCORES = ("alibi_slopes", "softmax_scale", "softcap", "deterministic")  # as in `attention`
_REFUSED = ("dropout_p", "block_table")


def as_flash_attn(
    name: str,
    given: dict[str, Any],
    lengths_of: Callable[[dict[str, Any]], GivenLengths] | None = None,
    layout: str = "",
) -> Asked:
    """A call of a function of flash-attn's family. By its rule query and key are counted from their sequence's end,
    whatever the mask.

    Args:
        name: the function's.
        given: its arguments, by name.
        lengths_of: reads its lengths; None for slices [b, s/cp, h, d].
        layout: the one that it is for.
    """
    refuse(name, **{one: given[one] for one in _REFUSED if one in given})
    q, k, v, cp = (given[one] for one in ("q", "k", "v", "cp"))
    if layout and cp.layout != layout:
        raise ValueError(f"cp has layout {cp.layout!r}; this function's slices are those of {layout!r}")
    check_tensors("b s/cp h d" if lengths_of is None else "t/cp h d", q=q, k=k, v=v)
    same_lengths, problem, own = GivenLengths(q.shape[1] == k.shape[1], {}) if lengths_of is None else lengths_of(given)
    cp = own or cp
    check_flag("causal", given["causal"])
    check_flag("return_attn_probs", given["return_attn_probs"])
    left, right = read_window(given["window_size"])
    give: Callable[[Any], Any] = lambda results: results  # noqa: E731
    if given["causal"] or (right == 0 and not same_lengths):
        mask = "causal" if same_lengths else "causal_bottom_right"
        visible: dict[str, Any] = {"attn_mask_type": mask, "window_size": (left, 0)}
    elif same_lengths or (left < 0 and right < 0):
        visible = {"attn_mask_type": "no_mask", "window_size": (left, right)}
    else:  # no named mask aligns such a window to the end
        if lengths_of is None:
            (q, k, v), problem, give = _as_packed(q, k, v, cp)
        both = (problem[one] for one in ("cu_seqlens_q", "cu_seqlens_kv"))
        visible = {"areas": documents(*both, window_size=(left, right), **_padded(problem))}
    arguments = visible | problem | {one: given[one] for one in _SCORES if one in given}
    if not given["return_attn_probs"]:
        return Asked(q, k, v, cp, arguments, give)
    return Asked(q, k, v, cp, arguments | {"return_lse": True}, lambda results: (*give(results), None))


def lengths_of_one(given: dict[str, Any]) -> torch.Tensor:
    """The lengths of keys that are as long as the queries, on the CPU."""
    (lengths,) = lengths_on_host(cu_seqlens=given["cu_seqlens"]).values()
    check_longest("max_seqlen", given["max_seqlen"], lengths)
    return lengths


def lengths_of_both(
    given: dict[str, Any],
    names: tuple[str, str] = ("cu_seqlens_q", "cu_seqlens_k"),
    longest: tuple[str, str] = ("max_seqlen_q", "max_seqlen_k"),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Those of queries and keys, by these arguments, on the CPU; None for keys as long as the queries."""
    q, k = lengths_on_host(**{one: given[one] for one in names}).values()
    for one, lengths in zip(longest, (q, k), strict=True):
        check_longest(one, given[one], lengths)
    return q, None if q is k or torch.equal(q.long(), k.long()) else k


def _padded(problem: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in problem.items() if name.endswith("_padded")}


def _as_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel
) -> tuple[list[torch.Tensor], dict[str, Any], Callable[[Any], Any]]:
    """Slices [b, s/cp, h, d] as those of packed sequences: the rows are the same in dual_chunk, and for one sequence in
    any layout.

    Returns:
        The packed slices, the arguments of `attention` that say so, and a function that gives its results the axes of
        [b, s/cp, h, d].

    Raises:
        NotImplementedError: several sequences in another layout.
    """
    batch, rows = q.shape[:2]
    if batch > 1 and cp.layout != "dual_chunk":
        raise NotImplementedError(
            f"window_size without causal, with other lengths of q and k, needs layout 'dual_chunk' for {batch} "
            f"sequences, and cp has {cp.layout!r}; flash_attn_varlen_func takes every layout"
        )
    lengths: dict[str, Any] = {"qkv_format": "thd"}
    for side, x in (("q", q), ("kv", k)):
        slot = x.shape[1] * cp.size
        starts = torch.arange(x.shape[0] + 1, device="cpu") * slot
        lengths[f"cu_seqlens_{side}_padded"] = starts
        real = torch.full((x.shape[0],), cp.uneven.get(x.shape[1], slot), device="cpu").cumsum(0)
        lengths[f"cu_seqlens_{side}"] = torch.nn.functional.pad(real, (1, 0))

    def give(results: Any) -> Any:
        out, *lse = results if isinstance(results, tuple) else (results,)
        out = out.unflatten(0, (batch, rows))
        return (out, lse[0].unflatten(1, (batch, rows)).transpose(0, 1)) if lse else out

    return [x.flatten(0, 1) for x in (q, k, v)], lengths, give
