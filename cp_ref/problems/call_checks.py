"""Checks of one call against the problem it was planned for: shapes, tails, and arguments that the plan already
settled.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from cp_ref.groups.group import PairGroup
from cp_ref.problems.arguments import ARGUMENTS, NONE_OF
from cp_ref.problems.read_problem import read_sizes
from cp_ref.schedules.problem import Problem, slice_rows
from cp_ref.schedules.values import check_choice, is_dtensor, kind_of
from cp_ref.schedules.words import QKV_FORMATS, Feature

__all__ = [
    "AXES",
    "check_apart",
    "check_context",
    "check_local_tensors",
    "check_placements",
    "check_plan_device",
    "check_plan_owner",
    "check_settled",
    "check_slice",
    "check_uneven",
    "local_lengths",
    "local_part",
    "one_a_head",
    "overlap",
]

AXES = {"bshd": ("batch", "sequence", "heads"), "sbhd": ("sequence", "batch", "heads"), "thd": ("sequence", "heads")}


def local_part(x: Any) -> Any:
    """A DTensor's local tensor, whatever its placement (see `check_placements`); anything else unchanged."""
    return x.to_local() if is_dtensor(x) else x


def one_a_head(softmax_offset: Any) -> Any:
    """[1, h_q, 1, 1], the shape that TransformerEngine has, as [h_q]; anything else unchanged, for `check_offset`."""
    shape = () if getattr(softmax_offset, "is_nested", True) else tuple(softmax_offset.shape)
    return softmax_offset[0, :, 0, 0] if len(shape) == 4 and shape[0] == shape[2] == shape[3] == 1 else softmax_offset


def check_placements(cp: Any, layout: Any, qkv_format: str, softmax_offset: Any, **tensors: Any) -> None:
    """A DTensor's local part is this rank's slice: sharded along the sequence over the context's ranks, in their order.
    A DTensor's shards are equal stretches, so that this is so in layout "contiguous" alone.

    Over other dimensions of its mesh it may be replicated, or sharded along the batch or the heads.

    Raises:
        ValueError: another placement, or another layout (of the plan, or of the context). TypeError: `softmax_offset`
        is a DTensor.
    """
    if is_dtensor(softmax_offset):
        raise TypeError("softmax_offset is a DTensor; give a plain tensor, one value for each of this rank's heads")
    for name, x in tensors.items():
        if not is_dtensor(x):
            continue
        check_choice("qkv_format", qkv_format, QKV_FORMATS)
        axes = AXES[qkv_format]
        if wrong := _misplaced(cp, axes, x):
            raise ValueError(
                f"{name} is a DTensor placed {x.placements} on {x.device_mesh}: {wrong}; its local part is this rank's "
                f"slice only where the context's group shards axis {axes.index('sequence')}, the "
                "sequence. Redistribute it, or give its local tensor"
            )
        if cp.size > 1 and layout != "contiguous":
            shown = repr(layout) if isinstance(layout, str) else "a table"
            raise ValueError(
                f"{name} is a DTensor placed {x.placements}: its shards are equal stretches of the sequence, but "
                f"layout is {shown}, where a rank's slice is another. Make the context with layout='contiguous', or "
                "give plain tensors, as shard cuts them"
            )


def _misplaced(cp: Any, axes: tuple[str, ...], x: Any) -> str:
    """The error of a DTensor's placement, or ""."""
    groups = (cp.comm.p2p, cp.comm.a2a) if isinstance(cp.comm, PairGroup) else (cp.comm,)  # in order of cutting
    wanted = [(getattr(group, "ranks", None), group.rank) for group in groups if group.size > 1]
    found: list[tuple[frozenset[int], int]] = []
    for dim, placement in enumerate(x.placements):
        level = (_ranks(x.device_mesh, dim), x.device_mesh.get_local_rank(dim))
        axis: str = axes[int(placement.dim)] if placement.is_shard() and placement.dim < len(axes) else ""
        if level in wanted and axis == "sequence":
            found.append(level)
        elif level in wanted or (len(level[0]) > 1 and not (placement.is_replicate() or axis in ("batch", "heads"))):
            return f"mesh dimension {dim} has {placement}"
    return "" if found == wanted else "its mesh has no dimension that is the context's group"


def _ranks(mesh: Any, dim: int) -> frozenset[int]:
    """The global ranks along a dimension of a mesh, through this rank."""
    index: list[Any] = list(mesh.get_coordinate())
    index[dim] = slice(None)
    return frozenset(mesh.mesh[tuple(index)].tolist())


_STEPS = 10_000  # The search limit; tensors with nested axes need a few.


def check_apart(name: str, written: Any, **read: Any) -> None:
    """Raise ValueError where one of the tensors `read` shares memory with the tensor `written`."""
    for other, x in read.items():
        if x.device == written.device and overlap(written, x):
            raise ValueError(f"{name} and {other} overlap in memory; {name} is changed in place, so they must not")


