"""The GPU's time of forward passes: each rank of two alone on one GPU, without its messages and without the host.

    python -m benchmarks.forward.times --out times.json
    python -m benchmarks.forward.times --names dense --schedules p2p --profile

A rank's launches wait in the GPU's queue behind a kernel that sleeps, so the host does not count. Its group is silent:
messages bring nothing, so received rows are what was in memory. So a time has the kernels, copies and merges of one
rank. `share` = (the whole problem's kernels on one GPU) / 2 / (the slower rank's time). For documents these kernels are
FlashAttention 4's one launch; for other masks the pairs at the rate of the dense causal launch of all tokens.

Before that all ranks play the problem over the simulated group, and some heads of out are compared with attention
written out in float32; what is wrong is not timed. Cases are measured in turns.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Annotated, Any

import torch
import typer

import cp_fast
from benchmarks.forward.cases import HEADS, SCHEDULES, Case, cases_of
from benchmarks.parts.ranks import Commit, JsonOut, Schedules, switched
from cp_fast.kernels.attention.backend_protocol import LaunchOptions
from cp_fast.kernels.attention.choose_backend import by_name
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_ref import SimGroup
from cp_ref.schedules.areas import areas_of_windows
from cp_ref.schedules.problem import ScoreSpec

_MOST = 1e-2  # Relative error of out.
_CHECKED = (0, 13, 31)  # Query heads.


class _Silent:
    """A rank of a group whose messages bring nothing, with prepared exchanges that no kernel carries."""

    by_copies = True

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather_object(self, value: Any) -> list[Any]:
        """All ranks agree."""
        return [value] * self.size

    def exchange(self, sends: Sequence[Any], recvs: Sequence[Any]) -> _Silent:
        """Nothing is sent."""
        return self

    def prepared(self, where: str, sends: Sequence[Any], recvs: Sequence[Any]) -> _Silent:
        """Nothing is sent in any call."""
        return self

    def post(self, group: Any, sends: Sequence[Any], recvs: Sequence[Any]) -> _Silent:
        """Nothing is sent."""
        return self

    def wait(self) -> None:
        """Nothing is on its way."""


def gpu_ms(call: Callable[[], Any], calls: int) -> float:
    """One call's milliseconds on the GPU, whose work waits in its queue until the host has launched all calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(8_000_000 * calls)  # pyright: ignore[reportPrivateUsage]  # about 4 ms a call
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def tensors(tokens: int) -> dict[str, torch.Tensor]:
    """q, k, v of all ranks."""
    draw = torch.Generator(device="cuda").manual_seed(0)
    heads = {"q": HEADS["heads_q"], "k": HEADS["heads_kv"], "v": HEADS["heads_kv"]}
    return {
        name: torch.randn(tokens, n, HEADS["d_qk"], generator=draw, device="cuda").bfloat16()
        for name, n in heads.items()
    }


