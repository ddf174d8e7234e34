"""The `demo` command: from options to a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from rich.markup import escape

from cp_fast.backends import BACKENDS
from cp_fast.tools.cli.demo.check import check_exact, check_results, spoiled
from cp_fast.tools.cli.demo.documents import read_documents
from cp_fast.tools.cli.demo.job import Job
from cp_fast.tools.cli.demo.launch import RankFailed, spawn, torchrun_group, under_torchrun
from cp_fast.tools.cli.demo.progress import Bars
from cp_fast.tools.cli.demo.rank import Measured, run_rank
from cp_fast.tools.cli.demo.show import show_checks, show_documents, show_picture, show_ranks
from cp_fast.tools.cli.demo.where import Where, choose_where
from cp_ref.common.cli.options import check_number, exchanging, window
from cp_ref.common.cli.terminal import BAD_INPUT, CHECK_FAILED, check_svg, complain, readable_errors
from cp_ref.spec import LAYOUTS, MASKS, check_choice
from cp_ref.spec.arguments.read_problem import DTYPES
from cp_ref.spec.pictures.text_pictures import svg_picture

__all__ = ["demo"]


def demo(
    ranks: Annotated[
        int | None, typer.Option(help="Number of ranks: 4, or torchrun's.", min=1, show_default=False)
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="A file or folder to read instead of Python's own; repeatable.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Bytes of text in all.", min=1)] = 16384,
    longest: Annotated[int, typer.Option(help="Longest document, in bytes.", min=1)] = 2500,
    heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 4,
    heads_kv: Annotated[int, typer.Option(help="Key and value heads.", min=1)] = 2,
    head_dim: Annotated[int, typer.Option(help="Head dim, even.", min=2)] = 64,
    dtype: Annotated[str, typer.Option(help="float32 on a CPU, bfloat16 on GPUs, unless said otherwise.")] = "",
    layout: Annotated[str, typer.Option(help="dual_chunk, contiguous or balanced.")] = "dual_chunk",
    mask: Annotated[str, typer.Option(help="attn_mask_type, such as padding_causal or padding.")] = "padding_causal",
    window_size: Annotated[str, typer.Option("--window", help="LEFT,RIGHT; -1 is unbounded.")] = "-1,-1",
    cp_comm_type: Annotated[str, typer.Option(help="The schedule: p2p, all_gather, a2a or a2a+p2p.")] = "p2p",
    a2a_size: Annotated[
        int | None, typer.Option(help="a2a+p2p only: how many ranks exchange heads, 2 unless given.")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, fa4, cudnn, fa2, cpu or torch: the attention kernels.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the choice of documents and the weights.")] = 0,
    head: Annotated[int, typer.Option(help="The picture's query head, where heads are spread over the ranks.")] = 0,
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this file too.")] = None,
    spoil: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Run attention over real documents on several ranks, forward and backward, and check all results with the oracle.

    Exit code: 0, 1 when a check or a rank fails, 2 for options that are refused.
    """
    console = Console()
    with readable_errors():
        for name, value, choices in (
            ("--layout", layout, LAYOUTS),
            ("--mask", mask, MASKS),
            ("--device", device, ("auto", "cpu", "cuda")),
            ("--backend", backend, ("auto", *(b.name for b in BACKENDS))),
        ):
            check_choice(name, value, choices)
        check_svg(svg)
        where = choose_where(ranks, device)
        dtype = dtype or ("float32" if where.device == "cpu" else "bfloat16")
        check_choice("--dtype", dtype, DTYPES)
        if heads % heads_kv or head_dim % 2:
            raise ValueError(
                f"--heads {heads} must be a multiple of --heads-kv {heads_kv}, and --head-dim {head_dim} even"
            )
        documents = read_documents(text or [], tokens, longest, seed)
        job = Job(
            documents=tuple(d.data for d in documents),
            ranks=where.ranks,
            device=where.device,
            dtype=dtype,
            heads_q=heads,
            heads_kv=heads_kv,
            head_dim=head_dim,
            layout=cast(Any, layout),  # checked above
            cp_comm_type=cast(Any, cp_comm_type),
            a2a_size=exchanging(cp_comm_type, a2a_size, where.ranks),
            attn_mask_type=cast(Any, mask),
            window_size=window(window_size),
            backend=backend,
            seed=seed,
            spoil=spoil,
        )
        check_number("--head", head, job.heads_q)
    if not where.speaks:
        console.quiet = True
    show_documents(console, documents, job)
    console.print(
        f"{job.heads_q} query heads over {job.heads_kv}, d {job.head_dim}, {job.dtype}; {escape(where.words)}"
    )
    with Bars(console, job) as bars:
        measured = _run(job, where, bars)
        if not where.speaks:
            return
        exact = check_exact(job, measured.tensors)
        rows = check_results(job, spoiled(job, measured.tensors), torch.device(where.device), bars.document)
    show_picture(console, measured, head)
    console.print()
    show_ranks(console, job, measured)
    well = show_checks(console, rows, exact)
    if svg is not None:
        with readable_errors():
            svg.write_text(svg_picture(measured.problem, measured.schedule, head), encoding="utf-8")
        console.print(f"picture written to {svg}", soft_wrap=True)
    if not well:
        complain("a check failed: the table above says which")
        raise typer.Exit(CHECK_FAILED)
    console.print("[bold green]All results are right.[/]")


def _run(job: Job, where: Where, bars: Bars) -> Measured:
    """The ranks at work; a failure is told in one line, with its traceback where it is not about the options."""
    try:
        if not under_torchrun():
            return spawn(job, bars.ranks)
        with torchrun_group(job) as own_device:
            return run_rank(job, own_device, bars.stage)
    except RankFailed as error:
        bars.stop()
        if not error.about_arguments:
            Console(stderr=True, highlight=False).print(error.details, style="dim", markup=False, soft_wrap=True)
        complain(str(error))
        raise typer.Exit(BAD_INPUT if error.about_arguments else CHECK_FAILED) from None
