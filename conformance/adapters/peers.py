"""The common part of libraries' adapters: the table of what is supported, then the library's call on one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from cp_ref.schedules.ownership import divisor

__all__ = [
    "Peer",
    "Sizes",
    "SupportTable",
    "Unsupported",
    "asked",
    "library",
    "no_gradient",
    "of_all_ranks",
]

Words = dict[str, str]
Sizes = tuple[int, int, int, int]  # heads_q, heads_kv, d_qk, d_v


class Unsupported(NotImplementedError):
    """The library does not support this; with its source's words where it has some."""


@dataclass(frozen=True)
class SupportTable:
    """The choices that a library says it supports.

    Attributes:
        library: its name and version, for messages.
        choices: for every axis of `asked` the choices that are supported. An axis that is not there has its first,
            plainest choice alone.
        because: why a choice is not there, by "axis choice" or by axis, from the library's documentation or code.
        incompatible: choices that do not go together, each with the reason.
    """

    library: str
    choices: Mapping[str, tuple[str, ...]]
    because: Mapping[str, str] = field(default_factory=dict)
    incompatible: tuple[tuple[Mapping[str, str], str], ...] = ()

    def why_not(self, words: Words) -> str:
        """Why a call is not supported; empty when it is."""
        for axis, word in words.items():
            if word not in self.choices.get(axis, _PLAIN[axis]):
                reason = self.because.get(f"{axis} {word}") or self.because.get(axis) or "it has no such thing"
                return f"{self.library}: {axis} {word}: {reason}"
        for together, reason in self.incompatible:
            if all(words[axis] == word for axis, word in together.items()):
                return f"{self.library}: {', '.join(together.values())} together: {reason}"
        return ""

    def having(self, **choices: tuple[str, ...]) -> SupportTable:
        """The same with other choices of some axes."""
        return replace(self, choices={**self.choices, **choices})


# the plainest choice of each axis; these are nearly the axes and choices of `conformance.problems.capabilities.AXES`
_PLAIN = {
    "cp_comm_type": ("p2p",),
    "layout": ("contiguous",),
    "qkv_format": ("bshd",),
    "attn_mask_type": ("causal",),
    "dtype": ("bfloat16",),
    "window": ("none",),
    "areas": ("none",),
    "softmax_type": ("vanilla",),
    "softcap": ("none",),
    "score_mod": ("none",),
    "dropout": ("none",),
    "heads": ("equal",),
    "dims": ("equal",),
    "head_dim": ("multiple of 8",),
    "lengths": ("self",),
    "sequences": ("one",),
    "padding": ("none",),
    "remainder": ("none",),
    "deterministic": ("no",),
    "return_lse": ("no",),
    "return_max_logit": ("no",),
    "device": ("cpu", "cuda"),
}


