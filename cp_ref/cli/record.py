"""`record`: a problem run on random tensors over a simulated group, and its trace; `compare`: where two traces part."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from typer import Option

from cp_ref.batches.sharding import shard
from cp_ref.batches.tensors import to_format
from cp_ref.cli.plan import Request
from cp_ref.groups.group import Parcel
from cp_ref.reference.executor.rank_tensors import RankTensors
from cp_ref.reference.reference_attention import attention
from cp_ref.reference.simulator import SimGroup, SimMember
from cp_ref.schedules.schedule import Message, side_of
from cp_ref.schedules.values import check_choice
from cp_ref.show.cli.options import check_number, with_options
from cp_ref.show.cli.terminal import CHECK_FAILED, readable_errors
from cp_ref.tracing.compare_traces import compare as compare_traces
from cp_ref.tracing.recorded_trace import Trace
from cp_ref.tracing.recorder import trace

__all__ = ["PLANTS", "compare", "planted", "record", "run", "tensors_of"]

# ---- a run


def tensors_of(request: Request) -> dict[str, torch.Tensor]:
    """Global random q, k, v and dout in the problem's format. Padding is NaN: it never reaches anything."""
    p = request.problem
    shapes = {"q": (p.heads_q, p.d_qk), "k": (p.heads_kv, p.d_qk), "v": (p.heads_kv, p.d_v)}
    made: dict[str, torch.Tensor] = {}
    for number, (name, shape) in enumerate((shapes | {"dout": (p.heads_q, p.d_v)}).items()):
        generator = torch.Generator().manual_seed(4 * request.seed + number)
        starts, lengths = p.starts(side_of(name)), p.lengths.tokens(side_of(name))
        x = torch.full((starts[-1], *shape), float("nan"), dtype=torch.float64)
        for start, length in zip(starts, lengths, strict=False):
            x[start : start + length] = torch.randn(length, *shape, generator=generator, dtype=torch.float64)
        made[name] = to_format(x.to(getattr(torch, p.dtype)), request.in_format, len(p.sequences))
    return made


def run(request: Request) -> Trace:
    """Forward and backward of the random tensors over a simulated group, recorded."""
    tensors = tensors_of(request)

    def rank_main(member: SimMember) -> None:
        cp = request.context(member)
        plan = request.plan_of(cp)

        def cut(name: str) -> dict[str, Any]:
            """The arguments of `shard`: the lengths of this tensor's side, or the plan for "balanced"."""
            if request.layout == "balanced":
                return {"plan": plan}
            cu = torch.tensor(request.problem.starts(side_of(name))) if request.in_format == "thd" else None
            return {"qkv_format": request.in_format, "cu_seqlens_padded": cu}

        mine = {name: shard(x, cp=cp, **cut(name)) for name, x in tensors.items()}
        q, k, v = (mine[name].requires_grad_() for name in ("q", "k", "v"))
        attention(q, k, v, cp=cp, plan=plan).backward(mine["dout"])  # pyright: ignore[reportUnknownMemberType]

    with trace() as recorded:
        SimGroup(request.cp_size).run(rank_main)
    return recorded


# ---- bugs to practise on, as real implementations have had them: each spoils one place on one rank


@dataclass(frozen=True)
class Plant:
    """`spoil(rank, original)` is the wrong variant of attribute `name` of `owner`."""

    owner: Any
    name: str
    spoil: Callable[[int, Callable[..., Any]], Callable[..., Any]]


@contextmanager
def planted(bug: str, rank: int) -> Generator[None]:
    """The reference is wrong on one rank inside this block."""
    check_choice("--plant", bug, tuple(PLANTS))
    plant = PLANTS[bug]
    with mock.patch.object(plant.owner, plant.name, plant.spoil(rank, getattr(plant.owner, plant.name))):
        yield


