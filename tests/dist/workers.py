"""Real processes over gloo: forked from one that has imported PyTorch and both packages, which takes seconds."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.marks import HANGS_S

__all__ = ["CONTEXT", "Processes", "run_module", "run_program", "start_server"]

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = (
    __name__,
    "cp_fast.api.attention",
    "cp_fast.layers.linear_attention",
    "cp_fast.tools.cli.demo",
    "conformance.cli",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "pytest",
)
FRAMEWORKS = {  # by the package that tests have imported
    "transformers": (
        "transformers.trainer",
        "transformers.models.llama.modeling_llama",
        "trl.trainer.reward_trainer",
        "trl.trainer.sft_trainer",
    ),
    "diffusers": ("diffusers.models.transformers.transformer_wan",),
    "megatron": ("megatron.core",),
    "torchtitan": ("torchtitan.models.llama3",),
}
CONTEXT.set_forkserver_preload(list(PRELOADED))
if "CP_TESTS_BACKEND" in os.environ:  # in the server too, and so in all processes
    from tests.fa4_dry import install_asked

    install_asked()
os.register_at_fork(after_in_child=gc.freeze)  # a collection would look at all that the server has imported


def start_server() -> None:
    """Start the process that all others are forked from now, with all of these frameworks that tests have imported."""
    used = [name for package, names in FRAMEWORKS.items() if package in sys.modules for name in names]
    CONTEXT.set_forkserver_preload([*PRELOADED, *used])
    forkserver.ensure_running()


def _main(rank: int, size: int, store: str, tasks: Any, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=HANGS_S)
    )
    while (task := tasks.get()) is not None:
        fn, arguments = task
        try:
            found = fn(*arguments)
        except Exception as error:
            found = error
        results.put((rank, pickle.dumps(found)))  # As bytes: PyTorch would send an open file for each tensor.
    dist.destroy_process_group()


class Processes:
    """A gloo group of `size` processes, started once: each call runs one function in all of them."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._results = CONTEXT.SimpleQueue()
        self._tasks = [CONTEXT.SimpleQueue() for _ in range(size)]
        store = str(Path(self._folder.name) / "store")
        self._processes = [
            CONTEXT.Process(target=_main, args=(rank, size, store, tasks, self._results))
            for rank, tasks in enumerate(self._tasks)
        ]
        for process in self._processes:
            process.start()

    def run(self, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`fn(*arguments)` in every process; the results by rank, or the exceptions in their place."""
        for tasks in self._tasks:
            tasks.put((fn, arguments))
        found = dict(self._results.get() for _ in self._tasks)
        return [pickle.loads(found[rank]) for rank in range(len(found))]

    def close(self) -> None:
        """End the processes."""
        for tasks in self._tasks:
            tasks.put(None)
        for process in self._processes:
            process.join(timeout=HANGS_S)
        self._folder.cleanup()


def run_program(program: Path, processes: int, *arguments: str) -> str:
    """Run a script with the variables that torchrun sets, and no torchrun, which imports PyTorch once for itself and
    once in every process.

    Returns:
        What the processes printed.

    Raises:
        AssertionError: a process failed, or did not end in half an hour.
    """
    # as torchrun has it, so that nobody can take the port in between
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.NamedTemporaryFile("r") as said:
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        variables |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
        given = str(program), arguments, variables, said.name
        started = [CONTEXT.Process(target=_program, args=(rank, *given)) for rank in range(processes)]
        for process in started:
            process.start()
        for process in started:
            process.join(timeout=HANGS_S)
            process.kill()
        printed = said.read()
    assert [process.exitcode for process in started] == [0] * processes, printed
    return printed


def run_module(folder: Path, name: str, *arguments: str, path: tuple[Path, ...] = ()) -> tuple[int, str]:
    """`python -m name arguments...` in a folder, with these folders first on the path.

    Returns:
        Its exit code (negative if it did not end in half an hour), and what it printed.
    """
    with tempfile.NamedTemporaryFile("r") as said:
        process = CONTEXT.Process(target=_module, args=(folder, name, arguments, path, said.name))
        process.start()
        process.join(timeout=HANGS_S)
        process.kill()
        process.join()
        return process.exitcode or 0, said.read()


def _as_fresh(said: str) -> None:
    """What it prints goes to a file, and it starts processes as a fresh Python does: not by a server of their own."""
    multiprocessing.set_start_method(None, force=True)
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), stream)


def _module(folder: Path, name: str, arguments: tuple[str, ...], path: tuple[Path, ...], said: str) -> None:
    _as_fresh(said)
    os.chdir(folder)
    os.environ["COLUMNS"] = "200"
    sys.path[:0] = [str(folder), *map(str, path)]
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _program(rank: int, program: str, arguments: tuple[str, ...], variables: dict[str, str], said: str) -> None:
    _as_fresh(said)
    torch.set_num_threads(1)
    os.environ |= variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
