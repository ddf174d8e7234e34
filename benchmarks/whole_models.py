"""Whole models over processes: losses and every gradient against the same model in one process.

    python -m benchmarks.whole_models --commit "$(git rev-parse HEAD)" --out whole_models_1x.json  # two ranks on a GPU
    python -m benchmarks.whole_models --device cpu --seconds 60 --only "Llama.*(plain|offload)"    # tiny, on a CPU
    python -m benchmarks.whole_models --plant positions --only "^(Llama|GPT)"                      # must fail

`benchmarks.parts.model_cases` has the models, the batches and the ways. The ranks compute in bfloat16. The exact loss
and gradients are of the same rounded weights in float32 in one process, with attention written out, and linear layers
by transformers' own functions, whatever library there is. An error, relative to the norm, may be 1.5 times that of
bfloat16 in one process, and a hundredth more (of the loss 0.002). Then come transformers' Trainer, whose losses are
compared, and the examples under `conformance step`, two of them with a mistake that must be found and named.

Cases that have kernels and references in common are a part. Several groups of processes share the GPUs equally, and
take the most important part that is left. Each result is printed, and written to the record, as it comes. A group whose
ranks disagree, die or hang is ended, and another one goes on behind the case. Exit code 1 if a case was not right, 2 if
time was up before the last one.
"""

from __future__ import annotations

import collections
import importlib.util
import itertools
import json
import os
import platform
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.gpu_tests import turned
from benchmarks.parts import model_ranks
from benchmarks.parts.model_cases import Case, cases
from benchmarks.parts.model_ranks import PLANTS, Ranks, TrainerRun, trainer_losses
from benchmarks.parts.ranks import Commit, Device, JsonOut, version
from conformance.runner.processes import run_together
from conformance.step import compare_step
from cp_fast.kernels.attention.choose_backend import by_name

CASE_S = 180.0  # of one case, with the start of its processes and the compilation of its kernels
TRAINER_SLACK = 5e-3  # of a loss, beside 1.5 times the error of one process
GRACE_S = 20.0  # for what is under way when the time is up
PACKAGES = (
    "transformers",
    "accelerate",
    "triton",
    "flash-attn-4",
    "flash-linear-attention",
    "megatron-core",
    "liger-kernel",
)
PRELOADED = ("benchmarks.parts.model_ranks", "conformance.step.process", "torch._dynamo")
ON_CPU = ("torch.distributed.fsdp", "transformers.trainer")  # which a process without a GPU may import before it forks
LACKING = {model_ranks.TRITON: "triton", "ALiBi": "lacks alibi_slopes"}  # What is refused where a library lacks it.
NOT_FAILURES = ("right", "refused", "skipped", "not reached")
TRAINERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "torch_compile": {"torch_compile": True},
    "gradient checkpointing, torch_compile": {"gradient_checkpointing": True, "torch_compile": True},
    "Liger's kernels": {"use_liger_kernel": True},
}
for _options in TRAINERS.values():
    if "gradient_checkpointing" in _options:
        _options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
EXAMPLE = "examples.train_gpt"


@dataclass(frozen=True)
class Step:
    """A comparison of `conformance step`. cause: what it must name, where the step has a mistake; needs: a module."""

    name: str
    build: str
    batch: str
    cause: str = ""
    needs: str = "torch"
    more: dict[str, Any] = field(default_factory=dict)


STEPS = (
    Step("train_gpt, balanced", f"{EXAMPLE}:build", f"{EXAMPLE}:batch", more={"layout": "balanced"}),
    Step("positions of slices planted", f"{model_ranks.__name__}:positions_of_slices", f"{EXAMPLE}:batch", "positions"),
    Step(
        "mean of means planted",
        f"{model_ranks.__name__}:mean_of_means",
        f"{model_ranks.__name__}:uneven_batch",
        "mean-per-rank",
        more={"layout": "contiguous"},
    ),
    Step("train_gpt, a2a", f"{EXAMPLE}:build", f"{EXAMPLE}:batch", more={"cp_comm_type": "a2a"}),
    Step(
        "finetune_transformers",
        "examples.finetune_transformers:build",
        "examples.finetune_transformers:batch",
        needs="accelerate",
    ),
    Step(
        "vision_language",
        "examples.vision_language:build",
        "examples.vision_language:batch",
        needs="transformers",
        more={"loss": "sum"},
    ),
    Step("megatron_layer", "examples.megatron_layer:build", "examples.megatron_layer:batch", needs="megatron.core"),
)


