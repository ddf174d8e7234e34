"""The common part of libraries' adapters: the table of what is supported, then the library's call on one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from conformance.adapters.shared.support_tables import SupportTable, Unsupported, asked

__all__ = ["Peer", "Sizes", "no_gradient", "number_of_ranks", "rank_in"]

Sizes = tuple[int, int, int, int]  # heads_q, heads_kv, d_qk, d_v


class Peer(ABC):
    """An implementation of the level schedule that is a library over torch.distributed."""

    group_kind = "process"
    Unsupported = Unsupported
    supported: SupportTable

    def supports(
        self, *, cp: Any, heads_q: int, heads_kv: int, d_qk: int, d_v: int, dtype: torch.dtype, device: torch.device,
        **rest: Any,
    ) -> tuple[bool, str]:  # fmt: skip
        """Whether the library supports the problem: (True, "") or (False, reason)."""
        reason = self.why_not(cp, (heads_q, heads_kv, d_qk, d_v), dtype, device, rest)
        return not reason, reason

    def why_not(self, cp: Any, sizes: Sizes, dtype: torch.dtype, device: torch.device, arguments: Any) -> str:
        """Why the library does not take a call, by its table and its sizes; empty where it does."""
        reason = self.sizes_refused(cp, *sizes)
        table = self.supported.why_not(asked(cp, sizes, dtype, device, arguments))
        return table or (f"{self.supported.library}: {reason}" if reason else "")

    def sizes_refused(self, cp: Any, heads_q: int, heads_kv: int, d_qk: int, d_v: int) -> str:
        """Why the library does not take these heads and head dims, which no table says."""
        return ""

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cp: Any, **options: Any) -> Any:
        """`cp_ref.attention` in the library's words. A call that makes no sense is the library's to refuse."""
        if options.pop("plan", None) is not None:
            raise Unsupported(f"{self.supported.library}: no argument for plan")
        if options.get("softmax_type", "vanilla") != "learnable" and options.pop("softmax_offset", None) is not None:
            raise Unsupported(f"{self.supported.library}: softmax_offset without a learnable sink")
        try:
            sizes = (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])
            axis = 1 if options.get("qkv_format", "bshd") == "bshd" else 0
            whole = {"seqlen_q": cp.size * q.shape[axis], "seqlen_kv": cp.size * k.shape[axis]}
            lengths = whole if _has_sequence_axis(options) else {}
            reason = self.why_not(cp, sizes, q.dtype, q.device, {**lengths, **options})
        except Exception:  # a q that is no tensor, a window of three sides
            reason = ""
        if reason:
            raise Unsupported(reason)
        return self.call(q, k, v, cp, options)

    @abstractmethod
    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: Any, options: dict[str, Any]) -> Any:
        """The library's call, for what its table has: out, or (out, lse)."""


def _has_sequence_axis(options: dict[str, Any]) -> bool:
    return options.get("qkv_format", "bshd") != "thd"


def rank_in(group: Any) -> int:
    """The rank of this process in a group."""
    return torch.distributed.get_rank(group)


def number_of_ranks(group: Any) -> int:
    """How many processes a group has."""
    return torch.distributed.get_world_size(group)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, why: str) -> torch.Tensor:
        ctx.why = why
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise Unsupported(ctx.why)


def no_gradient(x: torch.Tensor, why: str) -> torch.Tensor:
    """x, but a backward pass through it raises Unsupported."""
    return _NoGradient.apply(x, why)
