"""A named problem in the nearest words that an implementation has: a table is to tell something of those with less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from conformance.case import Case
from conformance.draw.capabilities import Capabilities, narrowed
from conformance.judge.ranks import UnsupportedCase
from cp_ref.schedules.layouts import divisor
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.words import QKV_FORMATS

__all__ = ["adapted", "first_of", "judged_plainly", "plainer"]

Found = TypeVar("Found")

_WITHOUT_PADDING = {
    "padding": "no_mask",
    "padding_causal": "causal",
    "padding_causal_bottom_right": "causal_bottom_right",
}
_DTYPES = {"float64": ("float64", "float32", "bfloat16"), "float32": ("float32", "bfloat16")}


def adapted(case: Case, capabilities: Capabilities, free: tuple[str, ...] = ()) -> Case:
    """The case without the wishes that are refused of a plain problem, and with other choices on the axes in `free`.

    Args:
        free: fields of the problem that are no part of what is special about it: qkv_format, layout, heads_kv,
            softmax_type. The fields change only where the implementation does not have what is there, and only if the
            problem stays the same otherwise: sequences of several lengths are no batch.

    >>> from conformance.draw.capabilities import EVERYTHING
    >>> from cp_ref.schedules.problem import Sequence
    >>> batch = Capabilities(EVERYTHING.choices | {"qkv_format": ("sbhd",), "layout": ("contiguous",)})
    >>> packed = Case(Problem(2, (Sequence(8, 8, 8, 8),), qkv_format="thd", attn_mask_type="padding_causal"))
    >>> print(adapted(packed, batch, ("qkv_format", "layout")).problem)
    Problem(cp_size=2, sequences=[(8, 8, 8, 8)], layout='contiguous', qkv_format='sbhd')
    """
    p, has = case.problem, capabilities.has
    if "layout" in free and not has("layout", p.layout_name):
        p = replace(p, layout=capabilities.choices["layout"][0])
    if "softmax_type" in free and not has("softmax_type", p.softmax_type):
        p = replace(p, softmax_type="vanilla")
    if "heads_kv" in free and p.heads_q != p.heads_kv and not has("heads", "grouped"):
        p = replace(p, heads_kv=p.heads_q)
    if "qkv_format" in free and not has("qkv_format", p.qkv_format) and not (case.tail_q or case.tail_kv):
        p = next((other for fmt in QKV_FORMATS if has("qkv_format", fmt) and (other := _in_format(p, fmt))), p)
    return narrowed(replace(case, problem=p), capabilities)


def _in_format(p: Problem, qkv_format: str) -> Problem | None:
    """The problem in another format; None where that has no room for it."""
    if qkv_format == "thd":
        return replace(p, qkv_format="thd")
    if len({(s.slots_q, s.slots_kv) for s in p.sequences}) != 1:
        return None
    if any(n % divisor(p.layout, p.cp_size) for n in (p.sequences[0].slots_q, p.sequences[0].slots_kv)):
        return None
    dense = all((s.len_q, s.len_kv) == (s.slots_q, s.slots_kv) for s in p.sequences)
    mask = _WITHOUT_PADDING.get(p.attn_mask_type, p.attn_mask_type) if dense else p.attn_mask_type
    if not dense and not mask.startswith("padding"):
        return None
    return replace(p, qkv_format=qkv_format, attn_mask_type=mask)


def plainer(case: Case, capabilities: Capabilities) -> Iterator[Case]:
    """The case, and what says the same of an implementation that has less: no max_logit, no lse, no float64."""
    dtypes = _DTYPES.get(case.problem.dtype, (case.problem.dtype,))
    for dtype in [d for d in dtypes if capabilities.has("dtype", d)] or dtypes[:1]:
        same = replace(case, problem=replace(case.problem, dtype=dtype))
        yield same
        if case.return_max_logit:
            yield replace(same, return_max_logit=False)
        if case.return_lse:
            yield replace(same, return_max_logit=False, return_lse=False, loss="out")


def judged_plainly(case: Case, capabilities: Capabilities, judge: Callable[[Case], Found]) -> tuple[Case, Found]:
    """The first case of `plainer` that is not refused, and what `judge` says of it.

    Raises:
        UnsupportedCase: all of them are refused; with the reason of the case as it is.
    """
    reason: UnsupportedCase | None = None
    for attempt in plainer(case, capabilities):
        try:
            return attempt, judge(attempt)
        except UnsupportedCase as refusal:
            reason = reason or refusal
    assert reason is not None
    raise reason


def first_of(capabilities: Capabilities, axis: str, preferred: Any) -> str:
    """The preferred choice on an axis, or the first that is there."""
    return preferred if capabilities.has(axis, preferred) else (*capabilities.choices[axis], preferred)[0]