class Record:
    """The results; the file is written after each one."""

    def __init__(self, head: dict[str, Any], names: list[str], out: Path | None) -> None:
        self.head, self.names, self._out = head, names, out
        self.found: dict[str, dict[str, Any]] = {}
        self._lock, self.began = threading.Lock(), time.monotonic()

    def add(self, name: str, verdict: str, message: str = "", **more: Any) -> None:
        """The result of a case. A second one does not count, but where it is worse."""
        with self._lock:
            if name in self.found and verdict in NOT_FAILURES:
                return
            self.found[name] = {"verdict": verdict, **({"message": message} if message else {}), **more}
            at = f"{time.monotonic() - self.began:4.0f} s"
            worst = more.get("worst gradient")
            said = message or (f"{worst[0]} {worst[1]:.1e}/{worst[2]:.1e}" if worst else "")
            mark = verdict if verdict in NOT_FAILURES else verdict.upper()
            print(f"{at}  {mark:9} {name}  {said.splitlines()[0] if said else ''}", flush=True)
            self.write()

    def counts(self) -> dict[str, int]:
        """How many cases have each verdict."""
        counted = collections.Counter(found["verdict"] for found in self.found.values())
        left = len([name for name in self.names if name not in self.found])
        return dict(counted) | ({"not reached": left} if left else {})

    def write(self) -> None:
        """The record as it stands."""
        failures = [
            {"case": name, **found} for name, found in self.found.items() if found["verdict"] not in NOT_FAILURES
        ]
        others = {name: found for name, found in self.found.items() if found["verdict"] not in ("right",)}
        right = {name: found for name, found in self.found.items() if name not in others}
        data = self.head | {
            "seconds": round(time.monotonic() - self.began, 1),
            "counts": self.counts(),
            "failures": failures,
            "refused or skipped": {n: f["message"] for n, f in others.items() if f["verdict"] in NOT_FAILURES},
            "not reached": [name for name in self.names if name not in self.found],
            "cases": right,
        }
        if self._out is not None:
            lines = [f" {json.dumps(key)}: {json.dumps(x)}" for key, x in data.items() if key != "cases"]
            rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in right.items())
            self._out.write_text("{\n" + ",\n".join(lines) + f',\n "cases": {{\n{rows}\n }}\n}}\n')


