"""`build`: the native kernels, ahead of their first use."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from cp_fast import build as native
from cp_fast.build.recipe import VARIABLE, read_archs
from cp_fast.tools.cli.common import size_text
from cp_fast.tools.cli.build import compile_shapes
from cp_ref.contract.cli.options import window
from cp_ref.contract.cli.terminal import CHECK_FAILED, readable_errors
from cp_ref.schedules.values import MOST_RANKS, read_count

__all__ = ["build"]


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
        console.print(
            "nothing can be built here: " + escape("; ".join(filter(None, map(native.why_not, native.DEVICES))))
        )
        raise typer.Exit(CHECK_FAILED)
    outcomes = [_built(console, name, numbers, check) for name in chosen]
    if not all(outcomes):
        raise typer.Exit(CHECK_FAILED)


def _devices(device: str | None) -> list[str]:
    if device is None:
        return [name for name in native.DEVICES if native.why_not(name) is None]
    return list(native.DEVICES) if device == "all" else [device]


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
    except (native.Unavailable, native.BuildError, ValueError) as error:
        console.print(f"{device}: [red]failed[/]: {escape(str(error))}")
        return False
    how = f"built in {time.perf_counter() - began:.1f} s" if fresh else "there already"
    console.print(f"{device}: [green]{how}[/], {_size(path)}, {escape(str(path))}")
    return True


def _size(path: Path) -> str:
    return size_text(path.stat().st_size)
