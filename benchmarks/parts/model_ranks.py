"""One rank's part of `benchmarks.whole_models`: plays cases, compares them with one process, and writes lines of JSON.

Ranks tell each other in a store how a case went. If only some of them raised, the group is of no more use, and its
processes end. The program that started them then starts others for the cases that are left.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import inspect
import json
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cp_fast
from benchmarks.parts import model_cases as table
from benchmarks.parts.model_cases import Case
from benchmarks.parts.ranks import connect
from cp_fast.checkpoint import save_attention
from cp_fast.integrations import token_batches
from cp_fast.integrations import transformers as ours
from cp_fast.integrations.loss import loss_for_backward
from cp_fast.integrations.trainer import ContextParallelMixin
from cp_ref import dense_attention

__all__ = ["PLANTS", "Ranks", "TrainerRun", "own_linear_layers", "play", "trainer_losses"]

PLANTS = ("mean", "positions", "one gradient", "lost rank")
PEERS_S = 20.0  # that a rank waits for the others when it is through with a case
MOST = 1.5  # times the error of one process
SLACK = {torch.bfloat16: {"loss": 2e-3, "gradients": 1e-2}, torch.float32: {"loss": 2e-5, "gradients": 1e-3}}
FLOOR = 1e-3  # of the root mean square of all gradients: what is less in a gradient is taken for rounding
TRITON = "Qwen3-Next"  # of whose library some Tritons have no backward pass
OF_LIBRARIES = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")  # functions of transformers that call them
Found = dict[str, Tensor]


@dataclass(frozen=True)
class Ranks:
    """The work of a group. rank is -1 where the driver has not said it yet; gpus: in the order of the ranks, "" for all
    that there are.
    """

    cases: tuple[Case, ...]
    size: int
    device: str
    dtype: torch.dtype
    folder: str
    until: float
    plant: str = ""
    rank: int = -1
    gpus: str = ""


def play(job: Ranks) -> None:
    """One rank: rank 0 writes `results.jsonl` in the folder, two lines a case."""
    torch.set_num_threads(1)
    print_to(Path(job.folder) / f"{job.rank}.log")
    if job.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = job.gpus
    without_kernels_of_others()
    place = connect(job.rank, job.size, job.folder, job.device)
    store = FileStore(str(Path(job.folder) / "said"), job.size)
    with (Path(job.folder) / "results.jsonl").open("a", buffering=1) as file:

        def tell(case: Case, **said: Any) -> None:
            if job.rank == 0:
                file.write(json.dumps({"case": str(case), **said}) + "\n")

        reference = Reference(place, job.dtype)
        for number, case in enumerate(job.cases):
            late = torch.tensor(float(time.time() > job.until), device=place)
            dist.all_reduce(late)
            if late.item():
                break
            tell(case, begins=time.time())
            began, error, found, kernel = time.monotonic(), "", None, ""
            try:
                if job.plant == "lost rank" and job.rank == job.size - 1:
                    os._exit(9)
                torch.compiler.reset()
                found = one_step(case, job, place)
                if place.type == "cuda":
                    torch.cuda.synchronize()
            except Exception as raised:
                error, kernel = f"{type(raised).__name__}: {raised}", traceback.format_exc()[-3000:]
            errors = everyone(store, number, job, error)
            if any(errors):
                tell(case, seconds=time.monotonic() - began, errors=errors, traceback=kernel)
                if not all(errors) or any("CUDA error" in text or "NCCL" in text for text in errors):
                    raise SystemExit(3)
                continue
            assert found is not None
            whole = added(found, place)
            seconds = time.monotonic() - began
            if job.rank == 0:
                try:
                    verdict = judged(whole, *reference.of(case), job.dtype)
                    if verdict["wrong"] and "compiled" in case.way and not case.of_gpt:
                        verdict = judged(whole, *reference.of(case, compiled=True), job.dtype)
                    tell(case, seconds=seconds, **verdict)
                except Exception as raised:  # of the one process: its library may have no backward pass here
                    said = [f"the one process: {type(raised).__name__}: {raised}"] * job.size
                    tell(case, seconds=seconds, errors=said, traceback=traceback.format_exc()[-3000:])
            del found, whole
    dist.barrier()
    dist.destroy_process_group()


def print_to(path: Path) -> None:
    """Print to a file from now on."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)


