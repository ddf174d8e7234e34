"""The slices and weights of a linear layer against its plan: shapes, dtypes and devices."""

from __future__ import annotations

from typing import Any

import torch

from cp_ref.common.context import ContextParallel
from cp_ref.common.plan_arguments import Plan
from cp_ref.spec import check_data, check_plan_owner, kind_of, local_lengths, slice_rows
from cp_ref.spec.arguments.read_problem import DTYPES

__all__ = ["check_dtype", "check_last", "check_plan", "check_rows", "check_tensor", "name_of"]


def check_plan(cp: ContextParallel, plan: Any, package_plan: type) -> None:
    """The package's plan, for linear layers and for this context."""
    if not isinstance(plan, package_plan) or not isinstance(plan, Plan):
        package = package_plan.__module__.split(".")[0]
        raise TypeError(f"plan is {kind_of(plan)}; it must be a {package}.Plan, made with linear=True")
    if not plan.linear:
        raise ValueError("plan was made without linear=True, so it has no state messages; make it with linear=True")
    check_plan_owner(plan.problem, plan.rank, cp)


def check_tensor(name: str, x: Any, like: Any = None) -> None:
    """A plain tensor with values, on the device of another one."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is {kind_of(x)}; it must be a tensor")
    if hasattr(x, "placements"):
        raise TypeError(f"{name} is a DTensor; give its local tensor, this rank's slice")
    check_data(name, x)
    if like is not None and x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, and other tensors are on {like.device}; they must be on one device")


def check_dtype(name: str, x: torch.Tensor, like: torch.Tensor, *, wide: bool = False, wider: bool = False) -> None:
    """The dtype of another tensor, or where that is allowed float32 (or float64)."""
    allowed = [like.dtype, *([torch.float32] if wide else []), *([torch.float64] if wider else [])]
    if x.dtype not in allowed:
        words = " or ".join(dict.fromkeys(map(name_of, allowed)))
        raise TypeError(f"{name} has dtype {x.dtype}; it must be {words}")


def check_rows(plan: Plan, name: str, x: Any, last: str, first: Any = None, *, wide: bool = False) -> None:
    """A slice of the plan's format with these last axes; of the same rows, device and dtype as the `first` tensor."""
    problem, room = plan.problem, plan.room
    fmt = problem.qkv_format
    axes = {"thd": "t", "bshd": "b, s", "sbhd": "s, b"}[fmt]
    check_tensor(name, x, first)
    leading = len(axes.split(", "))
    if len(x.shape) != leading + len(last.split(", ")):
        raise ValueError(f"{name} has shape {list(x.shape)}; qkv_format {fmt!r} needs [{axes}, {last}]")
    if first is not None:
        check_dtype(name, x, first, wide=wide)
        if x.shape[:leading] != first.shape[:leading]:
            raise ValueError(f"{name} has shape {list(x.shape)}, and q {list(first.shape)}; [{axes}] must be equal")
        return
    if name_of(x.dtype) not in DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be one of {', '.join(DTYPES)}")
    device = plan.device
    if x.device.type != device.type or device.index not in (None, x.device.index):
        raise ValueError(f"{name} is on {x.device}, but the plan was made for {device}")
    rows, wanted = x.shape[axes.split(", ").index("t" if fmt == "thd" else "s")], slice_rows(problem, "q")
    if fmt != "thd":
        batch = len(problem.sequences)
        if rows != wanted or x.shape[axes.split(", ").index("b")] != batch:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; rank {plan.rank} of a group of {problem.cp_size} needs batch size "
                f"{batch} and local sequence length {wanted}"
            )
    elif room is not None:
        if rows != room.rows_q:
            raise ValueError(
                f"{name} has {rows} tokens, but the plan was made with max_tokens_q = {room.rows_q} * {room.cp_size} "
                "ranks; a plan that can be updated needs buffers of that size"
            )
    elif rows < wanted:
        raise ValueError(
            f"{name} has {rows} tokens; by the plan's lengths rank {plan.rank} of a group of {problem.cp_size} holds "
            f"{wanted} (more is a tail, fewer is a mistake)"
        )
    elif local_lengths(problem, "q", rows):
        raise ValueError(
            f"{name} has {rows} rows on this rank alone, as many as the plan's lengths have on all {problem.cp_size} "
            f"ranks; cu_seqlens are global. If {rows - wanted} rows are a tail, give {name} another row"
        )


def check_last(name: str, x: torch.Tensor, wanted: tuple[int, ...]) -> None:
    """The sizes of the last axes."""
    if tuple(x.shape[-len(wanted) :]) != wanted:
        raise ValueError(f"{name} has shape {list(x.shape)}; its last sizes must be {list(wanted)}")


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name, without "torch."."""
    return str(dtype).removeprefix("torch.")
