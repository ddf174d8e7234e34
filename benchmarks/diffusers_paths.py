"""diffusers' own ring and Ulysses beside this package's path: what is right, wrong and refused, and how fast it is.

    python -m benchmarks.diffusers_paths right --commit "$(git rev-parse HEAD)" --out diffusers_paths.json
    torchrun --nproc-per-node 2 -m benchmarks.diffusers_paths speed --out diffusers_speed_2x.json

`right` plays tiny models of the tests with random weights on two processes over gloo: outputs and all gradients, summed
over the ranks, against one process. A gradient is right where it is that of the loss, or of the loss times the number
of ranks if that holds for all. On a CPU diffusers has no kernel that its ring can use (`native` has no lse), so
PyTorch's products with lse stand in, which take masks as its cuDNN kernel does, and gathers of several sizes are
broadcasts, as NCCL has them. Lengths that do not divide are played with `ring_anything` and `ulysses_anything`.

`speed` takes attention alone, at Wan's shape: 75,600 tokens, 40 heads of 128, bf16, forward and backward.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.parts.ranks import Commit, JsonOut, version
from tests.integrations.diffusion import families
from tests.integrations.diffusion.families import Batch

RANKS, CASE_S = 2, 120.0
WAYS = ("cp_fast, p2p", "cp_fast, a2a", "diffusers, ring", "diffusers, ulysses")


def _without_history() -> Batch:
    return {name: x for name, x in families.helios().items() if "history" not in name}


def _one_time_a_video() -> Batch:
    return families.ltx2(audio=12) | {"timestep": torch.tensor([500.0, 300.0])}


# A case: the family of the tests, what is special, and a batch of it. Those of "even lengths" divide by two.
CASES: dict[tuple[str, str], Callable[[], Batch]] = {
    ("flux", "even lengths"): functools.partial(families.flux, 2, 12, 6),
    ("flux", "odd lengths"): families.flux,
    ("flux2", "even lengths"): functools.partial(families.flux2, 2, 12, 6),
    ("flux2", "odd lengths"): families.flux2,
    ("wan", "even lengths"): functools.partial(families.wan, 2, 3, 8, 8, 8),
    ("wan", "odd lengths"): families.wan,
    ("wan, steps of tokens", "odd lengths"): families.wan_of_steps,
    ("wan, of images", "odd lengths"): families.wan_of_images,
    ("qwen_image", "even lengths"): functools.partial(families.qwen_image, 2, 8, (8, 8), 6),
    ("qwen_image", "even lengths, a padded text"): functools.partial(families.qwen_image, 2, 8, (8, 3), 6),
    ("qwen_image", "odd lengths, a padded text"): families.qwen_image,
    ("ltx", "even lengths"): functools.partial(families.ltx, 2, 6, (6, 6), 6),
    ("ltx", "even lengths, a padded text"): functools.partial(families.ltx, 2, 6, (6, 3), 6),
    ("ltx", "odd lengths, a padded text"): families.ltx,
    ("ltx, steps of tokens", "odd lengths, a padded text"): families.ltx_of_steps,
    ("ltx2", "even lengths, a time a video"): _one_time_a_video,
    ("ltx2", "odd lengths"): families.ltx2,
    ("ltx2.3", "odd lengths"): families.ltx2,
    ("helios", "even lengths, no history"): _without_history,
    ("helios", "odd lengths"): families.helios,
    ("helios, amplified", "odd lengths"): families.helios,
    ("cosmos3", "odd lengths"): families.cosmos3,
    ("minimax_h3", "even lengths"): functools.partial(families.minimax_h3, 2, 5),
    ("minimax_h3", "odd lengths"): families.minimax_h3,
    ("chronoedit", "even lengths"): functools.partial(families.wan, 2, 3, 8, 8, 8),
    ("chronoedit", "odd lengths"): families.wan,
}


def main_right(
    only: Annotated[str, typer.Option(help="Only cases of this family.")] = "",
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """Play all cases by all ways."""
    import diffusers

    importlib.import_module("cp_fast.integrations.diffusers")  # before processes fork, so that none of them imports
    for family in families.FAMILIES.values():
        getattr(diffusers, family.name)
    record: list[dict[str, Any]] = []
    counted = {way: {part: Counter[str]() for part in ("training", "inference")} for way in WAYS}
    for family, what in CASES:
        for way in WAYS if only in ("", family) else ():
            found = _in_processes(family, what, way)
            counted[way]["training"][found["verdict"]] += 1
            counted[way]["inference"][found.get("inference", found["verdict"])] += 1
            record.append({"family": family, "case": what, "way": way, **found})
            print(f"{found['verdict']:8} {way:20} {family}, {what}  {found.get('message', '')[:160]}", flush=True)
    head = {"commit": commit, "versions": {name: version(name) for name in ("torch", "diffusers")}, "ranks": RANKS}
    head |= {"counts": counted}
    print(json.dumps(head["counts"], indent=1))
    if out is not None:
        out.write_text(json.dumps(head | {"cases": record}, indent=1) + "\n")


def _in_processes(family: str, what: str, way: str) -> dict[str, Any]:
    """One case in processes of its own, so that one that fails or hangs disturbs no other."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = family, what, way, f"{folder}/store", results
        processes = [context.Process(target=_play, args=(rank, *given)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        began = time.monotonic()
        for process in processes:
            process.join(max(1.0, CASE_S - (time.monotonic() - began)))
        hung = [process for process in processes if process.is_alive()]
        for process in hung:
            process.kill()
        found = []
        while not results.empty():
            found.append(results.get())
    if hung or len(found) < RANKS:
        return {"verdict": "hangs" if hung else "dies", "message": "; ".join(x.get("message", "") for x in found)}
    return max(found, key=lambda one: ("right", "wrong", "refused").index(one["verdict"]))


def _play(rank: int, family: str, what: str, way: str, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(1)
    batch = CASES[family, what]()
    model = families.tiny(family)
    expected = families.outputs(model, batch)
    families.loss_of(expected).backward()
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    try:
        found = _compare(_spread(families.tiny(family), way, "odd" in what), batch, expected, grads)
    except Exception as error:
        found = {"verdict": "refused", "message": f"{type(error).__name__}: {error}"[:400]}
    results.put(found)
    os._exit(0)  # diffusers' path may leave messages behind, for which an orderly end would wait


def _spread(model: Any, way: str, odd: bool) -> Any:
    """A model over the ranks by one way."""
    package, _, how = way.partition(", ")
    kind: Any = how
    if package == "cp_fast":
        import cp_fast
        from cp_fast.integrations import diffusers as ours

        return ours.use(model, cp_fast.ContextParallel(dist.group.WORLD, kind))
    from diffusers.models._modeling_parallel import ContextParallelConfig

    ring = how == "ring"
    if ring:
        _stand_in()
    torch.accelerator.device_count = lambda: 1  # diffusers asks for an accelerator, on a CPU too
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")
    dist.all_gather = _all_gather
    mesh = init_device_mesh("cpu", (RANKS, 1) if ring else (1, RANKS), mesh_dim_names=("ring", "ulysses"))
    anything: dict[str, Any] = {"ring_anything" if ring else "ulysses_anything": odd}
    degrees: dict[str, Any] = {"ring_degree" if ring else "ulysses_degree": RANKS}
    plan = getattr(model, "_cp_plan", None)
    if plan is not None:  # Helios names forty blocks, whatever a model has
        names = {name for name, _ in model.named_modules()}
        plan = {where: entry for where, entry in plan.items() if "*" in where or where in names}
    model.enable_parallelism(config=ContextParallelConfig(mesh=mesh, **degrees, **anything), cp_plan=plan)
    return model


def _compare(model: Any, batch: Batch, expected: list[torch.Tensor], grads: dict[str, torch.Tensor]) -> dict[str, Any]:
    outs = families.outputs(model, batch)
    errors = [float((x - y).detach().norm() / y.detach().norm()) for x, y in zip(outs, expected, strict=True)]
    found: dict[str, Any] = {"outputs": max(errors), "inference": "right" if max(errors) < 1e-3 else "wrong"}
    try:
        families.loss_of(outs).backward()
    except Exception as error:
        return found | {"verdict": "refused", "message": f"{type(error).__name__}: {error}"[:400]}
    times: dict[float, float] = {1.0: 0.0, float(RANKS): 0.0}  # how far all gradients are from so many times theirs
    for name, weight in sorted(model.named_parameters()):
        if name not in grads:
            continue
        total = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        dist.all_reduce(total)
        for factor in times:
            wanted = factor * grads[name]
            times[factor] = max(times[factor], float((total - wanted).norm() / (wanted.norm() + 1e-9)))
    found |= {"gradients": min(times.values())}
    said = [name for name in ("outputs", "gradients") if not found[name] < 1e-3]
    return found | {"verdict": "wrong" if said else "right", "message": " and ".join(said)}


def _all_gather(parts: list[torch.Tensor], x: torch.Tensor, group: Any = None) -> None:
    """`dist.all_gather` of tensors of several sizes, which NCCL takes and gloo does not."""
    for rank, part in enumerate(parts):
        if rank == dist.get_rank(group):
            part.copy_(x)
        dist.broadcast(part, group=group, group_src=rank)


def _stand_in() -> None:
    """Kernels with lse, for diffusers' ring on a CPU."""
    from diffusers.models import attention_dispatch as theirs

    def scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float | None) -> torch.Tensor:
        made = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if mask is None:
            return made
        return made.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else made + mask

    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, *others: Any, **how: Any) -> Any:
        _, _, scale, _, return_lse = others[:5]
        made = scores(q, k, mask, scale)
        lse = made.logsumexp(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", (made - lse[..., None]).exp(), v)
        lse = lse.transpose(1, 2).contiguous()
        if how.get("_save_ctx", True):
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.mask, ctx.scale = mask, scale
        return (out, lse) if return_lse else out

    def backward(ctx: Any, grad: Any, *_: Any, **given: Any) -> Any:  # Ulysses gives nothing
        names = ("query", "key", "value", "out", "lse")
        query, key, value, out, lse = (given.get(name, x) for name, x in zip(names, ctx.saved_tensors, strict=True))
        scale = query.shape[-1] ** -0.5 if ctx.scale is None else ctx.scale
        p = (scores(query, key, ctx.mask, ctx.scale) - lse.transpose(1, 2)[..., None]).exp()
        dv = torch.einsum("bhqk,bqhd->bkhd", p, grad)
        dp = torch.einsum("bqhd,bkhd->bhqk", grad, value)
        ds = p * (dp - (grad * out).sum(-1).transpose(1, 2)[..., None]) * scale
        return torch.einsum("bhqk,bkhd->bqhd", ds, key), torch.einsum("bhqk,bqhd->bkhd", ds, query), dv

    theirs._native_attention_forward_op, theirs._native_attention_backward_op = forward, backward


# ---- speed


def main_speed(
    tokens: Annotated[int, typer.Option(help="Of all ranks.")] = 75_600,
    heads: Annotated[int, typer.Option(help="Of 128.")] = 40,
    rounds: Annotated[int, typer.Option(help="In turns.")] = 3,
    limit: Annotated[float, typer.Option(help="Seconds, after which no round begins.")] = 100.0,
    device: Annotated[str, typer.Option(help="cuda; cpu to try it.")] = "cuda",
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """Time attention alone, by all ways in turns, on all processes of torchrun."""
    import cp_fast

    began = time.monotonic()
    rank, cuda = int(os.environ["RANK"]), device == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    size, dtype = dist.get_world_size(), torch.bfloat16 if cuda else torch.float32
    shape = 1, tokens // size, heads, 128
    torch.manual_seed(rank)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=dtype)
    ways: dict[str, Callable[[], torch.Tensor]] = {}
    schedules: list[Any] = ["p2p", "all_gather", "a2a"]
    for schedule in schedules:
        cp = cp_fast.ContextParallel(dist.group.WORLD, schedule, layout="contiguous")
        ways[f"cp_fast, {schedule}"] = functools.partial(cp_fast.attention, q, k, v, cp=cp, attn_mask_type="no_mask")
    reasons: dict[str, str] = {}
    kernels = ("cudnn", "flash") if cuda else ("stand-in",)
    for how in ("ring", "ulysses"):
        for kernel in kernels:
            try:
                ways[f"diffusers, {how}, {kernel}"] = _theirs(how, kernel, device, (q, k, v))
            except Exception as error:
                reasons[f"diffusers, {how}, {kernel}"] = f"{type(error).__name__}: {error}"
    expected = None
    times: dict[str, list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):
        late = torch.tensor(float(time.monotonic() - began > limit), device=device)
        dist.all_reduce(late)
        if late:
            break
        for name, attend in list(ways.items()):
            try:
                found, took = _timed(attend, (q, k, v), grad, cuda)
            except Exception as error:  # alike on all ranks
                reasons[name] = f"{type(error).__name__}: {error}"[:300]
                del ways[name]
                continue
            expected = found if expected is None else expected
            if turn == 0:  # which compiles and plans, and is compared
                worst = max(
                    float((x - y).float().norm() / y.float().norm()) for x, y in zip(found, expected, strict=True)
                )
                reasons[name] = f"differs from the first by {worst:.1e}"
            else:
                times.setdefault(name, []).append(took)
    rows: dict[str, dict[str, float]] = {}
    for name, some in times.items():
        forward, both = statistics.median(x for x, _ in some), statistics.median(x + y for x, y in some)
        rows[name] = {"forward_ms": round(forward, 3), "both_ms": round(both, 3)}
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, rows)
    if rank == 0:
        slowest = {
            name: {key: max(theirs[name][key] for theirs in everyone) for key in row} for name, row in rows.items()
        }
        head = {"commit": commit, "device": torch.cuda.get_device_name() if cuda else "cpu", "ranks": size}
        head |= {"tokens": tokens, "heads": heads, "versions": {n: version(n) for n in ("torch", "diffusers")}}
        print(json.dumps(head | {"ways": slowest, "notes": reasons}, indent=1))
        if out is not None:
            out.write_text(json.dumps(head | {"ways": slowest, "notes": reasons}, indent=1) + "\n")
    dist.destroy_process_group()


def _theirs(how: str, kernel: str, device: str, tensors: tuple[torch.Tensor, ...]) -> Callable[[], torch.Tensor]:
    """diffusers' attention function by one way, with one of PyTorch's kernels."""
    from diffusers.models import attention_dispatch as theirs
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    if kernel == "stand-in":
        _stand_in()
    names = {"cudnn": "_cudnn_attention", "flash": "_native_flash_attention", "stand-in": "_native_attention"}
    size = dist.get_world_size()
    mesh = init_device_mesh(device, (size, 1) if how == "ring" else (1, size), mesh_dim_names=("ring", "ulysses"))
    degrees: dict[str, Any] = {f"{how}_degree": size}
    config = ContextParallelConfig(mesh=mesh, **degrees)
    config.setup(dist.get_rank(), size, torch.device(device), mesh)
    ops: dict[str, Any] = {f"{way}_op": getattr(theirs, f"{names[kernel]}_{way}_op") for way in ("forward", "backward")}
    parallel = ParallelConfig(context_parallel_config=config)
    attend: Any = theirs._templated_context_parallel_attention
    return functools.partial(attend, *tensors, **ops, _parallel_config=parallel)


def _timed(
    attend: Callable[[], torch.Tensor], tensors: tuple[torch.Tensor, ...], grad: torch.Tensor, cuda: bool
) -> tuple[list[torch.Tensor], tuple[float, float]]:
    """Results and gradients, and the milliseconds of the forward and of the backward pass."""
    for x in tensors:
        x.grad = None

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    dist.barrier()
    began = now()
    out = attend()
    middle = now()
    out.backward(grad)
    end = now()
    found = [out.detach(), *(x.grad for x in tensors if x.grad is not None)]
    return found, (1e3 * (middle - began), 1e3 * (end - middle))


app = typer.Typer(add_completion=False, help=__doc__)
app.command("right")(main_right)
app.command("speed")(main_speed)

if __name__ == "__main__":
    app()
