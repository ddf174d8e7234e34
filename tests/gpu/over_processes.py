"""Every schedule and layout of cp_fast, and layers, with a process for each rank: the simulated group's bits.

    python -m tests.gpu.over_processes --size 4 --seconds 150 --out nccl_4x.json      # NCCL, and peer memory
    python -m tests.gpu.over_processes --size 2 --device cpu --every 20               # gloo, some of the plays

One start of the processes plays everything: first all plays together, then each rank its part of them alone, over the
simulated group and against the oracle. Results are compared by digests. Exit code 1 if a play was wrong, 2 if the time
was up before the last one; it ends in time whatever the ranks do.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import typer

import cp_fast
from benchmarks.parts.ranks import Commit, Device, JsonOut, connect
from cp_fast import masks
from cp_fast.transport import memory_group
from cp_fast.transport.memory_group import Crossed
from cp_fast.transport.peer_exchange import PeerMessages
from cp_ref import SimGroup, dense_attention
from cp_ref.schedules.words import Layout

GRACE_S = 40.0  # for what is under way when the time is up
TIMEOUT_S = 300.0  # of the groups: the one who started the ranks watches them
MOST_ERROR = 6e-3  # of the norm
LENGTHS, SLOTS = [1500, 3, 0, 700], [1537, 24, 0, 722]  # which no layout cuts without a rest
_AT_A_TIME = 48  # plays over processes, which are then compared with the simulated group's
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "padding": {"attn_mask_type": "padding"},
    "window": {"window_size": (200, 0)},
    "window of padding": {"attn_mask_type": "padding", "window_size": (64, 32)},
    "areas": {"areas": masks.shared_prefix(500, [200] * 8)},
}
LAYOUTS = ("dual_chunk", "contiguous", "balanced", "table")
Digests = dict[str, str]


@dataclass(frozen=True)
class Play:
    """One call, forward and backward. `way`: with a "plan", one that is "updated", or in a captured "graph"."""

    size: int
    comm: Any
    inner: int  # a2a_size
    layout: str
    mask: str
    way: str = "plan"
    messages: str = "group"  # The transport: "group" or "peer_memory".
    kv_heads: int = 0  # 0: as many as ranks
    layer: str = ""  # one of `LAYERS`; attention if empty

    def __str__(self) -> str:
        comm = f"{self.comm} {self.size // self.inner} x {self.inner}" if self.comm == "a2a+p2p" else self.comm
        heads = f", {self.kv_heads} kv heads" if self.kv_heads else ""
        layer = f"{self.layer}, " if self.layer else ""
        return f"{layer}{comm}, {self.layout}, {self.mask}{heads}, {self.way}, by {self.messages}"

    @property
    def heads(self) -> tuple[int, int]:
        """Of q and of kv: the same number of query heads to a kv head on every rank, for few kernels to compile."""
        return 2 * self.size, self.kv_heads or self.size


def plays(size: int, device: str) -> list[Play]:
    """All plays of a group; on a CPU there is nobody but the group to carry messages, and nothing is captured."""
    inners = [n for n in range(1, size + 1) if size % n == 0]
    schedules = [("p2p", 1), ("all_gather", 1), ("a2a", size), *(("a2a+p2p", n) for n in inners)]
    found = [Play(size, *way, layout, mask) for way, layout, mask in product(schedules, LAYOUTS, MASKS)]
    found += [Play(size, *way, layout, "causal", "updated") for way, layout in product(schedules, LAYOUTS[:3])]
    found += [Play(size, "a2a", size, "dual_chunk", "causal", kv_heads=size // 2)]
    found += [
        Play(size, *way, "dual_chunk", "causal", layer=layer) for layer in LAYERS for way in schedules_of(layer, size)
    ]
    if device == "cpu":
        return found
    found = [replace(play, messages=messages) for messages in ("group", "peer_memory") for play in found]
    return found + [Play(size, *way, "dual_chunk", "causal", "graph") for way in schedules]


def schedules_of(layer: str, size: int) -> list[tuple[str, int]]:
    """The schedules that a layer takes, with the ranks that exchange heads: states and halos travel alike in all."""
    return [("all_gather", 1), ("a2a", size)] if layer == "sparse_attention" else [("p2p", 1)]


@dataclass(frozen=True)
class Place:
    """Where a play runs: tensors are smaller on a CPU."""

    device: torch.device

    @property
    def scale(self) -> int:
        return 1 if self.device.type == "cuda" else 20

    @property
    def dim(self) -> int:
        return 128 if self.device.type == "cuda" else 8

    @property
    def lengths(self) -> tuple[list[int], list[int]]:
        """Tokens and slots of the sequences."""
        lengths = [-(-n // self.scale) for n in LENGTHS]
        return lengths, [max(n, s // self.scale) for n, s in zip(lengths, SLOTS, strict=True)]

    def arguments(self, play: Play) -> dict[str, Any]:
        """Those of the problem."""
        lengths, slots = map(cumulative, self.lengths)
        found = {"qkv_format": "thd", "cu_seqlens_q": lengths, "cu_seqlens_q_padded": slots, **MASKS[play.mask]}
        if play.mask == "areas":
            found["areas"] = torch.cat([found["areas"][:, :4] // self.scale, found["areas"][:, 4:]], 1)
        return found

    def tensors(self, play: Play) -> dict[str, torch.Tensor]:
        """q, k, v and dout, global: the same for all plays with these heads."""
        return drawn(self, *play.heads)


@cache
def drawn(place: Place, heads_q: int, heads_kv: int) -> dict[str, torch.Tensor]:
    """Tensors of a place, which nobody changes: every rank of every play reads them."""
    generator, total = torch.Generator().manual_seed(1), sum(place.lengths[1])
    heads = {"q": heads_q, "k": heads_kv, "v": heads_kv, "dout": heads_q}
    found = {name: torch.randn(total, n, place.dim, generator=generator) for name, n in heads.items()}
    return {name: x.bfloat16().to(place.device) for name, x in found.items()}


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)], dtype=torch.int32)


def table(slots: list[int], size: int) -> list[tuple[int, int, int, int]]:
    """Every sequence in pieces, each on another rank."""
    cuts = [(n, a, min(a + 190, length)) for n, length in enumerate(slots) for a in range(0, length, 190)]
    return sorted(((3 * number + 1) % size, *cut) for number, cut in enumerate(cuts))


def planned(cp: cp_fast.ContextParallel, play: Play, place: Place) -> cp_fast.Plan:
    """The plan of a play; one that was made for another batch, and updated."""
    arguments, slots = place.arguments(play), place.lengths[1]
    if play.layout == "table":
        arguments["layout"] = table(slots, play.size)
    if play.layer in ("causal_conv1d", "linear_attention"):
        arguments["linear"] = True
    sizes = {"heads_q": play.heads[0], "heads_kv": play.heads[1], "d_qk": place.dim, "d_v": place.dim}
    how: dict[str, Any] = {"cp": cp, "dtype": torch.bfloat16, "device": place.device, "deterministic": True, **sizes}
    if play.way != "updated":
        return cp_fast.make_plan(**arguments, **how)
    lengths = {name: arguments.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_q_padded")}
    total = rows_of(play, place)
    room = {"max_sequences": 6, "max_tokens_q": total, "cu_seqlens_q": cumulative([total])}
    plan = cp_fast.make_plan(**arguments, **how, **room)
    plan.update(cp=cp, **lengths)
    return plan


def rows_of(play: Play, place: Place) -> int:
    """Global rows: those of all slots, and of a plan that is updated as many for each rank."""
    total, parts = sum(place.lengths[1]), 2 * play.size if play.way == "updated" else 1
    return -(-total // parts) * parts


def one_rank(group: Any, play: Play, place: Place) -> dict[str, torch.Tensor]:
    """One rank's share of a play; global results. Nothing but the reason where the plan has no room for an update."""
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)  # the simulated group's threads begin with the first GPU
    cp = cp_fast.ContextParallel(group, play.comm, layout=cast(Layout, play.layout.replace("table", "dual_chunk")))
    try:
        plan = planned(cp, play, place)
    except ValueError as error:
        if play.way != "updated":
            raise
        return {f"refused: {error}": torch.zeros(0)}
    by_copies = isinstance(plan.messages, PeerMessages | Crossed)
    processes = isinstance(group[0] if isinstance(group, tuple) else group, dist.ProcessGroup)
    assert by_copies == (processes and play.messages == "peer_memory"), f"messages by {plan.messages}"
    if play.layer:
        return one_layer(cp, plan, play, place)
    whole = place.tensors(play)
    total = len(whole["q"])
    tail = rows_of(play, place) - total
    padded = {name: torch.cat([x, x.new_zeros(tail, *x.shape[1:])]) for name, x in whole.items()}
    local = {name: cp_fast.shard(x, cp=cp, plan=plan) for name, x in padded.items()}

    def both(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        q, k, v = (inputs[name].detach().requires_grad_() for name in "qkv")
        out, lse = cp_fast.attention(q, k, v, cp=cp, plan=plan, deterministic=True, return_lse=True)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs["dout"])
        return {"out": out.detach(), "lse": lse.detach().t().contiguous(), "dq": dq, "dk": dk, "dv": dv}

    results = captured(both, local) if play.way == "graph" and processes else both(local)
    return {name: cp_fast.unshard(x, cp=cp, plan=plan)[:total] for name, x in results.items()}


