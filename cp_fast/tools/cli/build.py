"""`build`: the native kernels, ahead of their first use."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

from cp_fast.build import builder as native
from cp_fast.build.recipe import DEVICES, VARIABLE, BuildError, Unavailable, read_archs
from cp_fast.compile.pipeline import compiled
from cp_fast.compile.program import Launch
from cp_fast.kernels.attention.choose_backend import by_name
from cp_fast.kernels.attention.fa4 import fa4_recorded
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_fast.tools.cli.plan import Request, problem_of
from cp_fast.tools.cost.counts import LIBRARY
from cp_fast.tools.cost.measure_machine import launch_calls
from cp_fast.tools.cost.predict import candidates
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.values import MOST_RANKS, read_count
from cp_ref.show.cli.description import size_text
from cp_ref.show.cli.options import lengths, window
from cp_ref.show.cli.terminal import CHECK_FAILED, readable_errors

__all__ = [
    "LaunchClass",
    "build",
    "compile_shapes",
    "launch_classes",
]


def build(
    device: Annotated[
        Literal["cpu", "cuda", "all"] | None,
        typer.Option(help="Whose kernels. Without it, those of every device that this machine can use."),
    ] = None,
    archs: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help=f"GPU architectures such as 90 or 80,90, or all. Default: ${VARIABLE}, or the GPUs here.",
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Build nothing; say whether it has been built.")] = False,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="H_Q,H_KV,D_QK,D_V",
            help="Compile FlashAttention 4's kernels for these heads and head dims instead; several times for several.",
        ),
    ] = None,
    cp_size: Annotated[int, typer.Option(help="--shapes: number of ranks.", min=1)] = 2,
    mask: Annotated[str, typer.Option(help="--shapes: attn_mask_type.")] = "padding_causal",
    window_size: Annotated[str, typer.Option("--window", help="--shapes: LEFT,RIGHT; -1 is unbounded.")] = "-1,-1",
    dtype: Annotated[str, typer.Option(help="--shapes: bfloat16 or float16.")] = "bfloat16",
) -> None:
    """Build the native kernels into the cache now, so that their first use does not have to.

    Compiling for GPUs takes nvcc, and no GPU where --archs is given. FlashAttention 4's kernels (--shapes) need a GPU
    and the library. Exit code: 0 when all is built, else 1.
    """
    if shapes:
        with readable_errors():
            if device is not None or archs is not None or check:
                raise ValueError("--shapes compiles for the GPU here; --device, --archs and --check do not go with it")
            read_count("--cp-size", cp_size, at_least=1, at_most=MOST_RANKS)
            sides = window(window_size)
            works = compile_shapes(Console(soft_wrap=True, highlight=False), shapes, cp_size, mask, sides, dtype)
        if not works:
            raise typer.Exit(CHECK_FAILED)
        return
    with readable_errors():
        if window_size != "-1,-1":
            raise ValueError(f"--window is {window_size!r}, but --shapes is not given; native kernels have no windows")
        numbers = None if archs is None else read_archs(archs, "--archs")
        chosen = _devices(device)
    console = Console(soft_wrap=True, highlight=False)
    if not chosen:
        console.print("nothing can be built here: " + escape("; ".join(filter(None, map(native.why_not, DEVICES)))))
        raise typer.Exit(CHECK_FAILED)
    outcomes = [_built(console, name, numbers, check) for name in chosen]
    if not all(outcomes):
        raise typer.Exit(CHECK_FAILED)


def _devices(device: str | None) -> list[str]:
    if device is None:
        return [name for name in DEVICES if native.why_not(name) is None]
    return list(DEVICES) if device == "all" else [device]


def _built(console: Console, device: str, archs: tuple[int, ...] | None, check: bool) -> bool:
    """Whether the kernels of a device are built now."""
    if check:
        found = native.find(device, archs)
        console.print(f"{device}: " + (f"built, {_size(found)}, {escape(str(found))}" if found else "not built"))
        return found is not None
    began = time.perf_counter()
    fresh: list[str] = []
    try:
        path = native.build(device, archs, fresh.append)
    except (Unavailable, BuildError, ValueError) as error:
        console.print(f"{device}: [red]failed[/]: {escape(str(error))}")
        return False
    how = f"built in {time.perf_counter() - began:.1f} s" if fresh else "there already"
    console.print(f"{device}: [green]{how}[/], {_size(path)}, {escape(str(path))}")
    return True


def _size(path: Path) -> str:
    return size_text(path.stat().st_size)


# ---- FlashAttention 4's kernels
#
# `build --shapes`: compile FlashAttention 4's kernel for each class of shapes ahead of the first call.
#
# A kernel is compiled for one class: dtype, head dims, query heads a kv head, whether each side of the window is
# bounded, and the pass. The schedules determine the classes: own tiles are causal, others' are not, a window adds
# edges. So the launches of small problems with the same heads, mask and window are listed under all schedules and
# ranks, and one tiny launch of each class is made.


_ROWS = 256
_DEVICE = "cuda"


class LaunchClass(NamedTuple):
    """The class of a launch, without head dims and dtype. `left`, `right`: the window, None for unbounded."""

    heads_q: int
    heads_kv: int
    left: int | None
    right: int | None

    def __str__(self) -> str:
        left, right = ("*" if side is None else side for side in (self.left, self.right))
        return f"{self.heads_q} query heads over {self.heads_kv}, window {left}:{right}"


def compile_shapes(
    console: Console, texts: list[str], cp_size: int, mask: str, window: tuple[int, int], dtype: str
) -> bool:
    """Compile every class of these shapes that is not compiled yet, and report it; returns whether FlashAttention 4
    works here.

    Args:
        texts: H_Q,H_KV,D_QK,D_V each.

    Raises:
        ValueError, TypeError: naming what is wrong. Unsupported: naming what is missing.
    """
    problems = [_problem(text, cp_size, mask, window, dtype) for text in texts]
    backend = by_name("fa4")
    if reason := backend.why_not():
        console.print(f"FlashAttention 4: [red]nothing is compiled[/]: {escape(str(reason))}")
        return False
    for problem in problems:
        for one in launch_classes(problem):
            began = time.perf_counter()
            segments = VarlenBatch.pack([_ROWS], [_ROWS], one.left, one.right, _DEVICE)
            _, back = launch_calls(backend, replace(problem, heads_q=one.heads_q, heads_kv=one.heads_kv), segments)
            back()
            took = time.perf_counter() - began
            console.print(f"{problem.dtype} {problem.d_qk}/{problem.d_v}, {one}: {took:.1f} s, forward and backward")
    console.print(f"kept {escape(fa4_recorded.kept_where())}")
    return True


def launch_classes(problem: Problem) -> list[LaunchClass]:
    """The launches of all ranks for such a problem of several documents, under every schedule that supports its heads.

    >>> from cp_ref.schedules.problem import Sequence
    >>> small = Problem(2, (Sequence(64, 64, 64, 64),), heads_q=8, heads_kv=2, qkv_format="thd", window_size=(16, 0))
    >>> [str(one) for one in launch_classes(small)]
    ['8 query heads over 2, window 0:*', '8 query heads over 2, window 16:0']
    """
    return sorted(set(_classes(problem)), key=lambda one: (one.heads_q // one.heads_kv, str(one)))


def _classes(problem: Problem) -> Iterator[LaunchClass]:
    """Classes with representative heads and windows: the ratio of heads, and 0 or the problem's own side."""
    kv, own = problem.heads_kv, problem.window_size
    for one in candidates(problem, domain=8):
        for rank in range(problem.cp_size) if not one.refused else ():
            for launch in compiled(one.problem, rank, LIBRARY).programs.forward.of(Launch):
                of_q, of_kv = (view.heads[1] - view.heads[0] for view in launch.operands[:2])
                heads = of_q * kv // of_kv, kv
                sides = launch.batch.left, launch.batch.right
                yield LaunchClass(*heads, *(x if not x else max(y, 1) for x, y in zip(sides, own, strict=True)))


def _problem(text: str, cp_size: int, mask: str, window: tuple[int, int], dtype: str) -> Problem:
    """A problem of a long and a short document, much longer than a window."""
    shape = lengths("--shapes", text)
    if len(shape) != 4:
        raise ValueError(f"--shapes is {text!r}; it must be H_Q,H_KV,D_QK,D_V, such as 32,8,128,128")
    sizes = dict(zip(("heads_q", "heads_kv", "d_qk", "d_v"), shape, strict=True))
    rows, sides = 2 * _ROWS * cp_size, f"{min(window[0], _ROWS)},{min(window[1], _ROWS)}"
    alone = Request("p2p", 1, seqlens=f"{8 * rows},{rows}", mask=mask, window=sides, dtype=dtype, **sizes)
    return replace(problem_of(alone), cp_size=cp_size)