def everyone(store: Any, number: int, job: Ranks, error: str) -> list[str]:
    """The error of each rank in a case, by rank; "" for none."""
    store.set(f"{number}/{job.rank}", error or "-")
    found = []
    for rank in range(job.size):
        try:
            store.wait([f"{number}/{rank}"], timedelta(seconds=PEERS_S if error else 600.0))
            text = store.get(f"{number}/{rank}").decode()
        except Exception:
            text = f"rank {rank} was not through {PEERS_S:.0f} s after another rank had raised"
        found.append("" if text == "-" else text)
    return found


def without_kernels_of_others() -> None:
    """transformers takes its own functions for linear layers, in place of the library that cp_fast uses."""
    for module in ("transformers.utils", "transformers.utils.import_utils"):
        theirs = importlib.import_module(module)
        for name in ("is_flash_linear_attention_available", "is_causal_conv1d_available"):
            if hasattr(theirs, name):
                setattr(theirs, name, lambda *_, **__: False)


@contextmanager
def own_linear_layers(model: torch.nn.Module) -> Iterator[None]:
    """Let linear layers of transformers take its own functions, also where it has found a library at its import: from
    5.24 on the module's functions call that library, and wrap its own.
    """
    theirs = importlib.import_module(type(model).__module__)
    own = {name: inspect.unwrap(f) for name in OF_LIBRARIES if callable(f := getattr(theirs, name, None))}
    for layer in model.modules():
        for name in ("chunk_gated_delta_rule", "recurrent_gated_delta_rule"):
            if hasattr(layer, name) and hasattr(theirs, f"torch_{name}"):
                setattr(layer, name, getattr(theirs, f"torch_{name}"))
        if hasattr(layer, "causal_conv1d_fn"):
            setattr(layer, "causal_conv1d_fn", None)  # noqa: B010 (a name that Module does not know)
    with patch.multiple(theirs, **own) if own else nullcontext():
        yield


class Reference:
    """One process's loss and gradients, in float32 and in the dtype of the ranks; those of the last model and batch
    are kept.

    A compiled model rounds in other places than one that is not. compiled: the errors are those of a compiled model.
    """

    def __init__(self, place: torch.device, dtype: torch.dtype) -> None:
        self.place, self.dtype = place, dtype
        self._of: tuple[str, str] | None = None  # model and batch
        self._found: dict[tuple[torch.dtype, bool], Found] = {}

    def of(self, case: Case, compiled: bool = False) -> tuple[Found, Found]:
        """Exact ones, and those that have rounding errors."""
        if self._of != (case.model, case.batch):
            self._of, self._found = (case.model, case.batch), {}
        exact, narrow = (torch.float32, False), (self.dtype, compiled)
        for how in (exact, narrow):
            if how not in self._found:
                self._found[how] = self._alone(case, *how)
        return self._found[exact], self._found[narrow]

    def _alone(self, case: Case, dtype: torch.dtype, compiled: bool) -> Found:
        device = self.place.type
        batch = {name: x.to(self.place) for name, x in table.batch_of(case.batch, device).items()}
        if case.of_gpt:
            model: Any = table.gpt_of(self.place, dtype)
            scores, cu = scores_of(case, self.place), cumulative(table.lengths_of(case.batch, device))

            def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
                how: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": cu}
                return dense_attention(q, k, v, **how, **of_layer(scores, layer))[0].to(q.dtype)

            logits = model(batch["input_ids"][0], batch["position_ids"][0], attend).float()
            labels = F.pad(batch["labels"][0, 1:], (0, 1), value=-100)
            loss = F.cross_entropy(logits, labels, ignore_index=-100)
            loss.backward()
            loss = loss.detach()
        else:
            eager: dict[str, Any] = {"attn_implementation": "eager"}
            if dtype == torch.float32 and "num_experts" in table.MODELS[case.model].sizes:
                eager["experts_implementation"] = "eager"  # else experts' sums are rounded as the ranks' are
            model = table.model_of(case.model, self.place, dtype, **eager)
            with own_linear_layers(model):
                if compiled:
                    table.compile_blocks(model.model.layers, device)
                loss = table.alone(model, batch)
        return {"loss": loss.float()} | {n: w.grad.float() for n, w in model.named_parameters() if w.grad is not None}


