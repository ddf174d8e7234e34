"""The global tensors of a case, and the call's arguments.

    legend   b = batch, s = slots per sequence, t = packed slots with the tail, h = heads

Every slot that is no real token (padding, tail) holds NaN in q, k, v, dout and dlse: nothing may ever read it. Where a
query sees nothing dlse is -inf: what a loss such as the mean of lse squared sends back from an lse of -inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from conformance.case import Case
from conformance.dtypes import dtype_of, wide_dtype
from conformance.judge.visibility import seen
from conformance.scores.score_mods import score_mod_of
from cp_ref.contract.read_problem import SCORE_OPTIONS
from cp_ref.schedules.problem import Problem

__all__ = [
    "GlobalTensors",
    "attention_arguments",
    "batch_axis",
    "build",
    "in_format",
    "packed_rows",
    "plan_arguments",
    "real_tokens",
    "sequence_axis",
]


@dataclass(frozen=True)
class GlobalTensors:
    """The global tensors that all ranks together compute on. `real_*` mark the real tokens: [b, s], [s, b] or [t]."""

    q: torch.Tensor  # [b, s_q, h_q, d_qk], [s_q, b, h_q, d_qk] or [t_q, h_q, d_qk], in the problem's dtype.
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor  # Like q, with d_v.
    dlse: torch.Tensor  # [b, h_q, s_q] or [h_q, t_q]; float32, or float64 for float64 problems.
    softmax_offset: torch.Tensor | None  # [h_q], in dlse's dtype.
    real_q: torch.Tensor
    real_kv: torch.Tensor


def build(case: Case, device: str = "cpu") -> GlobalTensors:
    """The case's tensors, equal for equal cases, whatever the device."""
    p = case.problem
    dtype, wide = dtype_of(p.dtype), wide_dtype(p.dtype)
    generator = torch.Generator().manual_seed(case.seed)
    real_q, real_kv = real_tokens(case, "q"), real_tokens(case, "kv")

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def rows(real: torch.Tensor, heads: int, dim: int, magnitude: float) -> torch.Tensor:
        x = normal(*real.shape, heads, dim) * magnitude
        return x.masked_fill(~real[..., None, None], float("nan")).to(device, dtype)

    q = rows(real_q, p.heads_q, p.d_qk, case.magnitude)
    k = rows(real_kv, p.heads_kv, p.d_qk, case.magnitude)
    v = rows(real_kv, p.heads_kv, p.d_v, 1.0)
    dout = rows(real_q, p.heads_q, p.d_v, 1.0)
    dlse = normal(*real_q.shape, p.heads_q).masked_fill(~real_q[..., None], float("nan"))
    if p.softmax_type == "vanilla":
        dlse.masked_fill_(_blind(case)[..., None], float("-inf"))
    offset = normal(p.heads_q).to(device, wide) if p.softmax_type == "learnable" else None
    dlse = rows_to_lse(dlse, p.qkv_format).to(device, wide).contiguous()
    return GlobalTensors(q, k, v, dout, dlse, offset, real_q.to(device), real_kv.to(device))


def real_tokens(case: Case, side: str) -> torch.Tensor:
    """Which slots hold a real token: bool [b, s] (bshd), [s, b] (sbhd) or [t + tail] (thd); side is "q" or "kv"."""
    lengths = case.problem.lengths
    per_sequence = [torch.arange(n) < m for n, m in zip(lengths.slots(side), lengths.tokens(side), strict=True)]
    if case.problem.qkv_format == "thd":
        return torch.cat([*per_sequence, torch.zeros(case.tail(side), dtype=torch.bool)])
    real = torch.stack(per_sequence)
    return real if case.problem.qkv_format == "bshd" else real.t().contiguous()


def _blind(case: Case) -> torch.Tensor:
    """Which queries are real and see nothing; axes as in `real_tokens`."""
    problem, blind = case.problem, real_tokens(case, "q")
    packed = {"thd": blind, "bshd": blind, "sbhd": blind.t()}[problem.qkv_format].flatten()
    packed[[row for row, keys in seen(problem) if len(keys)]] = False
    return packed.view(blind.t().shape).t() if problem.qkv_format == "sbhd" else packed.view(blind.shape)