def alone(lengths: Sequence[int], window: int, x: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """The whole problem's one launch."""
    batch = VarlenBatch.pack(lengths, lengths, None if window < 0 else window, 0, "cuda")
    options, backend = LaunchOptions(ScoreSpec(HEADS["d_qk"] ** -0.5)), by_name("fa4")
    return lambda: backend.forward(x["q"], x["k"], x["v"], batch, options)


def written_out(case: Case, x: dict[str, torch.Tensor], head: int) -> torch.Tensor:
    """out of one head, float32 [t, d]."""
    rows = areas_of(case)
    place, size = torch.arange(case.tokens, device="cuda"), 4096
    k, v = (x[name][:, head // (HEADS["heads_q"] // HEADS["heads_kv"])].float() for name in "kv")
    found = list[torch.Tensor]()
    for begin in range(0, case.tokens, size):
        q, at = x["q"][begin : begin + size, head].float(), place[begin : begin + size, None]
        seen = torch.zeros(len(q), case.tokens, dtype=torch.bool, device="cuda")
        for q0, q1, k0, k1, lo, hi in rows:
            if q0 < begin + size and q1 > begin:
                inside = (at >= q0) & (at < q1) & (place >= k0) & (place < k1)
                seen |= inside & (place - at >= lo) & (place - at <= hi)
        p = (HEADS["d_qk"] ** -0.5 * q @ k.T).masked_fill_(~seen, float("-inf")).softmax(-1)
        found.append(p @ v)
    return torch.cat(found)


def areas_of(case: Case) -> list[tuple[int, ...]]:
    """The areas with their diagonal bands: q0, q1, k0, k1, lo, hi."""
    if case.areas is not None:
        areas = areas_of_windows(tuple(map(tuple, case.areas(case.tokens).tolist())))  # type: ignore[arg-type]
        columns = areas.q_start, areas.q_stop, areas.k_start, areas.k_stop, areas.lo, areas.hi
        return list(zip(*(x.tolist() for x in columns), strict=True))
    edges = case.cu_seqlens.tolist()
    left = -(2**40) if case.window < 0 else -case.window
    return [(a, b, a, b, left, 0) for a, b in pairwise(edges)]


def wrong(case: Case, schedule: str, x: dict[str, torch.Tensor], wanted: dict[int, torch.Tensor]) -> float:
    """The largest relative error of some heads of out, when all ranks play."""

    def play(member: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cp, plan = case.plan(member, schedule, "cuda")
        q, k, v = (cp_fast.shard(x[name], cp=cp, qkv_format="thd", plan=plan) for name in "qkv")
        rows = cp_fast.shard(torch.arange(case.tokens, device="cuda"), cp=cp, qkv_format="thd", plan=plan)
        with torch.no_grad():
            return rows, cp_fast.attention(q, k, v, cp=cp, plan=plan)

    found = SimGroup(2).run(play)
    worst = 0.0
    for head, want in wanted.items():
        for rows, out in found:
            worst = max(worst, float((out[:, head].float() - want[rows]).norm() / want[rows].norm()))
    return worst


def rank_alone(case: Case, schedule: str, rank: int, x: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """One rank's forward pass."""
    cp, plan = case.plan(_Silent(rank, 2), schedule, "cuda")
    q, k, v = (cp_fast.shard(x[name], cp=cp, qkv_format="thd", plan=plan) for name in "qkv")

    def call() -> Any:
        with torch.no_grad():
            return cp_fast.attention(q, k, v, cp=cp, plan=plan)

    return call


def kernels_of(call: Callable[[], Any]) -> list[str]:
    """The kernels of a call, in order: ms and names."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    events = [e for e in seen.events() or () if e.device_type.name == "CUDA"]
    events.sort(key=lambda e: e.time_range.start)
    return [f"{e.time_range.elapsed_us() / 1e3:.3f} {e.name[:70]}" for e in events]


def main(
    names: Annotated[str, typer.Option(help="Problems, with semicolons; all unless given.")] = "",
    schedules: Schedules = SCHEDULES,
    without: Annotated[str, typer.Option(help="Measured too: plans without these passes, with commas.")] = "-",
    rounds: Annotated[int, typer.Option(help="Turns of which the median counts.")] = 5,
    calls: Annotated[int, typer.Option(help="Calls in a row.")] = 4,
    check: Annotated[bool, typer.Option(help="Compare with attention written out first.")] = True,
    profile: Annotated[bool, typer.Option(help="Print the kernels of a call.")] = False,
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """Check, measure in turns, and print."""
    cases = cases_of()
    record: dict[str, Any] = {"commit": commit, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    record["rows"], failed = [], False
    for name in names.split(";") if names else cases:
        case = cases[name]
        x = tensors(case.tokens)
        found: dict[tuple[str, str], list[Callable[[], Any]]] = {}
        errors: dict[tuple[str, str], float] = {}
        wanted = {head: written_out(case, x, head) for head in _CHECKED} if check else {}
        for schedule, word in product(schedules.split(","), without.split(",")):
            with switched(word)():
                error = wrong(case, schedule, x, wanted) if check else 0.0
                if not error < _MOST:
                    print(f"WRONG {name}, {schedule}, without {word}: {error:.1e}", flush=True)
                    failed = True
                    continue
                found[schedule, word] = [rank_alone(case, schedule, rank, x) for rank in range(2)]
                errors[schedule, word] = error
                for rank, call in enumerate(found[schedule, word]):
                    call()
                    if profile:
                        print(name, schedule, word, rank, *kernels_of(call), sep="\n   ", flush=True)
        whole = alone(case.lengths, case.window, x)
        whole()
        turns = [[gpu_ms(whole, calls), *_turn(found, calls)] for _ in range(rounds)]
        of_whole, *others = [statistics.median(column) for column in zip(*turns, strict=True)]
        pairs = case.plan(_Silent(0, 2), "p2p", "cpu")[1].problem.pairs
        ideal = of_whole / 2 if case.areas is None else of_whole / 2 * pairs / (case.tokens * (case.tokens + 1) / 2)
        for n, (schedule, word) in enumerate(found):
            ms = [round(y, 4) for y in others[2 * n : 2 * n + 2]]
            row = {"case": name, "schedule": schedule, "without": word, "ms": ms, "ideal_ms": round(ideal, 4)}
            row |= {"share": round(ideal / max(ms), 3), "relative_error": float(f"{errors[schedule, word]:.1e}")}
            record["rows"].append(row)
            print(*row.values(), flush=True)
        if out is not None:
            out.write_text(json.dumps(record, indent=1) + "\n")
        del x, found, whole
    raise typer.Exit(1 if failed else 0)


def _turn(found: dict[tuple[str, str], list[Callable[[], Any]]], calls: int) -> list[float]:
    times = list[float]()
    for (_, word), ranks in found.items():
        with switched(word)():
            times += [gpu_ms(call, calls) for call in ranks]
    return times


if __name__ == "__main__":
    typer.run(main)