def one_step(case: Case, job: Ranks, place: torch.device) -> Found:
    """This rank's part of the loss and of each gradient, in float32."""
    comm, layout = table.BATCHES[case.batch]
    cp = cp_fast.ContextParallel(dist.group.WORLD, comm, layout=layout)  # type: ignore[arg-type]
    batch = {name: x.to(place) for name, x in table.batch_of(case.batch, job.device).items()}
    model, loss, _kept = (gpt_step if case.of_gpt else model_step)(case, job, place, cp, batch)
    sharded = "FSDP2" in case.way
    loss_for_backward(loss, averaged_over=model if sharded else None).backward()
    found = {"loss": loss.detach().float()}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            grad: Any = weight.grad
            # What FSDP2 has added up already counts once.
            whole = grad.full_tensor() / job.size if hasattr(grad, "full_tensor") else grad
            found[name] = whole.detach().float()
    if job.plant == "one gradient":
        name = min(found.keys() - {"loss"}, key=lambda n: found[n].numel())
        found[name] = found[name] * 1.3
    return found


def model_step(
    case: Case, job: Ranks, place: torch.device, cp: cp_fast.ContextParallel, batch: Found
) -> tuple[Any, Tensor, Any]:
    """A model of transformers and its loss on this rank."""
    model = ours.prepare(table.model_of(case.model, place, job.dtype), cp)
    how = checkpointing_of(case.way)
    if how is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **how})
    wrap(model, model.model.layers, case, job)
    part = ours.shard_batch(batch, cp=cp, model=model)
    if job.plant == "positions":
        part["position_ids"] = torch.arange(part["position_ids"].shape[1], device=place)[None]
    if job.plant == "mean":
        part["num_items_in_batch"] = (part["labels"] != -100).sum()
    return model, model(**part).loss, part


def gpt_step(
    case: Case, job: Ranks, place: torch.device, cp: cp_fast.ContextParallel, batch: Found
) -> tuple[Any, Tensor, Any]:
    """The hand-written GPT and its loss on this rank, with a plan or without."""
    model, scores = table.gpt_of(place, job.dtype), scores_of(case, place)
    model.checkpointing = checkpointing_of(case.way)
    wrap(model, model.blocks, case, job)
    cu = cumulative(table.lengths_of(case.batch, job.device))
    batch_part = token_batches.shard_tokens(batch, cp=cp)
    sequences = batch_part["cp_batch"]
    problem: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": cu}
    problem |= {"cu_seqlens_q_padded": sequences.cu_seqlens_padded}
    fixed = {name: scores[name] for name in ("softcap", "dropout_p") if name in scores}
    heads_q, heads_kv = model.heads
    dim = model.embed.embedding_dim // heads_q
    sizes: dict[str, Any] = {"heads_q": heads_q, "heads_kv": heads_kv, "d_qk": dim, "d_v": dim}
    over = sequences.cp
    plan = None
    if case.plan:
        plan = cp_fast.make_plan(cp=over, **problem, **fixed, **sizes, dtype=job.dtype, device=place)

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        seeded = of_layer(scores, layer)
        if plan is not None:
            return cp_fast.attention(q, k, v, cp=over, plan=plan, **seeded)
        return cp_fast.attention(q, k, v, cp=over, **problem, **seeded)

    positions = batch_part["position_ids"][0]
    if job.plant == "positions":
        positions = torch.arange(len(positions), device=place)
    labels = batch_part["labels"][0]
    count = (labels != -100).sum() if job.plant == "mean" else batch_part["num_items_in_batch"]
    logits = model(batch_part["input_ids"][0], positions, attend).float()
    loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / count
    return model, loss, (over, plan)  # which compiled attention needs until its backward pass


