"""From the options of `plan` to a problem and its schedule, through the same door as a model's calls: `make_plan`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from itertools import accumulate
from typing import Any

import torch

import cp_fast
from cp_fast.cli.common import exchanging
from cp_fast.cli.paper import paper_context
from cp_ref.common import plans
from cp_ref.spec import Problem, Schedule

__all__ = ["Request", "cumulative", "padded", "plan_of", "problem_of"]


@dataclass(frozen=True)
class Request:
    """The options; see `cp_fast.make_plan` for most. `lengths_q` and `lengths_kv` are one number a sequence; `a2a_size`
    is None where it is not given.
    """

    cp_size: int
    lengths_q: list[int] | None
    lengths_kv: list[int] | None = None
    batch_size: int = 1
    seqlen_q: int = 0
    seqlen_kv: int | None = None
    qkv_format: str = "thd"
    layout: str = "dual_chunk"
    attn_mask_type: str = "causal"
    window_size: tuple[int, int] = (-1, -1)
    areas: str = ""
    cp_comm_type: str = "p2p"
    a2a_size: int | None = None
    _: KW_ONLY
    heads_q: int
    heads_kv: int
    d_qk: int
    d_v: int
    dtype: str


def plan_of(request: Request) -> tuple[Problem, Schedule]:
    """The problem and the schedule of all ranks.

    Raises:
        ValueError, TypeError: naming what is wrong. Unsupported: naming what is missing.
    """
    plan = cp_fast.make_plan(**_arguments(request))
    return plan.problem, plan.schedule


def problem_of(request: Request) -> Problem:
    """The problem alone: nothing is planned, and no kernels are built for it.

    Raises:
        ValueError, TypeError: naming what is wrong.
    """
    agreement, _ = plans.read_plan_arguments(plans.make_plan.bind(_arguments(request)), cp_fast.ContextParallel)
    return agreement.problem


def _arguments(request: Request) -> dict[str, Any]:
    """Those of `make_plan`."""
    a2a_size = exchanging(request.cp_comm_type, request.a2a_size, request.cp_size)
    return {
        "cp": paper_context(request.cp_size, request.cp_comm_type, a2a_size, request.layout),
        "qkv_format": request.qkv_format,
        "attn_mask_type": None if request.areas else request.attn_mask_type,
        "window_size": request.window_size,
        "areas": cp_fast.masks.from_call(request.areas) if request.areas else None,
        "heads_q": request.heads_q,
        "heads_kv": request.heads_kv,
        "d_qk": request.d_qk,
        "d_v": request.d_v,
        "dtype": _dtype(request.dtype),
        "device": torch.device("cpu"),
        **_lengths(request),
    }


def padded(lengths: list[int], multiple: int) -> list[int]:
    """Each length rounded up.

    >>> padded([5, 8], 4)
    [8, 8]
    """
    return [-(-n // multiple) * multiple for n in lengths]


def cumulative(lengths: list[int]) -> torch.Tensor:
    """Cumulative lengths as the API takes them, int32 [b + 1].

    >>> cumulative([5, 8]).tolist()
    [0, 5, 13]
    """
    return torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)


def _lengths(request: Request) -> dict[str, Any]:
    """What the three formats take: cumulative lengths, sizes, or both (a padding mask in bshd or sbhd)."""
    q, kv = request.lengths_q, request.lengths_kv
    if request.qkv_format == "thd":
        q = [request.seqlen_q] * request.batch_size if q is None else q
        kv = q if kv is None else kv
        return {"cu_seqlens_q": cumulative(q), "cu_seqlens_kv": cumulative(kv)}
    sizes = {"batch_size": request.batch_size, "seqlen_q": request.seqlen_q, "seqlen_kv": request.seqlen_kv}
    if q is None:
        return sizes
    sizes |= {"batch_size": len(q)}
    return sizes | {"cu_seqlens_q": cumulative(q), "cu_seqlens_kv": None if kv is None else cumulative(kv)}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype is {name!r}; it must be one of float16, bfloat16, float32, float64")
    return dtype
