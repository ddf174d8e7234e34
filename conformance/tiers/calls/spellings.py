"""Tier `spellings`: the same call in other words gives the same results.

    int64           cumulative lengths in int64
    views           cumulative lengths that are not contiguous in memory
    kv too          the lengths of keys given, though they are those of the queries; padded ones, though nothing is
    by name         defaults given by name: softmax_scale, the window's right side under a causal mask, flags
    left out        defaults left out
    half            softmax_offset in bfloat16 is what it is in float32

Each with a plan where the case has one. The words are those of the documentation; all but `half`, which may be refused
with a ValueError or TypeError, have to be understood.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from conformance.case import Case
from conformance.implementation import Implementation
from conformance.run.case_tensors import build
from conformance.tiers.calls.one_rank import Call, Tensors, close, on_every_rank
from cp_ref.contract.read_problem import SCORE_OPTIONS
from cp_ref.schedules.problem import Problem

__all__ = ["SPELLINGS", "check"]

Arguments = dict[str, Any]
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_OPTIONS = {"qkv_format", "attn_mask_type", "window_size", *SCORE_OPTIONS}
_DEFAULTS = {f.name: f.default for f in fields(Problem) if f.name in _OPTIONS}


def _each_length(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Case, Arguments], Arguments]:
    return lambda _, arguments: {name: change(x) for name, x in arguments.items() if name in _LENGTHS}


def _kv_too(case: Case, arguments: Arguments) -> Arguments:
    if "cu_seqlens_q" not in arguments:
        return {}
    given = {"cu_seqlens_kv": arguments.get("cu_seqlens_kv", arguments["cu_seqlens_q"])}
    if case.problem.qkv_format == "thd":
        padded = arguments.get("cu_seqlens_q_padded", arguments["cu_seqlens_q"])
        other = padded if "cu_seqlens_kv" not in arguments else given["cu_seqlens_kv"]
        given |= {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": arguments.get("cu_seqlens_kv_padded", other)}
    return {name: x.clone() for name, x in given.items()}


def _by_name(case: Case, arguments: Arguments) -> Arguments:
    p = case.problem
    window = {"window_size": (p.window_size[0], 0)} if p.causal and "window_size" in arguments else {}
    return {"softmax_scale": p.scale, **window}


SPELLINGS: dict[str, Callable[[Case, Arguments], Arguments]] = {
    "int64": _each_length(lambda x: x.to(torch.int64)),
    "views": _each_length(lambda x: torch.stack([x, x - 1], dim=1)[:, 0]),
    "kv too": _kv_too,
    "by name": _by_name,
}


def check(impl: Implementation, case: Case, device: str = "cpu") -> list[str]:
    """Spellings that give other results, or raise.

    Raises:
        UnsupportedCase: the implementation does not have this, and says so on every rank.
    """
    return on_every_rank(impl, case, build(case, device), _check_rank)


def _check_rank(call: Call) -> list[str]:
    plain, found = call.problem_arguments, []
    want = _both(call, call.leaves())
    for name, spelling in SPELLINGS.items():
        call.problem_arguments = plain | (changed := spelling(call.case, plain))
        if changed:
            found += close(f"({name})", call.case, want, _both(call, call.leaves()))
    call.problem_arguments = {n: x for n, x in plain.items() if n not in _DEFAULTS or x != _DEFAULTS[n]}
    found += close("(left out)", call.case, want, _both(call, call.leaves()))
    call.problem_arguments = plain
    return found + (_half(call) if "offset" in call.inputs else [])


def _both(call: Call, leaves: Tensors) -> Tensors:
    return call.both(leaves, call.plan(call.problem_arguments) if call.case.use_plan else None)


def _half(call: Call) -> list[str]:
    """The values of bfloat16 are values of float32; only the gradient is rounded."""
    rounded = call.inputs["offset"].bfloat16()
    wide = call.inputs["offset"].dtype
    call = replace(call, inputs=call.inputs | {"offset": rounded.to(wide)})
    want = _both(call, call.leaves())
    try:
        got = _both(call, call.leaves() | {"offset": rounded.requires_grad_("o" in call.case.wanted)})
    except (ValueError, TypeError):
        return []
    if "d_offset" in want:
        want["d_offset"] = want["d_offset"].to(got["d_offset"].dtype)
    return close("(half)", call.case, want, got)
