"""Which calls of a THD helper have an answer: the rules for lengths, and for buffers that must have room for them."""

from __future__ import annotations

from itertools import pairwise

import torch

from conformance.levels.helpers.helper_record import Arguments

__all__ = ["Broken", "check_fits", "check_lse", "check_tail", "chunk_lengths", "lengths_of", "require"]


class Broken(Exception):
    """A rule that a call breaks."""


def require(right: bool, rule: str) -> None:
    if not right:
        raise Broken(rule)


def lengths_of(arguments: Arguments, name: str, divisor: int = 1, first: int | None = 0) -> list[int]:
    """The lengths that a cumulative tensor gives; first: what it begins with, None for anything from 0 on."""
    x = arguments[name]
    require(x.dtype in (torch.int32, torch.int64), f"{name} must be int32 or int64: {x.dtype}")
    require(x.ndim == 1 and len(x) > 0, f"{name} must be [b + 1]: {list(x.shape)}")
    values = x.tolist()
    require(values[0] == first if first is not None else values[0] >= 0, f"{name} must begin at 0: {values[:3]}")
    sizes = [b - a for a, b in pairwise(values)]
    require(min(sizes, default=0) >= 0, f"{name} must not decrease: {values[-3:]}")
    wrong = [n for n in sizes if n % divisor]
    require(not wrong, f"every length of {name} must be a multiple of {divisor}: {wrong[:3]}")
    return sizes


def check_tail(arguments: Arguments, tokens: int, divisor: int, name: str = "cu_seqlens_padded") -> None:
    """The tail behind the last sequence has its share for everyone."""
    tail = tokens - int(arguments[name][-1])
    require(tail >= 0, f"{name} ends {-tail} rows behind the buffer of {tokens}")
    require(tail % divisor == 0, f"the tail must be a multiple of {divisor}: {tail}")


def check_fits(real: list[int], slots: list[int]) -> None:
    require(len(real) == len(slots), f"there are {len(real)} real lengths and {len(slots)} padded ones")
    require(all(a <= b for a, b in zip(real, slots, strict=True)), "a sequence has more tokens than slots")


def check_lse(lse: torch.Tensor, packed: bool, sizes: list[int], tokens: int | None = None) -> None:
    """An LSE has room for every sequence: [h, t] (of `tokens` rows, if given), or [b, h, s]."""
    if not packed:
        right = lse.ndim == 3 and len(lse) == len(sizes) and lse.shape[2] >= max(sizes, default=0)
    else:
        right = lse.ndim == 2 and (lse.shape[1] >= sum(sizes) if tokens is None else lse.shape[1] == tokens)
    require(right, f"an LSE of shape {list(lse.shape)} has no room for the lengths {sizes[:8]}")


def chunk_lengths(a: Arguments) -> list[int]:
    """The lengths of sequences that ranks share; one rank holds sequences of any length."""
    return lengths_of(a, "cu_seqlens_padded", 1 if a["cp_size"] == 1 else 2 * a["cp_size"])
