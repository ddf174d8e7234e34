"""The table of docs/conformance/detection.md: mistakes of a training step, in the ways in which steps are written.

    python -m tests.meta.step.detection      # prints it

All cells share their processes, and the cells of a way share what the one process found.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cp_fast
from conformance.step import StepReport
from conformance.step.step_record import Job
from cp_fast.integrations.loss import token_mean
from tests.meta.step.step_processes import StepProcesses
from tests.meta.step.step_variations import llama, rows_of

__all__ = ["MISTAKES", "REASONS", "WAYS", "Cells", "markdown"]

WORDS, HEADS, DIM = 29, 2, 8
WIDTH = HEADS * DIM
WAYS = ("plain", "padded", "dp 2", "checkpointing", "compile", "autocast", "Trainer")
MISTAKES = {  # and the cause that the report has to name
    "the loss times the number of ranks": "factor",
    "a mean of the ranks' means": "mean-per-rank",
    "labels shifted after the cut": "labels",
    "positions of the slice": "positions",
    "gradients not reduced": "reduction",
    "a layer on its slice": "slice",
    "padding in the denominator": "padding",
    "dropout by one seed": "random",
    "clipped before the sum": "clipping",
    "a layer scaled on one rank": "scaled",
    "a z-loss of each rank": "term",
    "NaN on one rank": "not-finite",
    "a rank skips a micro-batch": "micro-batches",
}
REASONS = {  # of cells that are empty
    ("gradients not reduced", "Trainer"): "accelerate reduces",
    ("a layer on its slice", "Trainer"): "a prepared model raises",
    ("clipped before the sum", "Trainer"): "Trainer clips",
    ("a z-loss of each rank", "Trainer"): "its loss is the model's",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], cp: Any, plan: Any, local: bool) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, DIM)).unbind(-3)
        q, k = rotated(q, *angles), rotated(k, *angles)
        if local:
            q, k, v = (y.transpose(0, 1) for y in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
        else:
            out = cp_fast.attention(q, k, v, cp=cp, plan=plan)
        return x + self.dropout(self.out(out.flatten(-2)))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class GPT(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor, positions: Tensor, cp: Any, plan: Any, local: bool) -> Tensor:
        x = self.embed(ids)
        angle = (positions[:, None] * 100.0 ** (-torch.arange(0, DIM, 2) / DIM))[:, None]
        angles = angle.cos(), angle.sin()
        for number, block in enumerate(self.blocks):
            given = (x, angles, cp, plan, local and number == 1)
            x = checkpoint(block, *given, use_reentrant=False) if self.checkpointed else block(*given)
        return self.head(x)


def batch_of(way: str) -> list[tuple[Tensor, Tensor]]:
    """Two micro-batches: ids and the lengths of their documents."""
    chance = torch.Generator().manual_seed(2)
    lengths = ([11, 30, 5], [9, 6, 27]) if way == "padded" else ([8, 24, 16], [20, 8, 20])
    return [
        (torch.randint(0, WORDS, (sum(n),), generator=chance), torch.tensor([0, *n]).cumsum(0).int()) for n in lengths
    ]


def step_of(cp: Any, way: str, mistake: str) -> Any:
    """The model and its step. The mistake is made on the ranks alone."""
    if way == "Trainer":
        return trainer_of(cp, mistake)
    context = cp or cp_fast.ContextParallel(dist.group.WORLD)
    bug = mistake if cp is not None else ""
    torch.manual_seed(0)
    model = GPT(way == "checkpointing")
    if mistake == "dropout by one seed":
        for block in model.blocks:
            block.dropout.p = 0.2  # type: ignore[union-attr]
    if way == "compile":
        for block in model.blocks:
            block.compile(backend="eager")
    if bug in ("a layer scaled on one rank", "NaN on one rank") and context.rank == 1:
        factor = 1.5 if bug == "a layer scaled on one rank" else float("nan")
        model.embed.register_forward_hook(lambda *given: given[-1] * factor)
    world, groups = dist.get_world_size(), dist.get_world_size() // context.size

    def backward(number: int, ids: Tensor, cu: Tensor, count: int) -> Tensor:
        targets = torch.cat((ids[1:], ids[:1]))
        targets[cu[1:].long() - 1] = -100
        ids, targets, padded = cp_fast.thd.pad_thd_sequences_for_cp(ids, targets, cu, 2 * context.size)
        plan = cp_fast.make_plan(
            cp=context,
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_q_padded=padded,
            heads_q=HEADS,
            heads_kv=HEADS,
            d_qk=DIM,
            d_v=DIM,  # type: ignore[arg-type]
            dtype=torch.bfloat16 if way == "autocast" else torch.float32,
            device="cpu",
        )
        whole = {"ids": ids, "labels": targets}
        part = cp_fast.thd.get_batch_on_this_cp_rank(whole, cp=context, qkv_format="thd", cu_seqlens_padded=padded)
        labels, positions = part["labels"], plan.position_ids
        if bug == "labels shifted after the cut":
            labels = torch.where(labels == -100, -100, part["ids"].roll(-1))
        if bug == "positions of the slice":
            positions = torch.arange(len(labels))
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            logits = model(part["ids"], positions, context, plan, bug == "a layer on its slice")
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        counted = labels != -100
        loss = losses.sum() / count
        if bug == "a mean of the ranks' means":
            loss = token_mean(losses, counted, over=context) * counted.numel() / counted.sum() / 3
        if bug == "the loss times the number of ranks":
            loss = loss * world
        if bug == "a rank skips a micro-batch" and (dist.get_rank(), number) == (world - 1, len(batch_of(way)) - 1):
            loss = loss * 0
        if mistake == "a z-loss of each rank":
            z = logits.float().logsumexp(-1).square() * counted
            loss = loss + (0.5 * z.sum() / counted.sum() / 2 if bug else 0.5 * z.sum() / count)
        loss.backward()
        return loss.detach()

    def step(batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        count = sum(len(ids) - len(cu) + 1 for ids, cu in batches)
        if bug == "padding in the denominator":
            pad = 2 * context.size
            count = sum(int((-(-cu.diff() // pad) * pad).sum()) for _, cu in batches)
        mine = list(enumerate(batches))
        mine = mine[dist.get_rank() // context.size :: groups] if cp is not None else mine
        loss = torch.stack([backward(number, *each, count) for number, each in mine]).sum()
        weights = list(model.parameters())
        if bug == "clipped before the sum":
            nn.utils.clip_grad_norm_(weights, 0.05)
        for weight in weights if bug != "gradients not reduced" else ():
            dist.all_reduce(cast(Tensor, weight.grad))
        if mistake == "clipped before the sum" and not bug:
            nn.utils.clip_grad_norm_(weights, 0.05)
        dist.all_reduce(loss)
        return loss

    return model, step


def trainer_of(cp: Any, mistake: str) -> Any:
    """transformers' Trainer, which accumulates two micro-batches."""
    warnings.simplefilter("ignore")
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments, default_data_collator

    from cp_fast.integrations.trainer import ContextParallelMixin

    AcceleratorState._reset_state(reset_partial_state=True)
    bug, rank, size = ("", 0, 1) if cp is None else (mistake, cp.rank, cp.size)
    calls: list[int] = []

    class CpTrainer(ContextParallelMixin, Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels, calls_before = inputs["shift_labels"], len(calls)
            calls.append(0)
            if bug == "labels shifted after the cut":
                inputs["shift_labels"] = torch.where(labels == -100, -100, inputs["input_ids"].roll(-1, -1))
            if bug == "positions of the slice":
                inputs["position_ids"] = torch.arange(labels.shape[1])[None]
            if bug == "padding in the denominator":
                num_items_in_batch = torch.tensor(4 * 32)
            if bug == "a mean of the ranks' means":
                given = {n: x for n, x in inputs.items() if n not in ("labels", "shift_labels", "num_items_in_batch")}
                logits = model(**given).logits.flatten(0, 1)
                return F.cross_entropy(logits, labels.flatten()) / args.gradient_accumulation_steps
            out = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
            if bug == "the loss times the number of ranks":
                out = out * size
            if bug == "a rank skips a micro-batch" and rank == 1 and calls_before == 1:
                out = out * 0
            return out

    folder = tempfile.mkdtemp()
    how: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    how |= {"use_cpu": True, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    args = TrainingArguments(output_dir=folder, max_grad_norm=0.0, **how)
    model = llama()
    if mistake == "dropout by one seed":
        model.model.layers[0].register_forward_hook(lambda *given: F.dropout(given[-1], 0.2, given[0].training))
    if bug in ("a layer scaled on one rank", "NaN on one rank") and rank == 1:
        factor = 1.5 if bug == "a layer scaled on one rank" else float("nan")
        model.model.embed_tokens.register_forward_hook(lambda *given: given[-1] * factor if given[0].training else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    def step(rows: Any) -> float:
        given: dict[str, Any] = {"train_dataset": rows, "data_collator": default_data_collator}
        given |= {"optimizers": (optimizer, schedule)}
        trainer: Any = Trainer(model, args, **given) if cp is None else CpTrainer(model, args, **given, cp=cp)
        with contextlib.redirect_stdout(None):
            trainer.train()
        return next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)

    return model, step, optimizer


class Cells:
    """Plays cells of the table in these processes."""

    def __init__(self, processes: StepProcesses) -> None:
        self._processes = processes
        self._known: dict[Any, Any] = {}
        self._reports: dict[tuple[str, str], StepReport] = {}

    def report(self, way: str, mistake: str) -> StepReport:
        """The report of a cell; "" is no mistake."""
        if (way, mistake) not in self._reports:
            self._reports[way, mistake] = self._made(way, mistake)
        return self._reports[way, mistake]

    def _made(self, way: str, mistake: str) -> StepReport:
        batch = rows_of if way == "Trainer" else partial(batch_of, way)
        shared = (
            mistake if mistake in ("dropout by one seed", "clipped before the sum", "a z-loss of each rank") else ""
        )

        def alone(each: Job) -> Any:
            key = way, shared, each.noise, each.look, each.without
            if key not in self._known:
                build = partial(step_of, way=way, mistake=shared)
                self._known[key] = self._processes.found_alone(replace(each, build=build))
            return self._known[key]

        build = partial(step_of, way=way, mistake=mistake)
        return self._processes.compare(build, batch, dp_size=2 if way == "dp 2" else 1, alone=alone)

    def cell(self, way: str, mistake: str) -> str:
        """What the table says: the cause that is named, or why the cell is empty."""
        if (mistake, way) in REASONS:
            return REASONS[mistake, way]
        report = self.report(way, mistake)
        return "not found" if report.right else ", ".join(f"`{cause}`" for cause in report.causes) or "found, no name"


def markdown(cells: Cells, ways: Sequence[str] = WAYS) -> list[str]:
    """The rows of the table."""
    rows = [["planted", *ways], ["---"] * (len(ways) + 1)]
    rows += [[mistake, *(cells.cell(way, mistake) for way in ways)] for mistake in MISTAKES]
    return [f"| {' | '.join(row)} |" for row in rows]


if __name__ == "__main__":
    import sys

    processes = StepProcesses()
    try:
        table = Cells(processes)
        for planted in sys.argv[2:] or MISTAKES:
            for chosen in sys.argv[1].split(",") if len(sys.argv) > 1 else WAYS:
                said = table.cell(chosen, planted)
                print(f"{chosen:15} {planted:36} {MISTAKES.get(planted, ''):16} {said}", flush=True)
                if MISTAKES.get(planted, "") not in said or not said:
                    print(table.report(chosen, planted))
    finally:
        processes.close()