def sequence_axis(qkv_format: str) -> int:
    """The axis of q, k, v that counts tokens."""
    return 1 if qkv_format == "bshd" else 0


def batch_axis(qkv_format: str) -> int | None:
    """The axis of q, k, v that counts sequences; None in thd."""
    return {"bshd": 0, "sbhd": 1, "thd": None}[qkv_format]


def rows_to_lse(x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """From the format's rows, [b, s, h], [s, b, h] or [t, h], to the LSE's axes: [b, h, s] or [h, t]."""
    return x.permute({"bshd": (0, 2, 1), "sbhd": (1, 2, 0), "thd": (1, 0)}[qkv_format])


def packed_rows(case: Case, x: torch.Tensor) -> torch.Tensor:
    """The format's rows, sequence after sequence: [rows, h, d]."""
    fmt = case.problem.qkv_format
    return x if fmt == "thd" else (x.transpose(0, 1) if fmt == "sbhd" else x).flatten(0, 1)


def in_format(case: Case, rows: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """The inverse of `packed_rows`, in the dtype of `model` and with NaN where it has NaN."""
    if case.problem.qkv_format == "sbhd" and rows.numel():
        rows = rows.unflatten(0, (len(case.problem.sequences), -1)).transpose(0, 1)
    return rows.reshape(model.shape).to(model.dtype).masked_fill(model.isnan(), float("nan"))


def attention_arguments(problem: Problem, device: str = "cpu") -> dict[str, Any]:
    """The problem arguments of `attention` (no tensors, no offset). Lengths equal to their default are left
    out, and so are score_mod and dropout_p, which others may not have."""
    arguments: dict[str, Any] = {
        "qkv_format": problem.qkv_format,
        **{name: getattr(problem, name) for name in SCORE_OPTIONS if name != "dropout_p"},
    }
    if problem.dropout_p:
        arguments["dropout_p"] = problem.dropout_p
    if problem.score_mod:
        arguments["score_mod"] = score_mod_of(problem)
    if problem.areas is None:
        arguments |= {"attn_mask_type": problem.attn_mask_type, "window_size": problem.window_size}
    else:
        arguments["areas"] = torch.tensor(problem.areas, dtype=torch.int64).reshape(-1, 6)
    if problem.qkv_format != "thd" and not problem.attn_mask_type.startswith("padding"):
        return arguments
    lens_q, lens_kv = _cumulative(problem, "len_q"), _cumulative(problem, "len_kv")
    lengths = {"cu_seqlens_q": lens_q}
    if lens_kv != lens_q:
        lengths["cu_seqlens_kv"] = lens_kv
    if problem.qkv_format == "thd":
        slots_q, slots_kv = _cumulative(problem, "slots_q"), _cumulative(problem, "slots_kv")
        if slots_q != lens_q:
            lengths["cu_seqlens_q_padded"] = slots_q
        if slots_kv != (slots_q if lens_kv == lens_q else lens_kv):
            lengths["cu_seqlens_kv_padded"] = slots_kv
    return arguments | {name: torch.tensor(cu, dtype=torch.int32, device=device) for name, cu in lengths.items()}


def plan_arguments(problem: Problem, device: str = "cpu") -> dict[str, Any]:
    """The arguments of `make_plan` and `supports` without `cp`."""
    sizes: dict[str, Any] = {name: getattr(problem, name) for name in ("heads_q", "heads_kv", "d_qk", "d_v")}
    if problem.qkv_format != "thd":
        sizes |= {"batch_size": len(problem.sequences)}
        sizes |= {"seqlen_q": problem.sequences[0].slots_q, "seqlen_kv": problem.sequences[0].slots_kv}
    types = {"dtype": dtype_of(problem.dtype), "device": torch.device(device)}
    table = {} if isinstance(problem.layout, str) else {"layout": list(problem.layout)}
    return attention_arguments(problem, device) | sizes | types | table


def _cumulative(problem: Problem, name: str) -> list[int]:
    return list(accumulate((getattr(s, name) for s in problem.sequences), initial=0))