def checkpointing_of(way: str) -> dict[str, Any] | None:
    """The arguments of a way for `torch.utils.checkpoint`; None: nothing is recomputed."""
    if "save_attention" in way or "offload" in way:
        return {"context_fn": save_attention(offload="offload" in way)}
    return {} if "checkpointed" in way else None


def wrap(model: Any, layers: Any, case: Case, job: Ranks) -> None:
    """Compile the layers or the model, and shard the weights over a mesh of two axes."""
    if "compiled whole" in case.way:
        model.compile(backend="inductor" if job.device == "cuda" else "aot_eager")
    elif "compiled" in case.way:
        table.compile_blocks(layers, job.device)
    if "FSDP2" in case.way:
        replicas = 2 if job.size % 4 == 0 else 1
        mesh = init_device_mesh(job.device, (replicas, job.size // replicas), mesh_dim_names=("replicate", "shard"))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)


def scores_of(case: Case, place: torch.device) -> dict[str, Any]:
    """The arguments of attention for a GPT's scores."""
    more = dict(table.GPTS[case.model.removeprefix("GPT: ")])
    if more.pop("alibi", False):
        heads = 8 if place.type == "cuda" else 4
        more["alibi_slopes"] = 2.0 ** -torch.arange(1, heads + 1, device=place, dtype=torch.float32)
    return more


def of_layer(scores: dict[str, Any], layer: int) -> dict[str, Any]:
    """The same with a layer's seed."""
    return scores | ({"dropout_seed": 10 + layer} if "dropout_p" in scores else {})


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def added(found: Found, place: torch.device) -> Found:
    """All ranks' parts, added up. Gradients that no rank has are missing."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, {name: list(x.shape) for name, x in found.items()})
    shapes: dict[str, list[int]] = {name: shape for of_rank in names for name, shape in of_rank.items()}
    of_none = {name: torch.zeros(shape, device=place) for name, shape in shapes.items() if name not in found}
    flat = torch.cat([(found | of_none)[name].flatten() for name in shapes])
    dist.all_reduce(flat)
    parts = flat.split([torch.Size(shape).numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def judged(found: Found, exact: Found, narrow: Found, dtype: torch.dtype) -> dict[str, Any]:
    """The verdict on a loss and its gradients: right where no error is larger than those of one process allow.

    Returns:
        the loss with its errors (of the ranks, of one process, allowed); the gradient that is nearest to its bound,
        likewise; "wrong": those that are past it, the worst first.
    """
    if found.keys() != exact.keys():
        odd = sorted(found.keys() ^ exact.keys())
        return {"wrong": [f"has other gradients than one process: {', '.join(odd[:5])} ({len(odd)} in all)"]}
    gradients = [x for name, x in exact.items() if name != "loss"]
    mean = (sum(float(x.square().sum()) for x in gradients) / sum(x.numel() for x in gradients)) ** 0.5
    rows = []
    for name, x in exact.items():
        size = float(x.double().norm()) + (0.0 if name == "loss" else FLOOR * mean * x.numel() ** 0.5)
        mine, theirs = (float((y[name].double() - x.double()).norm()) / max(size, 1e-30) for y in (found, narrow))
        bound = MOST * theirs + SLACK[dtype]["loss" if name == "loss" else "gradients"]
        rows.append((name, mine, theirs, bound))
    rows.sort(key=lambda row: row[1] / row[3] if row[1] == row[1] else float("inf"), reverse=True)
    wrong = [f"{n} is off by {m:.2e} (one process {t:.2e}, allowed {b:.2e})" for n, m, t, b in rows if not m <= b]
    worst = next(row for row in rows if row[0] != "loss")
    loss = next(row for row in rows if row[0] == "loss")
    brief = [[round(x, 6) for x in row[1:]] for row in (loss, worst)]
    of_loss = {"value": round(float(found["loss"]), 5), "errors": brief[0]}
    return {"loss": of_loss, "worst gradient": [worst[0], *brief[1]], "gradients": len(rows) - 1, "wrong": wrong[:8]}


@dataclass(frozen=True)
class TrainerRun:
    """One process of a Trainer. rank is -1 in the one process; dtype: bfloat16 is autocast's."""

    options: dict[str, Any]
    size: int
    device: str
    dtype: torch.dtype
    folder: str
    plant: str = ""
    rank: int = -1


def trainer_losses(job: TrainerRun) -> list[float]:
    """The losses of some steps of a small Llama."""
    torch.set_num_threads(1)
    print_to(Path(job.folder) / "trainer.log")
    several = job.rank >= 0
    if not several:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if several:
        place = connect(job.rank, job.size, job.folder, job.device)
        numbers = {"RANK": job.rank, "LOCAL_RANK": place.index or 0, "WORLD_SIZE": job.size}
        numbers |= {"LOCAL_WORLD_SIZE": job.size}
        os.environ |= {name: str(number) for name, number in numbers.items()}
        if job.device == "cpu":
            os.environ["LOCAL_RANK"] = str(job.rank)
    theirs = importlib.import_module("transformers")
    tokens, chance = 512 if job.device == "cuda" else 32, torch.Generator().manual_seed(7)
    rows = torch.randint(3, table.VOCABULARY, (16, tokens), generator=chance)
    data = [{"input_ids": row, "labels": row} for row in rows]
    options = dict(job.options)
    if options.get("torch_compile"):
        options["torch_compile_backend"] = "inductor" if job.device == "cuda" else "aot_eager"
    with tempfile.TemporaryDirectory() as folder:
        args = theirs.TrainingArguments(
            output_dir=folder,
            max_steps=6,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            bf16=job.dtype == torch.bfloat16,
            use_cpu=job.device == "cpu",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **options,
        )
        model = table.model_of("Llama", "cuda" if job.device == "cuda" else "cpu", torch.float32)
        how: dict[str, Any] = {"train_dataset": data, "data_collator": theirs.default_data_collator}
        if several:
            kind: Any = type("CpTrainer", (ContextParallelMixin, theirs.Trainer), {})
            trainer = kind(model, args, **how, cp=cp_fast.ContextParallel(dist.group.WORLD))
        else:
            trainer = theirs.Trainer(model, args, **how)
        if several and job.plant:
            turn_gradients(trainer.model)
        trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    if several:
        dist.destroy_process_group()
    return losses


def turn_gradients(model: torch.nn.Module) -> None:
    """A mistake: some gradients have the wrong sign, which an optimizer's scale does not hide."""
    for name, weight in model.named_parameters():
        if "mlp" in name or "head" in name:
            weight.register_hook(lambda grad: -grad)


def positions_of_slices(context: Any) -> Any:
    """`examples.train_gpt:build` with a mistake: each rank numbers its tokens from 0."""
    gpt: Any = importlib.import_module("examples.train_gpt")
    if context is not None:
        rope = gpt.rope
        gpt.rope = lambda x, positions: rope(x, torch.arange(len(positions), device=positions.device))
    return gpt.build(context)


def mean_of_means(context: Any) -> Any:
    """`examples.train_gpt:build` with a mistake: the mean of the ranks' means."""
    gpt: Any = importlib.import_module("examples.train_gpt")
    if context is not None:
        gpt.token_mean = lambda losses, counted, over: losses[counted].mean() / over.size
    return gpt.build(context)


def uneven_batch() -> tuple[Tensor, Tensor]:
    """Documents of two tokens before a long one: in layout contiguous half of the first rank's rows have no label."""
    ids = torch.randint(256, (256,), generator=torch.Generator().manual_seed(0))
    return ids, torch.tensor([*range(0, 128, 2), 128, 256], dtype=torch.int32)
