"""Files of traces, read with care: all content is checked before it is used.

A file may come from another version, or be cut off. So this module looks first at the kind of file, at the numbers in
its header and at every item's place. It raises ValueError with the file's name where they do not fit together.
"""

from __future__ import annotations

import os
import pickle
import stat
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from cp_ref.spec import Problem, Schedule, read_count, side_of
from cp_ref.spec.arguments.single_values import FURTHEST, MOST_RANKS
from cp_ref.spec.verify.well_formed import malformed
from cp_ref.tracing.trace_items import DIRECTIONS, KINDS, PER_HEAD, Item, Piece

__all__ = ["Content", "read_content", "write_content"]

_FIELDS = {f.name for f in fields(Item)}
_DIMS = {  # the head dim of each name's tensors; None where they have none
    **dict.fromkeys(("q", "k", "dq", "dk"), "d_qk"),
    **dict.fromkeys(("v", "out", "dout", "dv"), "d_v"),
    **dict.fromkeys(("lse", "delta"), None),
}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Content(NamedTuple):
    """The content of a file: the fields of a `Trace`, in their order."""

    call: int
    problem: Problem | None
    schedule: Schedule | None
    calls: dict[int, int]
    items: list[Item]


def write_content(path: str | os.PathLike[str], content: Content) -> None:
    """Write a file of plain values, which `torch.load` reads without running any code."""
    items = [{name: getattr(item, name) for name in _FIELDS} for item in content.items]
    plain = {
        "call": content.call,
        "problem": str(content.problem or ""),
        "schedule": str(content.schedule or ""),
        "calls": content.calls,
        "items": [values | {"piece": values["piece"] and tuple(values["piece"])} for values in items],
    }
    with open(path, "wb") as file:
        torch.save(plain, file)


def read_content(path: str) -> Content:
    """The content of a file that `write_content` wrote.

    Raises:
        OSError: it cannot be read. ValueError: it is no plain file, or it holds no trace; with the reason.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path} is no plain file; a trace is saved in one")
    with open(path, "rb") as file:
        try:
            return _checked(torch.load(file, map_location="cpu", weights_only=True))
        except pickle.UnpicklingError as error:  # whose words advise the reader to load code
            raise ValueError(f"{path} holds no trace: it is no file of torch.save with plain values alone") from error
        except Exception as error:  # torch and pickle have many ways to say it
            raise ValueError(f"{path} holds no trace: {error or type(error).__name__}") from error


def _checked(content: Any) -> Content:
    """The content, once everything in it has been looked at."""
    problem = Problem.parse(content["problem"])
    _check_sizes(problem)
    schedule = Schedule.parse(content["schedule"])
    if errors := next(malformed(problem.workload, schedule), ""):
        raise ValueError(errors)
    last = problem.cp_size - 1
    calls = {
        read_count("rank", rank, at_least=0, at_most=last): read_count("calls", number, at_least=0)
        for rank, number in content["calls"].items()
    }
    items: list[Item] = []
    for n, values in enumerate(list(content["items"])):
        try:
            items.append(_checked_item(problem, schedule, values))
        except Exception as error:
            raise ValueError(f"item {n} has no meaning: {error or type(error).__name__}") from error
    return Content(read_count("call", content["call"], at_least=0), problem, schedule, calls, items)


def _check_sizes(problem: Problem) -> None:
    """Raise unless lengths, sizes and edges are integers within bounds: they decide how much memory is taken."""
    read_count("cp_size", problem.cp_size, at_least=1, at_most=MOST_RANKS)
    read_count("a2a_size", problem.a2a_size, at_least=1, at_most=problem.cp_size)
    for name in ("heads_q", "heads_kv", "d_qk", "d_v"):
        read_count(name, getattr(problem, name), at_least=1)
    for sequence in problem.sequences:
        for value in (sequence.len_q, sequence.len_kv, sequence.slots_q, sequence.slots_kv):
            read_count("a length", value, at_least=0, at_most=FURTHEST)
    if max(sum(s.slots_q for s in problem.sequences), sum(s.slots_kv for s in problem.sequences)) > FURTHEST:
        raise ValueError(f"the sequences have more than {FURTHEST} tokens")
    if any(s.len_q > s.slots_q or s.len_kv > s.slots_kv for s in problem.sequences):
        raise ValueError("a sequence is longer than its slots")
    tables = (problem.areas or (), () if isinstance(problem.layout, str) else problem.layout, (problem.window_size,))
    for value in (value for table in tables for row in table for value in row):
        read_count("an edge", value, at_least=-1, at_most=FURTHEST)
    if getattr(torch, problem.dtype) not in _FLOATS:
        raise ValueError(f"dtype is {problem.dtype!r}")


def _checked_item(problem: Problem, schedule: Schedule, values: Any) -> Item:
    """An item; raises unless it has its fields, a place in the schedule, and a tensor of the shape of its piece."""
    if set(values) != _FIELDS:
        raise ValueError(f"its fields are {sorted(values)}")
    if values["direction"] not in DIRECTIONS or values["kind"] not in KINDS or not isinstance(values["source"], str):
        raise ValueError(f"it is {values['direction']!r} {values['kind']!r} of {values['source']!r}")
    rank = read_count("rank", values["rank"], at_least=0, at_most=problem.cp_size - 1)
    rank_schedule = (schedule.forward if values["direction"] == "forward" else schedule.backward)[rank]
    read_count("step", values["step"], at_least=0, at_most=len(rank_schedule))
    tensor, name = values["tensor"], values["name"]
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _FLOATS or not tensor.is_contiguous():
        raise ValueError(f"its tensor is {type(tensor).__name__}; it must be of floating-point numbers, in their order")
    if (shape := _shape(problem, name, values["piece"])) != list(tensor.shape):
        raise ValueError(f"{name} of {values['piece']} has shape {list(tensor.shape)}; it must have {shape}")
    return Item(**values | {"piece": values["piece"] and Piece(*values["piece"])})


def _shape(problem: Problem, name: Any, piece: Any) -> list[int]:
    """The shape of a tensor of this name and these rows and heads."""
    if name in PER_HEAD and piece is None:
        return [problem.heads_q]
    side = side_of(name)
    rows, heads = problem.starts(side)[-1], problem.heads_q if side == "q" else problem.heads_kv
    start, stop, head_start, head_stop = piece
    for what, first, last, end in (("rows", start, stop, rows), ("heads", head_start, head_stop, heads)):
        last = read_count(f"the end of its {what}", last, at_least=0, at_most=end)
        read_count(f"the first of its {what}", first, at_least=0, at_most=last)
    dim = _DIMS[name]
    return [stop - start, head_stop - head_start, *([] if dim is None else [getattr(problem, dim)])]