def _lost_half(rank: int, unpack: Callable[..., None]) -> Callable[..., None]:
    """Keys and values are used before all of them have arrived: the second half of each message is still zero."""

    def wrong(held: RankTensors, message: Message, boxes: list[Parcel]) -> None:
        if held.rank == rank and message.kind == "kv":
            for box in boxes:
                box.tensor[box.tensor.numel() // 2 :] = 0.0
        unpack(held, message, boxes)

    return wrong


def _shifted_keys(rank: int, of_tile: Callable[..., Any]) -> Callable[..., Any]:
    """A tile reads its keys from one row too early, as with a wrong cumulative length."""

    def wrong(held: RankTensors, tile: Sequence[int], dtype: torch.dtype, *kinds: str) -> Any:
        area, q_start, q_stop, k_start, k_stop, *heads = tile
        early = int(held.rank == rank and k_start > 0)
        return of_tile(held, (area, q_start, q_stop, k_start - early, k_stop - early, *heads), dtype, *kinds)

    return wrong


def _unscaled_merge(rank: int, add: Callable[..., None]) -> Callable[..., None]:
    """Partial outputs are added up without the weights that their log-sum-exps give them."""

    def wrong(held: RankTensors, kind: str, rows: slice, heads: slice, *values: torch.Tensor) -> None:
        if held.rank == rank and kind == "out":
            total = held.tensors["out"][0][rows, heads] + values[0]
            add(held, kind, rows, heads, *values)
            held.tensors["out"][0][rows, heads] = total
        else:
            add(held, kind, rows, heads, *values)

    return wrong


def _gradient_twice(rank: int, unpack: Callable[..., None]) -> Callable[..., None]:
    """The gradients of keys and values that come from another rank are added twice."""

    def wrong(held: RankTensors, message: Message, boxes: list[Parcel]) -> None:
        for _ in range(2 if held.rank == rank and message.kind == "dkv" else 1):
            unpack(held, message, boxes)

    return wrong


PLANTS = {
    "lost-half": Plant(RankTensors, "unpack", _lost_half),
    "shifted-keys": Plant(RankTensors, "of_tile", _shifted_keys),
    "unscaled-merge": Plant(RankTensors, "accumulate", _unscaled_merge),
    "gradient-twice": Plant(RankTensors, "unpack", _gradient_twice),
}


# ---- commands


@with_options
def record(
    request: Request,
    save: Annotated[Path | None, Option(help="Write the trace to this file, for `compare`.")] = None,
    plant: Annotated[str, Option(help=f"Plant a bug, to practise on: {', '.join(PLANTS)}.")] = "",
    plant_rank: Annotated[int | None, Option(help="The rank that has the bug; 1 unless given.")] = None,
) -> None:
    """Run a problem forward and backward on random tensors, record every intermediate, and print what was recorded.

    Exit code: 0, or 2 for a problem that is refused.
    """
    console = Console(highlight=False, soft_wrap=True)
    if plant_rank is not None and not plant:
        raise ValueError(f"--plant-rank is {plant_rank}, but --plant names no bug; leave it out")
    spoiled = 1 if plant_rank is None else plant_rank
    if plant:
        check_number("--plant-rank", spoiled, request.cp_size)
    with console.status("running all ranks"):
        if plant:
            with planted(plant, spoiled):
                trace = run(request)
        else:
            trace = run(request)
        if save is not None:
            trace.save(save)
    console.print(str(trace), markup=False)
    if save is not None:
        console.print(f"\nsaved to {save}", markup=False)


_FILE = "A saved trace; or a quoted pattern such as 'run-*.pt', where each process has saved its own rank."


def compare(
    a: Annotated[str, typer.Argument(help=_FILE)],
    b: Annotated[str, typer.Argument(help="Another run of the same problem.")],
    rtol: Annotated[float | None, typer.Option(help="Relative tolerance; by default rounding in the dtype.")] = None,
    atol: Annotated[float | None, typer.Option(help="Absolute tolerance; by default rounding in the dtype.")] = None,
) -> None:
    """Name the first step and rank where two recorded runs part, and what differs there.

    Exit code: 0 where they agree, 1 where they part, 2 for files that hold no trace.
    """
    console = Console(highlight=False, soft_wrap=True)
    with readable_errors():
        with console.status("comparing"):
            found = compare_traces(_loaded("A", a), _loaded("B", b), rtol=rtol, atol=atol)
        console.print(str(found), markup=False, style="green" if found else None)
    if not found:
        raise typer.Exit(CHECK_FAILED)


def _loaded(argument: str, path: str) -> Trace:
    """The trace of a command's argument; its errors name the argument."""
    try:
        return Trace.load(path)
    except OSError as error:
        raise ValueError(f"{argument} is {path!r}; it must be a saved trace: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{argument} is {path!r}; it must be a saved trace: {error}") from error
