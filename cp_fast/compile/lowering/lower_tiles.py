"""The launches of a step's tiles, the copies before them, and the destinations of their results."""

from __future__ import annotations

from collections.abc import Iterator

from cp_fast.compile.index_tables import RowKey
from cp_fast.compile.instructions import Heads, Instruction, Launch
from cp_fast.compile.lowering.buffers import Held
from cp_fast.compile.lowering.pass_state import PassState
from cp_fast.compile.row_maps import Parts, Spans
from cp_fast.compile.tiles.groups import LaunchRows, TileGroup
from cp_ref.schedules.planners.ring_members import merged

__all__ = ["lower_tiles"]


def lower_tiles(state: PassState, number: int, group: TileGroup) -> list[Instruction[RowKey]]:
    """The launches of a step's tiles of the same heads, the copies before them, and the destinations of their
    results.
    """
    by_kind: list[list[Held]] = []
    found: list[Instruction[RowKey]] = []
    for kind in state.kinds:
        heads = group.heads_of(kind)
        held = [state.operands.holder(kind, heads, launch.rows(kind)) for launch in group.launches]
        if None in held:
            made, copies = state.operands.gather(kind, heads, [group.rows(kind)], number)
            held, found = [made] * len(held), found + copies
        by_kind.append([one for one in held if one is not None])
    launches = list(zip(group.launches, zip(*by_kind, strict=True), strict=True))
    if state.direction == "forward" and group.sharing is not None:
        launches = _placed(state, group) or launches
    for launch, of_launch in launches:
        found += _launch(state, number, group, launch, of_launch)
    return found


def _placed(state: PassState, group: TileGroup) -> list[tuple[LaunchRows, tuple[Held, ...]]]:
    """The launches of a group that have common keys, and their buffers. None of them where rows do not lie together."""
    held: list[Held] = []
    for kind in state.kinds:
        rows = group.rows(kind)
        one = state.operands.holder(kind, group.heads_of(kind), Spans(*merged(rows.start, rows.stop)))
        if one is None:
            return []
        held.append(one)
    launches = state.shared.groups.placed(group, held[0].rows, held[1].rows)
    return [(launch, tuple(held)) for launch in launches or ()]


def _launch(
    state: PassState, number: int, group: TileGroup, launch: LaunchRows, held: tuple[Held, ...]
) -> Iterator[Instruction[RowKey]]:
    heads, kv_heads, packed = group.heads, group.kv_heads, state.shared.sets.packed
    if launch.batch.places is None:
        launch = state.shared.groups.in_buffer_order(launch, held[1].rows)
    operands = [state.operands.view(one, launch.q, heads) for one in held]
    operands[1] = state.operands.view(held[1], launch.kv, kv_heads)
    of = f"of {' and '.join(state.buffers.specs[one.number].name for one in held[:2])}"
    window = f"window {launch.batch.left}, {launch.batch.right}"
    wanted: list[tuple[str, Heads, list[Parts]]] = [(state.results[0], heads, [packed(launch.q)])]
    if state.direction == "backward":
        wanted.append(("dkv", kv_heads, list(launch.layers)))
    made = [
        state.buffers.new(
            f"step {number}: {kind} {of}, {window}",
            kind,
            some,
            (launch.kv if kind == "dkv" else launch.q).total,
            "partial",
        )
        for kind, some, _ in wanted
    ]
    rows = launch.q, launch.kv
    yield Launch(number, tuple(operands), launch.batch, tuple(made), heads[0], *rows, launch.made_by)
    for partial, (kind, some, layers) in zip(made, wanted, strict=True):
        for layer in layers:
            yield from state.sums.accumulates(partial, kind, some, layer, number)
