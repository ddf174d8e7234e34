"""`plan --compare`: what a batch costs under each layout and schedule, as a table."""

from __future__ import annotations

from typing import Any, cast

from rich.table import Table

from cp_fast.tools.cli.common import size_text
from cp_fast.tools.cli.plan import Request
from cp_ref.contract.cli.options import window
from cp_ref.contract.cli.terminal import table
from cp_ref.contract.compare_layouts import compare_layouts
from cp_ref.schedules.words import CP_COMM_TYPES, LAYOUTS

__all__ = ["comparison"]


def comparison(request: Request) -> Table:
    """The costs of the largest rank, one line for each layout and schedule. Layout and schedule of the request are not
    looked at; its batch is packed.

    Raises:
        ValueError, TypeError: naming what is wrong.
    """
    if request.seqlens_kv or request.seqlen_kv is not None:
        raise ValueError("--compare is for self-attention; --seqlens-kv and --seqlen-kv do not go with it")
    if request.areas:
        raise ValueError(f"--areas is {request.areas!r}; --compare is for masks and windows")
    lengths = request.lengths_q or [request.length] * request.count
    costs = compare_layouts(
        lengths,
        cp_size=request.cp_size,
        attn_mask_type=cast(Any, request.mask_type),
        window_size=window(request.window),
        heads_q=request.heads_q,
        heads_kv=request.heads_kv,
        d_qk=request.d_qk,
        d_v=request.d_qk if request.d_v is None else request.d_v,
        dtype=request.dtype,
        cp_comm_types=[name for name in CP_COMM_TYPES if name != "a2a+p2p"],
    )
    made = table(
        f"{len(lengths):,} documents, {sum(lengths):,} tokens on {request.cp_size} ranks: what the largest rank has",
        *("layout", "schedule", ">work / mean", ">K/V rows received", ">sent, both passes", ">tail rows"),
    )
    for n, cost in enumerate(costs, 1):
        numbers = f"{cost.work:.3f}", f"{cost.kv_rows:,.0f}", size_text(cost.sent_bytes), f"{cost.tail:,}"
        cells = ("refused", "", "", "") if cost.refused else numbers
        made.add_row(cost.layout, cost.cp_comm_type, *cells, end_section=n % (len(costs) // len(LAYOUTS)) == 0)
    made.caption = "\n".join(dict.fromkeys(f"refused: {cost.refused}" for cost in costs if cost.refused)) or None
    return made
