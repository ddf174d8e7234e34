"""`explain --values`: one query of one head followed through the steps of a real run, to the oracle's number."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from cp_ref.api.packed_formats import lse_to_packed, to_packed
from cp_ref.cli.explained_problem import Request
from cp_ref.cli.words import span
from cp_ref.common.cli.terminal import table
from cp_ref.executor.merge_partials import merge
from cp_ref.oracle import dense_attention
from cp_ref.spec import Problem
from cp_ref.tracing.trace_items import Item, Piece, Trace

__all__ = ["checked_position", "show_values"]

_SHOWN = 2  # elements of an output


def show_values(console: Console, request: Request, position: tuple[int, int], head: int) -> None:
    """Run the problem and follow one position: (sequence, position in it), as from `checked_position`."""
    problem, (seq, query) = request.problem, position
    with console.status("running all ranks"):
        trace = request.run()
    row = problem.starts_q[seq] + query
    partial = _partial_results(trace, row, head)
    final = {item.name: item for item in trace.select("forward", kind="final") if _holds(item.piece, row, head)}
    console.print(Rule(Text("One position, in numbers", "bold"), align="left"))
    rows = "keys" if problem.areas is None else "key rows of the packed buffer"
    keys = f"sees {rows} {seen}" if (seen := _seen(problem, seq, row)) else "sees no key"
    _say(
        console,
        f"Sequence {seq}, query {query}, head {head}; rank {final['out'].rank} owns it, and it {keys}. Each tile gives "
        "a partial output, which is right for its own keys, and the log-sum-exp of its scores, which says how much "
        f"these keys weigh. The first {min(_SHOWN, problem.d_v)} of {problem.d_v} elements of each output are shown.",
    )
    out, lse = _merge_table(console, problem, seq, partial)
    if len(partial) > 1:
        _spell_out(console, partial)
    _results(console, request, (out, lse), final, (seq, query, head))


def checked_position(problem: Problem, position: tuple[int, int] | None) -> tuple[int, int]:
    """The position, or for None the last query of the longest sequence. ValueError: there is no such query."""
    lengths = [s.len_q for s in problem.sequences]
    if not any(lengths):
        raise ValueError("--values needs a query, and the problem has none")
    seq, query = position or (lengths.index(max(lengths)), max(lengths) - 1)
    if seq >= len(lengths) or query >= lengths[seq]:
        known = ", ".join(f"{n}: {length}" for n, length in enumerate(lengths))
        raise ValueError(f"--query is {seq}:{query}, but the sequences have these numbers of queries: {known}")
    return seq, query


def _seen(problem: Problem, seq: int, row: int) -> str:
    """The keys that a query row sees, counted from `_first_key`; empty if it sees no key."""
    first, seen = _first_key(problem, seq), list[tuple[int, int]]()
    for q0, q1, k0, k1, lo, hi in problem.workload.areas.rows():
        start, stop = max(k0, row + lo), min(k1, row + hi + 1)
        if q0 <= row < q1 and start < stop:
            seen.append((start - first, stop - first))
    return ", ".join(span(*keys) for keys in sorted(seen))


def _first_key(problem: Problem, seq: int) -> int:
    """The key row numbered 0: the first of the sequence, or with areas, which know no sequences, of the buffer."""
    return problem.starts_kv[seq] if problem.areas is None else 0


def _holds(piece: Piece | None, row: int, head: int) -> bool:
    return piece is not None and piece.start <= row < piece.stop and piece.head_start <= head < piece.head_stop


def _at(item: Item, row: int, head: int) -> torch.Tensor:
    """The numbers of one query row and head: [d], or a scalar."""
    assert item.piece is not None
    return item.tensor[row - item.piece.start, head - item.piece.head_start]


def _partial_results(trace: Trace, row: int, head: int) -> list[tuple[Item, torch.Tensor, torch.Tensor]]:
    """Every tile of the forward pass that has this query row and head: its item, out [d_v] and lse []."""
    tiles = [i for i in trace.select("forward", kind="tile") if _holds(i.piece, row, head)]
    outs = [i for i in tiles if i.name == "out"]
    lses = [i for i in tiles if i.name == "lse"]
    return [(o, _at(o, row, head), _at(x, row, head)) for o, x in zip(outs, lses, strict=True)]


def _merge_table(
    console: Console, problem: Problem, seq: int, partial: list[tuple[Item, torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tile by tile: its result, and the result so far; `first_key`: the row of the sequence's first key. Returns
    (out, lse) of all.
    """
    rows = table("", ">step", ">rank", "keys", ">lse", "out", ">lse now", "out now")
    wide = torch.float64 if problem.dtype == "float64" else torch.float32
    out, lse = torch.zeros(problem.d_v, dtype=wide), torch.tensor(float("-inf"), dtype=wide)
    for item, part, part_lse in partial:
        out, lse = merge(out, lse, part, part_lse)
        first, last = (int(row) - _first_key(problem, seq) for row in item.source.rsplit(" k[", 1)[1][:-1].split(":"))
        numbers = _number(part_lse), _vector(part), _number(lse), _vector(out)
        rows.add_row(str(item.step), str(item.rank), span(first, last), *numbers)
    console.print(rows)
    console.print()
    return out, lse