def asked(cp: Any, sizes: Sizes, dtype: torch.dtype, device: torch.device, arguments: Mapping[str, Any]) -> Words:
    """A call in the table's words.

    Args:
        cp: the `ContextParallel`; anything with `cp_comm_type` and `layout`.
        arguments: those of `attention` or `supports`.
    """
    heads_q, heads_kv, d_qk, d_v = sizes
    given = {name: value for name, value in arguments.items() if value is not None}
    fmt = given.get("qkv_format", "bshd")
    mask = given.get("attn_mask_type", "causal")
    if fmt == "thd":  # there both spellings mean the same
        mask = mask.removeprefix("padding_") if mask != "padding" else "no_mask"
    left, right = given.get("window_size", (-1, -1))
    right = -1 if "causal" in mask else right
    cross = given.get("seqlen_q") != given.get("seqlen_kv")
    lens_q, lens_kv = given.get("cu_seqlens_q"), given.get("cu_seqlens_kv")
    cross = cross or (lens_q is not None and lens_kv is not None and not _equal(lens_q, lens_kv))
    return {
        "cp_comm_type": cp.cp_comm_type,
        "layout": cp.layout,
        "qkv_format": fmt,
        "attn_mask_type": mask,
        "dtype": str(dtype).removeprefix("torch."),
        "window": {(False, False): "none", (True, False): "left", (False, True): "right"}.get(
            (left >= 0, right >= 0), "both"
        ),
        "areas": "some" if "areas" in given else "none",
        "softmax_type": given.get("softmax_type", "vanilla"),
        "softcap": "softcap" if given.get("softcap", 0.0) else "none",
        "score_mod": "some" if given.get("score_mod") is not None else "none",
        "dropout": "some" if given.get("dropout_p", 0.0) else "none",
        "heads": "equal" if heads_q == heads_kv else "grouped",
        "dims": "equal" if d_qk == d_v else "unequal",
        "head_dim": "odd" if d_qk % 8 or d_v % 8 else "multiple of 8",
        "lengths": "cross" if cross else "self",
        "sequences": _number(fmt, lens_q),
        "padding": "padding" if _padded(given, "q") or _padded(given, "kv") or _stray(fmt, given) else "none",
        "remainder": "some" if _uneven(cp, fmt, given) else "none",
        "deterministic": "yes" if given.get("deterministic") else "no",
        "return_lse": "yes" if given.get("return_lse") else "no",
        "return_max_logit": "yes" if given.get("return_max_logit") else "no",
        "device": device.type,
    }


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Wherever they are."""
    return torch.equal(a.cpu(), b.cpu())


def _number(fmt: str, cu_seqlens: torch.Tensor | None) -> str:
    if fmt != "thd" or cu_seqlens is None:
        return "one"
    return {1: "none", 2: "one"}.get(len(cu_seqlens), "many")


def _padded(given: Mapping[str, Any], side: str) -> bool:
    lengths, padded = given.get(f"cu_seqlens_{side}"), given.get(f"cu_seqlens_{side}_padded")
    return lengths is not None and padded is not None and not _equal(lengths, padded)


def _uneven(cp: Any, fmt: str, given: Mapping[str, Any]) -> bool:
    """Whether the layout cuts a length of `supports` into parts that are not equal."""
    if fmt != "thd":
        lengths = [given.get("seqlen_q"), given.get("seqlen_kv")]
    else:
        padded = [given.get(f"cu_seqlens_{side}_padded", given.get(f"cu_seqlens_{side}")) for side in ("q", "kv")]
        cumulative = [cu.tolist() for cu in padded if cu is not None]
        whole = cp.layout == "contiguous"
        lengths = [n for cu in cumulative for n in (cu[-1:] if whole else [b - a for a, b in pairwise(cu)])]
    return any(n % divisor(cp.layout, cp.size) for n in lengths if n)


def _stray(fmt: str, given: Mapping[str, Any]) -> bool:
    """Whether there are lengths where the sequences of a batch are meant to be equally long."""
    return fmt != "thd" and any(name.startswith("cu_seqlens") for name in given)


def library(name: str, install: str) -> ModuleType:
    """The library's module.

    Raises:
        ImportError: it is not installed, with how to install it; the suite makes a `LoadError` of it.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"this adapter needs {name}: {install} ({error})") from error


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
            fmt = options.get("qkv_format", "bshd")
            axis = 1 if fmt == "bshd" else 0
            whole = {"seqlen_q": cp.size * q.shape[axis], "seqlen_kv": cp.size * k.shape[axis]}
            lengths = whole if fmt != "thd" else {}
            reason = self.why_not(cp, sizes, q.dtype, q.device, {**lengths, **options})
        except Exception:  # a q that is no tensor, a window of three sides
            reason = ""
        if reason:
            raise Unsupported(reason)
        return self.call(q, k, v, cp, options)

    @abstractmethod
    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: Any, options: dict[str, Any]) -> Any:
        """The library's call, for what its table has: out, or (out, lse)."""


def of_all_ranks(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """The tensors that the ranks of a group have, by rank. Without gradients."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


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