def overlap(a: Any, b: Any) -> bool:
    """Whether some byte belongs to an element of both. Interleaved views, such as K and V of one [t, 2, h, d], share
    none although each lies between the other's elements.

    >>> import torch
    >>> kv = torch.zeros(6, 2, 4)
    >>> overlap(kv[:, 0], kv[:, 1]), overlap(kv[:4, 0], kv[2:, 0]), overlap(kv, kv[5])
    (False, True, True)
    """
    if not a.numel() or not b.numel():
        return False
    # steps[stride] = (least, most): distances between elements of a and b, in multiples of each stride in bytes.
    steps: dict[int, tuple[int, int]] = {}
    for x, sign in ((a, 1), (b, -1)):
        for size, stride in zip(x.shape, x.stride(), strict=True):
            if size > 1 and stride:
                low, high = steps.get(stride * x.element_size(), (0, 0))
                reach = sign * (size - 1)
                steps[stride * x.element_size()] = (low + min(reach, 0), high + max(reach, 0))
    distance = b.data_ptr() - a.data_ptr()
    least, most = distance - a.element_size() + 1, distance + b.element_size() - 1
    return _reaches(sorted(steps.items(), reverse=True), least, most)


def _reaches(steps: list[tuple[int, tuple[int, int]]], least: int, most: int) -> bool:
    """Whether multiples of the strides, each within its bounds, add up to a number from `least` to `most`. True if the
    search takes too long.
    """
    rest = [(0, 0)]  # Sums of the strides from each one on.
    for stride, (low, high) in reversed(steps):
        rest.append((rest[-1][0] + stride * low, rest[-1][1] + stride * high))
    rest.reverse()
    pending = [(0, least, most)]
    for _ in range(_STEPS):
        if not pending:
            return False
        n, least, most = pending.pop()
        if least > rest[n][1] or most < rest[n][0]:
            continue
        if n == len(steps):
            return True
        stride, (low, high) = steps[n]
        first = max(low, -((rest[n + 1][1] - least) // stride))  # The rest reaches `least` from here.
        last = min(high, (most - rest[n + 1][0]) // stride)
        pending += [(n + 1, least - stride * k, most - stride * k) for k in range(first, min(last, first + _STEPS) + 1)]
    return True


def check_context(cp: Any, kind: type) -> None:
    """Raise TypeError unless `cp` is a `kind`: the package's own ContextParallel, or what both packages' are."""
    if not isinstance(cp, kind):
        package = kind.__module__.split(".")[0]
        wanted = "ContextParallel" if kind.__module__.startswith("cp_ref.groups.") else f"{package}.ContextParallel"
        raise TypeError(f"cp is {kind_of(cp)}; it must be a {wanted}, made of a group")


def check_plan_owner(problem: Problem, plan_rank: int, cp: Any) -> None:
    """A plan is for the rank, the group size, the schedule and the layout that it was made with (unless it was given a
    table, which is the plan's alone). A context that chooses takes all plans that it could have made.

    Raises:
        ValueError: `cp` is another.
    """
    made: dict[str, object] = {"rank": plan_rank, "size": problem.cp_size}
    schedules = getattr(cp, "schedules", ())
    if problem.cp_comm_type not in schedules:
        made["cp_comm_type"] = problem.cp_comm_type
    if len(schedules) < 2:
        made["a2a_size"] = problem.a2a_size
    if isinstance(problem.layout, str):
        made["layout"] = problem.layout
    for name, value in made.items():
        if getattr(cp, name, value) != value:
            raise ValueError(
                f"plan was made for {name} {value!r}, but cp has {name} {getattr(cp, name)!r}; make a new plan"
            )


def check_settled(problem: Problem, **arguments: Any) -> None:
    """Arguments given together with a plan: each has its default value, or the plan's. Arguments that make no problem
    are None.

    Raises:
        ValueError, TypeError: an argument is wrong, contradicts the plan, or is one of the tensors of lengths or areas
        that only the plan may have.
    """
    for name, value in arguments.items():
        read = ARGUMENTS[name].read if name in ARGUMENTS else None
        if read is not None:
            value = read(name, value)
            if value == NONE_OF[name]:
                continue  # The plan's own value is not read: a compiled graph would be for this plan alone.
            if value != (planned := getattr(problem, name)):
                raise ValueError(
                    f"{name} is {value!r}, but the plan was made for {planned!r}; leave it out beside a plan"
                )
        elif value is not None:
            raise ValueError(f"{name} is given beside a plan, which has its own; leave it out, or make a new plan")


def check_uneven(cp: Any, problem: Problem, features: Set[Feature], *, max_logit: bool) -> None:
    """Refuse a call of bshd or sbhd without a plan if its slices may end in padding, and its result depends on that.

    `shard` cuts a length that does not divide into slices as large as those of the next length that does. So the slices
    alone do not tell the length. Causal self-attention is right without it: padding comes after all tokens, and no
    token sees it.

    Args:
        features: what the tensors of scores ask for. max_logit: whether the call has return_max_logit.

    Raises:
        ValueError: naming the length, what depends on it, and the cure.
    """
    lengths = problem.lengths
    if problem.qkv_format == "thd" or problem.attn_mask_type.startswith("padding") or not lengths.slots_q:
        return
    sides = {"q": lengths.slots_q[0], "kv": lengths.slots_kv[0]}
    rows = {side: slots // cp.size for side, slots in sides.items()}
    uneven = {side: cp.uneven[n] for side, n in rows.items() if n in cp.uneven}
    crossed, right = sides["q"] - sides["kv"], 0 if problem.causal else problem.window_size[1]
    mask = f"attn_mask_type {problem.attn_mask_type!r} with window_size {problem.window_size}"
    depends = [
        (mask, problem.bottom_right and crossed != 0),
        (mask, "kv" in uneven and (right != 0 or crossed > 0)),
        (Feature.ALIBI, Feature.ALIBI in features and crossed != 0),
        ("return_max_logit", max_logit),
    ]
    what = next((words for words, here in depends if here), None)
    if not uneven or what is None:
        return
    side, length = next(reversed(uneven.items()))
    raise ValueError(
        f"plan is None, and shard has cut a sequence of {length} into slices of {rows[side]} rows, which do not say "
        f"whether they are of {length} or of {sides[side]} tokens; {what} depends on it. Give "
        f"plan=make_plan(..., seqlen_{side}={length}), also where a function takes no plan: call attention itself"
    )


def local_lengths(problem: Problem, side: str, rows: int) -> bool:
    """Whether packed lengths end at the number of rows of one rank's buffer, of which it needs fewer."""
    return rows == sum(problem.lengths.slots(side)) and rows > slice_rows(problem, side)


def _name_of_slots(problem: Problem, side: str) -> str:
    """The argument that gave the slots of one side."""
    padded = problem.lengths.slots(side) != problem.lengths.tokens(side)
    return f"cu_seqlens_{side}{'_padded' if padded else ''}"


def check_local_tensors(problem: Problem, room: Any, rank: int, q: Any, k: Any, v: Any) -> None:
    """This rank's slices must have the shapes that the problem gives them.

    Raises:
        ValueError, TypeError: naming the tensor, its shape and the expected one.
    """
    sizes = read_sizes(q, k, v, problem.qkv_format, problem.cp_size)
    for name in ("heads_q", "heads_kv", "d_qk", "d_v", "dtype"):
        got, wanted = getattr(sizes, name), getattr(problem, name)
        if got != wanted:
            raise ValueError(f"{name} of q, k, v is {got}, but the plan was made for {wanted}")
    check_slice(problem, room, rank, "q", q, "q")
    check_slice(problem, room, rank, "k", k, "kv")


def check_slice(problem: Problem, room: Any, rank: int, name: str, x: Any, side: str) -> None:
    """A tensor of one side ("q" or "kv") has the rows of this rank's slice; in thd more are a tail. A plan with room
    fixes their number (those after the batch are its tail).

    Packed lengths are those of the whole batch, and not of this rank's slices alone: lengths that end at this rank's
    number of rows mean a buffer cp_size times too large. A tail of exactly that length is much rarer than this mistake.

    Raises:
        ValueError: naming the tensor, its shape and the expected one; or the lengths, and the cure.
    """
    slots, wanted, shape = problem.lengths.slots(side), slice_rows(problem, side), list(x.shape)
    who = f"rank {rank} of a group of {problem.cp_size}"
    if problem.qkv_format != "thd":
        batch_axis, axis = (0, 1) if problem.qkv_format == "bshd" else (1, 0)
        batch = len(problem.sequences)
        if shape[batch_axis] != batch or shape[axis] != wanted:
            longest, whole = max(slots, default=0), wanted * problem.cp_size
            rest = f": a sequence of {longest} is cut as if padded to {whole}" if longest < whole else ""
            raise ValueError(
                f"{name} has shape {shape}; {who} needs batch size {batch} and local sequence length {wanted}{rest}"
            )
        return
    rows, lengths = shape[0], _name_of_slots(problem, side)
    if room is not None:
        if rows != (held := room.rows_q if side == "q" else room.rows_kv):
            raise ValueError(
                f"{name} has {rows} tokens, but the plan was made with max_tokens_{side} = {held} * {room.cp_size} "
                "ranks; a plan that can be updated needs buffers of that size"
            )
    elif rows < wanted:
        raise ValueError(
            f"{name} has {rows} tokens; by the global lengths, {lengths}, which end at {sum(slots)}, {who} holds "
            f"{wanted} (more is a tail, fewer is a mistake)"
        )
    elif local_lengths(problem, side, rows):
        raise ValueError(
            f"{lengths} ends at {rows}, and {name} has {rows} rows on this rank alone; cu_seqlens are global, so that "
            f"of slices without a tail they end at {rows * problem.cp_size} on {problem.cp_size} ranks. Give the "
            f"lengths of the whole batch. If {rows - wanted} rows of {name} are a tail, give it another row, or make a "
            f"plan with max_sequences and max_tokens_{side}"
        )


def check_plan_device(device: Any, name: str, x: Any) -> None:
    """A tensor is on the device that a plan was made for; of a device without a number any of its kind."""
    if x.device.type != device.type or device.index not in (None, x.device.index):
        raise ValueError(f"{name} is on {x.device}, but the plan was made for {device}")