def one_layer(cp: cp_fast.ContextParallel, plan: cp_fast.Plan, play: Play, place: Place) -> dict[str, torch.Tensor]:
    """One rank's results of a layer, and its gradients, which are shares where all ranks have the tensor. Linear layers
    compute in float32: there no kernel is chosen by measurements.
    """
    draw, (heads, heads_kv), dim = torch.Generator().manual_seed(2), play.heads, place.dim
    sizes, dtype = LAYERS[play.layer](heads, heads_kv, dim), torch.float32
    if play.layer == "sparse_attention":
        dtype = torch.bfloat16  # the plan's
    rows = {name: torch.randn(sum(place.lengths[1]), *size, generator=draw) for name, size in sizes.items()}
    parts = {name: cp_fast.shard(x.to(place.device, dtype), cp=cp, plan=plan) for name, x in rows.items()}
    given: dict[str, Any] = {name: x.requires_grad_() for name, x in parts.items()}
    if play.layer == "causal_conv1d":
        weight = torch.randn(dim, 4, generator=draw).to(place.device).requires_grad_()
        out, given = cp_fast.causal_conv1d(**given, weight=weight, cp=cp, plan=plan), {**given, "weight": weight}
    elif play.layer == "linear_attention":
        below_zero = {"g": -given["g"].abs()}
        out = cp_fast.linear_attention(**(given | below_zero), cp=cp, plan=plan, kind="mamba2", scale=1 / dim)
    else:
        indices = torch.arange(3, dtype=torch.int32, device=place.device).repeat(len(given["q"]), 1)
        out = cp_fast.sparse_attention(**given, indices=indices, cp=cp, plan=plan)
    grads = torch.autograd.grad(out.square().sum(), list(given.values()))
    return {"out": out.detach(), **{f"d{name}": x for name, x in zip(given, grads, strict=True)}}


