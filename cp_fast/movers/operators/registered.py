"""The registered operators, `torch.ops.cp_attention.*`: what `cp_fast.thd` calls, and `torch.compile` sees.

An operator checks all of its arguments, whoever calls it: first what can be said of a fake tensor too, then the values
of lengths that lie on the CPU. It brings these to the data, and hands over to the implementation in use (see `select`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cp_fast.movers.length_checks import end_of, sizes_of
from cp_ref.contract.thd_checks import check_chunk_lengths, check_divisible, check_tail

__all__ = ["LIBRARY", "check_chunks", "check_halves", "nothing", "operator"]

Tensor = torch.Tensor
LIBRARY = torch.library.Library("cp_attention", "FRAGMENT")


def operator(
    schema: str, check: Callable[..., object], fake: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the operator `schema`, for every device. `check` comes first, for fake tensors too."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            check(*arguments)
            return function(*arguments)

        def run_fake(*arguments: Any) -> Any:
            check(*arguments)
            return fake(*arguments)

        name = schema.split("(")[0]
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cp_attention::{name}", run_fake, lib=LIBRARY)
        return function

    return register


def nothing(*args: Any) -> None:
    """The fake of an operator that returns nothing."""


def check_chunks(cu_seqlens_padded: Tensor, name: str, tokens: int, cp_size: int) -> None:
    """The values of GLOBAL lengths, for layout dual_chunk."""
    sizes = sizes_of("cu_seqlens_padded", cu_seqlens_padded)
    check_tail(name, tokens, end_of(cu_seqlens_padded), cp_size)
    check_chunk_lengths(sizes, cp_size)


def check_halves(cu_seqlens_padded: Tensor) -> None:
    """The values of LOCAL lengths, each of which has two halves."""
    check_divisible("cu_seqlens_padded", sizes_of("cu_seqlens_padded", cu_seqlens_padded), 2, "a half")
