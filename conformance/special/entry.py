"""Makers of special cases: an entry of the table under every schedule."""

from __future__ import annotations

from dataclasses import replace

from conformance.case import Case
from conformance.judge.named_entries import Change, TableEntry, every_schedule, problem
from conformance.run.case_tensors import GlobalTensors
from cp_ref.schedules.problem import Sequence

__all__ = ["PADDED", "entry", "one_dominant_key"]

PADDED = (Sequence(5, 5, 8, 8), Sequence(8, 8, 8, 8), Sequence(0, 0, 8, 8))
_FREE = ("qkv_format", "layout", "heads_kv")  # where an entry does not name them, it is not about them


def entry(
    text: str,
    cp_size: int,
    *sequences: Sequence,
    tails: tuple[int, int] = (0, 0),
    tiers: tuple[str, ...] = ("logic", "probes"),
    change: Change | None = None,
    call: dict[str, object] | None = None,
    gpu: bool = False,
    **fields: object,
) -> TableEntry:
    """An entry under every schedule; `call` has fields of the case, `fields` those of the problem; `gpu` for one that
    takes a CPU too long.
    """
    options = {"return_lse": True, "return_max_logit": True, "loss": "out+lse", "seed": 7, **(call or {})}
    p = problem(cp_size, *sequences, **fields)
    case = Case(p, tail_q=tails[0], tail_kv=tails[1], **options)  # pyright: ignore[reportArgumentType]
    cases = (case,) if "cp_comm_type" in fields else every_schedule(case)
    free = tuple(name for name in _FREE if name not in fields)
    return TableEntry(text, cases, tiers, change, free=free, gpu=gpu)


def one_dominant_key(t: GlobalTensors) -> GlobalTensors:
    """The first slot's key takes all the weight of whoever sees it."""
    k = t.k.clone()
    k[0] = k[0] * 0 + 40.0
    return replace(t, q=t.q.abs() + 1.0, k=k)