LAYERS: dict[str, Callable[[int, int, int], dict[str, tuple[int, ...]]]] = {  # their tensors, by heads and head dim
    "causal_conv1d": lambda heads, heads_kv, dim: {"x": (dim,)},
    "linear_attention": lambda heads, heads_kv, dim: {"q": (2, dim), "k": (2, dim), "v": (2, dim), "g": (2,)},
    "sparse_attention": lambda heads, heads_kv, dim: {"q": (heads, dim), "k": (heads_kv, dim), "v": (heads_kv, dim)},
}


def captured(
    both: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], local: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What both passes give that were captured with other inputs, and replayed."""
    static = {name: torch.zeros_like(x) for name, x in local.items()}
    with torch.autograd.set_multithreading_enabled(False):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            both(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = both(static)
        for name, x in local.items():
            static[name].copy_(x)
        graph.replay()
    torch.cuda.synchronize()
    return results


def digests(results: dict[str, torch.Tensor]) -> Digests:
    """By result, what is the same for the same bits."""
    return {
        name: hashlib.blake2b(x.contiguous().view(torch.uint8).cpu().numpy().tobytes(), digest_size=12).hexdigest()
        for name, x in results.items()
    }


def alone(play: Play, place: Place, exact: Callable[[Play], dict[str, torch.Tensor]]) -> tuple[list[Digests], float]:
    """What every rank of the simulated group gives, and the largest error against the oracle, of its norm."""
    inner = play.inner if play.comm == "a2a+p2p" else 0
    found = SimGroup(play.size).run(lambda member: one_rank(member.split(inner) if inner else member, play, place))
    results = found[0]
    if play.layer or next(iter(results)).startswith("refused"):  # other tests compare layers with their oracles
        return [digests(rank) for rank in found], 0.0
    errors = [float((results[name].double() - x).norm() / x.norm()) for name, x in exact(play).items()]
    return [digests(rank) for rank in found], max(errors)


def oracle(play: Play, place: Place) -> dict[str, torch.Tensor]:
    """The definition, in float64."""
    inputs = {name: x.double() for name, x in place.tensors(play).items()}
    q, k, v = (inputs[name].requires_grad_() for name in "qkv")
    out = dense_attention(q, k, v, **place.arguments(play))[0]
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs["dout"])
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def worker(rank: int, device: str, folder: str, todo: list[Play], until: float) -> None:
    """One rank: a line of JSON for each play in a file of its own."""
    torch.set_num_threads(1)
    size = todo[0].size
    if device == "cuda" and size > torch.cuda.device_count():  # Ranks that share a GPU reach its memory.
        memory_group.why_not = lambda: None
    place = Place(connect(rank, size, folder, device, TIMEOUT_S))
    groups: dict[tuple[str, int], Any] = {}

    def group_of(play: Play) -> Any:
        """One that has carried messages in this way alone: the choice is made once for a group."""
        os.environ["CP_FAST_MESSAGES"] = play.messages
        key = (play.messages, play.inner if play.comm == "a2a+p2p" else 0)
        if key not in groups:
            groups[key] = crossed(size, key[1], rank) if key[1] else dist.new_group(list(range(size)))
        return groups[key]

    @cache
    def exact(mask: str, heads: tuple[int, int]) -> dict[str, torch.Tensor]:
        return oracle(next(play for play in todo if (play.mask, play.heads) == (mask, heads)), place)

    compared = set[Play]()
    with (Path(folder) / f"{rank}.jsonl").open("w", buffering=1) as file:
        for some in (todo[n : n + _AT_A_TIME] for n in range(0, len(todo), _AT_A_TIME)):
            for play in some:
                late = torch.tensor([float(time.time() > until)], device=place.device)
                dist.all_reduce(late)
                if late.item():
                    break
                began = time.monotonic()
                file.write(json.dumps({"case": str(play), "begins": True}) + "\n")
                found = digests(one_rank(group_of(play), play, place))
                file.write(json.dumps({"case": str(play), "found": found, "seconds": time.monotonic() - began}) + "\n")
            alike = list(dict.fromkeys(replace(play, messages="group") for play in some))
            for play in [play for play in alike if play not in compared][rank::size]:
                if time.time() > until:
                    break
                simulated, error = alone(play, place, lambda play: exact(play.mask, play.heads))
                file.write(json.dumps({"case": str(play), "simulated": simulated, "error": error}) + "\n")
            compared.update(alike)
    dist.barrier()
    dist.destroy_process_group()


def crossed(size: int, inner: int, rank: int) -> tuple[Any, Any]:
    """This rank's a2a group of `inner` ranks and its ring across these: new ones, where a mesh would take the group of
    all ranks for one that is as large.
    """
    rows = [list(range(first, first + inner)) for first in range(0, size, inner)]
    columns = [list(range(first, size, inner)) for first in range(inner)]
    made = [[(ranks, dist.new_group(ranks)) for ranks in part] for part in (rows, columns)]  # by all ranks alike
    across, along = (next(group for ranks, group in part if rank in ranks) for part in made)
    return across, along


def run(
    todo: list[Play], device: str, seconds: float, cores: Path | None = None, start: Any = "spawn"
) -> dict[str, Any]:
    """Start the ranks, by a method or a context of multiprocessing, wait for them at most a little longer than
    `seconds`, and say what they found.
    """
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    if cores is not None:
        os.environ |= {"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1", "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP": "1"}
        os.environ["CUDA_COREDUMP_FILE"] = str(cores / "gpu_core.%p")
    size, began = todo[0].size, time.time()
    context: Any = multiprocessing.get_context(start) if isinstance(start, str) else start
    with tempfile.TemporaryDirectory() as folder:
        arguments = (device, folder, todo, began + seconds)
        ranks = [context.Process(target=worker, args=(rank, *arguments), daemon=True) for rank in range(size)]
        for process in ranks:
            process.start()
        ended = 0.0  # when the first rank ended badly: the others wait for it
        while any(process.is_alive() for process in ranks) and time.time() < began + seconds + GRACE_S:
            time.sleep(0.1)
            if any(process.exitcode not in (None, 0) for process in ranks):
                ended = ended or time.time()
                if time.time() > ended + 10:
                    break
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
            process.join()
        lines = [list(read(Path(folder) / f"{rank}.jsonl")) for rank in range(size)]
    return {
        "size": size,
        "device": device,
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if device == "cuda" else [],
        "torch": torch.__version__,
        "exit codes": codes,
        "seconds": round(time.time() - began, 1),
        **judged(todo, lines),
    }


def read(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def judged(todo: list[Play], lines: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """A verdict on each play from what every rank wrote, and their counts."""
    simulated = {line["case"]: line for rank in lines for line in rank if "simulated" in line}
    found = [{line["case"]: line for line in rank if "found" in line} for rank in lines]
    begun = {line["case"] for rank in lines for line in rank if "begins" in line}
    cases: list[dict[str, Any]] = []
    for play in todo:
        name, expected = str(play), simulated.get(str(replace(play, messages="group")))
        got = [rank[name] for rank in found if name in rank]
        line: dict[str, Any] = {"case": name, "verdict": "not reached"}
        if name in begun and len(got) < len(lines):
            line["verdict"] = "did not end"
        elif got and expected is not None:
            same = [x["found"] == y for x, y in zip(got, expected["simulated"], strict=True)]
            refused = next(iter(got[0]["found"])).startswith("refused")
            right = all(same) and expected["error"] < MOST_ERROR
            line["verdict"] = "wrong" if not right else "refused" if refused else "right"
            line |= {"error": round(expected["error"], 6), "seconds": round(max(x["seconds"] for x in got), 3)}
            if not all(same):
                line["differs on ranks"] = [rank for rank, equal in enumerate(same) if not equal]
            if refused:
                line["why"] = next(iter(got[0]["found"]))
        cases.append(line)
    verdicts = ("right", "refused", "wrong", "did not end", "not reached")
    return {"counts": {v: sum(case["verdict"] == v for case in cases) for v in verdicts}, "cases": cases}


def main(
    size: Annotated[int, typer.Option(help="Ranks; all GPUs if 0.")] = 0,
    device: Device = "cuda",
    every: Annotated[int, typer.Option(help="One of so many plays.")] = 1,
    seconds: Annotated[float, typer.Option(help="When playing stops.")] = 150.0,
    commit: Commit = "",
    out: JsonOut = None,
    cores: Annotated[Path | None, typer.Option(help="Folder for GPU core dumps: they name what failed.")] = None,
) -> None:
    """Play, print what is not right, and the counts."""
    todo = plays(size or torch.cuda.device_count(), device)[::every]
    record: dict[str, Any] = {"commit": commit} | run(todo, device, seconds, cores)
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n")
    for case in record["cases"]:
        if case["verdict"] not in ("right", "not reached"):
            typer.echo(json.dumps(case))
    counts = record["counts"]
    typer.echo(f"{record['size']} ranks, {record['seconds']} s, exit codes {record['exit codes']}: {counts}")
    bad = counts["wrong"] + counts["did not end"] + sum(code != 0 for code in record["exit codes"])
    typer.echo("FAILED" if bad else "NOT ALL REACHED" if counts["not reached"] else "ALL RIGHT")
    raise typer.Exit(1 if bad else 2 if counts["not reached"] else 0)


if __name__ == "__main__":
    from tests.gpu import over_processes  # under its own name, which the processes import

    typer.run(over_processes.main)