@dataclass(frozen=True)
class Run:
    """The options of all parts."""

    size: int
    device: str
    dtype: torch.dtype
    plant: str
    until: float
    record: Record
    begun: Iterator[int] = field(default_factory=itertools.count)  # the numbers of groups

    @property
    def context(self) -> Any:
        return get_context("forkserver")

    def part(self, left: list[Case]) -> None:
        """Play cases, in as many groups of processes as it takes."""
        while left and time.time() < self.until:
            with tempfile.TemporaryDirectory() as folder:
                begun, why = self._group(left, Path(folder))
            if why and (name := str(left[begun])) not in self.record.found:
                self.record.add(name, "died", why)
            if not why:
                return
            left = left[begun + 1 :]

    def _group(self, left: list[Case], folder: Path) -> tuple[int, str]:
        """Which case was the last that began, and why the group ended before all; "" if it did not, or time was up."""
        count = torch.cuda.device_count() if self.device == "cuda" else 0
        gpus = ",".join(map(str, turned(count, next(self.begun) * self.size)))
        job = Ranks(tuple(left), self.size, self.device, self.dtype, str(folder), self.until, self.plant, gpus=gpus)
        processes = [
            self.context.Process(target=model_ranks.play, args=(replace(job, rank=rank),), daemon=True)
            for rank in range(self.size)
        ]
        for process in processes:
            process.start()
        names, results = [str(case) for case in left], folder / "results.jsonl"
        begun, read, heard, why, ended = 0, 0, time.time(), "", 0.0
        while not why:
            alive = [process for process in processes if process.is_alive()]
            lines = results.read_text().splitlines(keepends=True) if results.exists() else []
            for line in lines[read:]:
                if not line.endswith("\n"):
                    break
                read, heard, said = read + 1, time.time(), json.loads(line)
                begun = names.index(said["case"])
                self._tell(left[begun], said)
            codes = [process.exitcode for process in processes]
            if not alive:
                if any(codes):
                    why = f"the ranks ended with the exit codes {codes}"
                break
            if any(codes):
                ended = ended or time.time()
                if time.time() > ended + model_ranks.PEERS_S + 5:
                    why = f"a rank ended (exit codes {codes}), and the others did not"
            elif time.time() > heard + CASE_S:
                why = f"did not end in {CASE_S:.0f} s"
            if time.time() > self.until + GRACE_S:
                break
            time.sleep(0.1)
        for process in processes:
            process.kill()
            process.join()
        logs = [f"rank {n}:\n{log.read_text()[-1500:]}" for n, log in enumerate(sorted(folder.glob("*.log")))]
        return begun, "\n".join([why, *logs]) if why else ""

    def _tell(self, case: Case, said: dict[str, Any]) -> None:
        if "begins" in said:
            return
        seconds = round(said["seconds"], 1)
        if "errors" in said:
            lacking = [word for model, word in LACKING.items() if model in case.model]
            refused = any(all(word in text.lower() for text in said["errors"]) for word in lacking)
            message = "\n".join(dict.fromkeys(text[:1500] for text in said["errors"] if text))
            more = {} if refused else {"ranks": [n for n, text in enumerate(said["errors"]) if text]}
            if not refused:  # Its paths are those of one machine, so no record has them.
                print(f"\n{case}\n{said['traceback']}", flush=True)
            self.record.add(str(case), "refused" if refused else "raised", message, seconds=seconds, **more)
            return
        wrong = said.pop("wrong")
        figures = {key: said[key] for key in ("loss", "worst gradient", "gradients") if key in said}
        self.record.add(str(case), "wrong" if wrong else "right", "; ".join(wrong), seconds=seconds, **figures)

    def lacks(self, module: str, name: str) -> bool:
        """Whether a module is not installed; the case that needs it is then skipped."""
        missing = importlib.util.find_spec(module.partition(".")[0]) is None
        if missing:
            self.record.add(name, "skipped", f"needs {module}")
        return missing

    def trainer(self, name: str) -> None:
        """Trainer's losses over ranks, and in one process in float32 and in bfloat16."""
        options, began = TRAINERS[name], time.monotonic()
        if "use_liger_kernel" in options and self.lacks("liger_kernel", f"Trainer, bf16, {name}"):
            return
        with tempfile.TemporaryDirectory() as folder:
            alone = TrainerRun({}, self.size, self.device, torch.float32, folder)
            jobs = {"one process": alone, "one process in bfloat16": replace(alone, dtype=torch.bfloat16)}
            mine = replace(alone, options=options, dtype=torch.bfloat16, plant=self.plant)
            jobs |= {f"rank {rank}": replace(mine, rank=rank) for rank in range(self.size)}
            limit = min(CASE_S, self.until + GRACE_S - time.time())
            exact, narrow, *ranks = run_together(self.context, trainer_losses, jobs, RuntimeError, limit)
        found = ranks[0]
        errors = [[abs(x - y) for x, y in zip(exact, other, strict=True)] for other in (found, narrow)]
        allowed = 1.5 * max(errors[1]) + TRAINER_SLACK
        figures = {"losses": found, "errors": [max(errors[0]), max(errors[1]), allowed]}
        figures["seconds"] = round(time.monotonic() - began, 1)
        wrong = "" if max(errors[0]) <= allowed else f"losses are {found}, and of one process {exact}"
        self.record.add(f"Trainer, bf16, {name}", "wrong" if wrong else "right", wrong, **figures)

    def step(self, step: Step) -> None:
        """One comparison of `conformance step`."""
        name, began = f"step: {step.name}", time.monotonic()
        if self.lacks(step.needs, name):
            return
        limit = max(1.0, min(CASE_S, self.until + GRACE_S - time.time()))
        how: dict[str, Any] = {"device": self.device, "timeout_s": limit} | step.more
        if self.device == "cuda":
            how["dtype"] = torch.bfloat16
        found = compare_step(step.build, step.batch, self.size, **how)
        rows = [row for row in found.rows if row.max_bound > 0]
        worst = max(rows, key=lambda row: row.max_error / row.max_bound)
        figures = {"compared": len(found.rows), "worst": [worst.name, worst.max_error, worst.max_bound]}
        figures |= {"causes": list(found.causes), "seconds": round(time.monotonic() - began, 1)}
        right = step.cause in found.causes and not found.right if step.cause else found.right
        self.record.add(name, "right" if right else "wrong", "" if right else str(found), **figures)


