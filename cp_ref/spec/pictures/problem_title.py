"""The problem of a picture, a trace or a report, in a few words."""

from __future__ import annotations

from cp_ref.spec.tables.problem import Problem
from cp_ref.spec.tables.schedule import Schedule

__all__ = ["title"]


def title(problem: Problem, schedule: Schedule) -> str:
    """The problem in a few words."""
    words = [
        schedule.name,
        f"cp_size {problem.cp_size}",
        problem.qkv_format,
        problem.layout_name,
        problem.attn_mask_type if problem.areas is None else f"{len(problem.areas)} areas",
    ]
    if problem.window_size != (-1, -1):
        words.append(f"window {problem.window_size}")
    return ", ".join(words)
