"""Code shared by the integrations: cached contexts for all layers, checked arguments, refusals by name."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any, TypeVar

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_ref.contract.collectives import together
from cp_ref.schedules.values import check_data, check_lengths, kind_of, read_count

__all__ = [
    "check_longest",
    "check_tensors",
    "check_two_chunks",
    "context_for",
    "lengths_of_both",
    "lengths_on_host",
    "read_equal",
    "refuse",
]

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
            shown = getattr(value, "__qualname__", None) or repr(value)  # of a function its name, not its address
            if isinstance(value, torch.Tensor):
                shown = "a nested tensor" if value.is_nested else f"a tensor {list(value.shape)}"
            cure = _DROPOUT if "dropout" in name else ""
            raise NotImplementedError(
                f"{name} is {shown}, which {where} does not support under context parallelism{cure}"
            )


def check_tensors(axes: str, **tensors: Any) -> None:
    """Check tensors with these axes and values in memory.

    >>> check_tensors("b h s/cp d", query=torch.zeros(2, 3))
    Traceback (most recent call last):
        ...
    ValueError: query has shape [2, 3]; it must be [b, h, s/cp, d]
    """
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {kind_of(x)}; it must be a tensor [{axes.replace(' ', ', ')}]")
        check_data(name, x)
        if x.ndim != len(axes.split()):
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [{axes.replace(' ', ', ')}]")


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

    >>> from cp_ref.contract.group import PaperGroup
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


def lengths_of_both(lengths: dict[str, Any], longest: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Cumulative lengths of queries and of keys on the CPU, and whether they are equal.

    Args:
        lengths, longest: of queries and of keys, by the names of the arguments.

    Raises:
        ValueError, TypeError: as `lengths_on_host` and `check_longest`.
    """
    q, k = lengths_on_host(**lengths).values()
    for (name, most), cu_seqlens in zip(longest.items(), (q, k), strict=True):
        check_longest(name, most, cu_seqlens)
    return q, k, q is k or torch.equal(q.long(), k.long())


def read_equal(cp: ContextParallel, where: str, other: str, read: Callable[[], T]) -> T:
    """Read an argument on all ranks of a context; all ranks have the same value, or all raise. Collective.

    Args:
        where: the function that was called.
        other: names the argument and its difference on another rank.
        read: sends nothing.

    >>> from cp_ref import SimGroup
    >>> def one(member):
    ...     return read_equal(ContextParallel(member), "split", "lengths has other values", lambda: member.rank)
    >>> SimGroup(2).run(one)
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

    with cp.alone(where):
        return together([cp.comm], read, first)