def main(
    processes: Annotated[int, typer.Option(help="Ranks; with fewer GPUs they share one.")] = 2,
    groups: Annotated[int, typer.Option("-j", help="Groups of ranks at the same time; 0: 7 on a GPU, else 1.")] = 0,
    seconds: Annotated[float, typer.Option(help="Begin nothing after so long.")] = 440.0,
    only: Annotated[str, typer.Option(help="A regular expression: only cases in whose name it is found.")] = "",
    dtype: Annotated[str, typer.Option(help="Of the ranks: bfloat16 or float32.")] = "bfloat16",
    plant: Annotated[str, typer.Option(help=f"A mistake that must be found: {', '.join(PLANTS)}.")] = "",
    device: Device = "cuda",
    commit: Commit = "",
    out: JsonOut = None,
) -> None:
    """Play all cases, the most important first."""
    if plant not in ("", *PLANTS):
        raise typer.BadParameter(f"--plant is {plant!r}; it must be one of {', '.join(PLANTS)}")
    if dtype not in ("bfloat16", "float32"):
        raise typer.BadParameter(f"--dtype is {dtype!r}; it must be bfloat16 or float32")

    def wanted(name: str) -> bool:
        return re.search(only, name) is not None and not (plant and name.startswith("step: "))

    os.environ |= {"NCCL_NVLS_ENABLE": "0", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # as there are as many processes as cores
    get_context("forkserver").set_forkserver_preload([*PRELOADED, *(ON_CPU if device == "cpu" else ())])
    parts = [[case for case in part if wanted(str(case))] for part in cases()]
    names = [str(case) for part in parts for case in part]
    trainers = [name for name in TRAINERS if wanted(f"Trainer, bf16, {name}")]
    steps = [step for step in STEPS if wanted(f"step: {step.name}")]
    names += [f"Trainer, bf16, {name}" for name in trainers] + [f"step: {step.name}" for step in steps]
    on_gpu = device == "cuda"
    gpus = [torch.cuda.get_device_name(n) for n in range(min(processes, torch.cuda.device_count()))] if on_gpu else []
    fa4 = by_name("fa4").why_not() if on_gpu else "on a CPU"
    head: dict[str, Any] = {"commit": commit, "gpus": gpus, "processes": processes, "dtype": dtype}
    head |= {"plant": plant} if plant else {}
    head |= {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    head |= {"versions": {name: version(name) for name in PACKAGES}, "without fa4": fa4, "asked for": len(names)}
    head["one process"] = "attention and linear layers by transformers' own functions in PyTorch"
    record = Record(head, names, out)
    run = Run(processes, device, getattr(torch, dtype), plant, time.time() + seconds, record)
    todo: list[tuple[str, Callable[[], None]]] = []
    for part in parts:
        if part:
            todo.append((str(part[0]), lambda part=part: run.part(part)))
    extra = [(f"step: {step.name}", lambda step=step: run.step(step)) for step in steps]
    extra += [(f"Trainer, bf16, {name}", lambda name=name: run.trainer(name)) for name in trainers]
    for place, one in enumerate(extra):  # among the first parts, as they take long
        todo.insert(min(2 * place + 1, len(todo)), one)
    play_all(todo, run, groups or (7 if on_gpu else 1))
    record.write()
    counts = record.counts()
    print(f"{len(names)} cases in {time.monotonic() - record.began:.0f} s: {counts}", flush=True)
    for name, found in record.found.items():
        if found["verdict"] not in NOT_FAILURES:
            print(f"\n{found['verdict'].upper()} {name}\n{found.get('message', '')}")
    failed = any(verdict not in NOT_FAILURES for verdict in counts)
    raise typer.Exit(1 if failed else 2 if counts.get("not reached") else 0)


def play_all(todo: list[tuple[str, Callable[[], None]]], run: Run, groups: int) -> None:
    """All parts, by so many threads; one that raises is a failure of its first case."""
    queue, lock = collections.deque(todo), threading.Lock()

    def work() -> None:
        while time.time() < run.until:
            with lock:
                if not queue:
                    return
                name, one = queue.popleft()
            try:
                one()
            except Exception as error:
                run.record.add(name, "raised", f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work) for _ in range(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    typer.run(main)