def _spell_out(console: Console, partial: list[tuple[Item, torch.Tensor, torch.Tensor]]) -> None:
    """The first merge, written out."""
    (_, out_a, lse_a), (_, out_b, lse_b) = partial[:2]
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    a, b, c = _number(lse_a), _number(lse_b), _number(lse)
    x, y, z = (_number(o[0]) for o in (out_a, out_b, out))
    _say(console, "The first merge, written out:")
    console.print(f"  lse    = log(exp({a}) + exp({b})) = {c}")
    console.print(f"  out[0] = exp({a} - {c}) * {x} + exp({b} - {c}) * {y} = {z}\n", soft_wrap=True)


def _results(
    console: Console,
    request: Request,
    merged: tuple[torch.Tensor, torch.Tensor],
    final: dict[str, Item],
    place: tuple[int, int, int],
) -> None:
    """The merged partial results, the run's results and the oracle's, side by side."""
    problem, (seq, query, head) = request.problem, place
    tensors = request.tensors()
    out, lse, _ = dense_attention(tensors["q"], tensors["k"], tensors["v"], **request.arguments)
    row = problem.starts_q[seq] + query
    fmt = problem.qkv_format
    oracle = to_packed(out, fmt)[row, head], lse_to_packed(lse, fmt)[row, head]
    returned = _at(final["out"], row, head), _at(final["lse"], row, head)
    rows = table("", "", ">lse", "out", ">largest difference")
    for name, (o, x) in (("the tiles above, merged", merged), ("cp_ref.attention returned", returned)):
        rows.add_row(name, _number(x), _vector(o), f"{_difference(o, x, *oracle):.1e}")
    rows.add_row("the oracle, in float64", _number(oracle[1]), _vector(oracle[0]), "")
    console.print(rows)
    console.print()


def _difference(out: torch.Tensor, lse: torch.Tensor, oracle_out: torch.Tensor, oracle_lse: torch.Tensor) -> float:
    """The largest difference of any number to the oracle's; two -inf are equal."""
    of_lse = 0.0 if lse.double() == oracle_lse else float((lse.double() - oracle_lse).abs())
    return max(of_lse, float((out.double() - oracle_out).abs().max()))


def _number(x: torch.Tensor) -> str:
    return f"{float(x):.4f}"


def _vector(x: torch.Tensor) -> str:
    return " ".join(f"{float(n):7.4f}" for n in x[:_SHOWN])


def _say(console: Console, words: str) -> None:
    console.print(Text(words))
    console.print()
