"""Tests on a GPU share it and its host with others, while kernel libraries compile: ranks get more time than usual, the
longest tests begin first, and memory is given back. And the three implementations of the kernels.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from cp_fast.movers.select_movers import why_not
from tests.cp_fast.kernels.checks.case import Where

os.environ.setdefault("CONFORMANCE_LIMIT_S", "300")

T = TypeVar("T")
HERE = Path(__file__).parent
KEPT = 2**30  # bytes of GPU memory that a process may keep between tests: there may be sixteen
# The longest tests, longest first: processes of their own, measuring, kernels that no other test compiles.
LONGEST = (
    "test_processes_give_what_the_simulated_group_gives",
    "test_a_model_is_the_same_over_ranks",
    "test_call",
    "test_launch",
    "test_causal_conv1d",
    "test_random_problems",
    "test_random_areas",
    "test_the_same_kernels_are_launched",
    "test_other_dtypes",
    "test_head_dims_and_more_results",
    "test_hundreds_of_short_segments",
    "test_one_gpu_is_measured_and_planned_with",
    "test_kernels_are_compiled_ahead",
    "test_nothing_waits_on_any_stream",
    "test_more_than_2_to_the_31_elements",
    "test_buffers_past_two_to_the_31",
    "test_properties",
    "test_a_killed_rank_is_named_in_time_and_no_number_comes_out",
    "test_the_probe_finds_nothing",
    "test_every_schedule",
    "test_a_broken_rule_ends_in_an_assertion",
    "test_broken_lengths_end_in_an_assertion",
    "test_opcheck",
)


def dealt(long: Sequence[T], others: Sequence[T], processes: int) -> list[T]:
    """Tests in the order in which pytest-xdist's `worksteal` gives the first ones to every process: it cuts the list in
    equal parts. Each part begins with its share of the long ones. The others stay beside their neighbours, with which
    they share compiled kernels.

    >>> dealt("ABCD", "123456", 3)
    ['A', 'D', '1', 'B', '2', '3', 'C', '4', '5', '6']
    """
    found, rest, left = list[T](), list(others), len(long) + len(others)
    for n in range(processes):
        size = left // (processes - n)
        mine = list(long[n::processes])
        found += mine + rest[: max(0, size - len(mine))]
        del rest[: max(0, size - len(mine))]
        left -= size
    return found + rest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests begin first, each on another process."""
    if not all(item.path.is_relative_to(HERE) for item in items):
        return
    names = [getattr(item, "originalname", item.name) for item in items]
    long = sorted((n for n, name in enumerate(names) if name in LONGEST), key=lambda n: (LONGEST.index(names[n]), n))
    others = [n for n, name in enumerate(names) if name not in LONGEST]
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = [items[n] for n in dealt(long, others, processes)]


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    """PyTorch keeps what a test has freed; other processes need it."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()


@pytest.fixture
def much_memory() -> Iterator[None]:
    """24 GiB of the GPU's memory: one test at a time has it, and waits until it is free."""
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[1] < 30 << 30:
        pytest.skip("needs a GPU with 30 GiB of memory")
    with (Path(tempfile.gettempdir()) / f"much_gpu_memory_{os.getuid()}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        until = time.monotonic() + 60
        while (free := torch.cuda.mem_get_info()[0]) < 24 << 30:
            if time.monotonic() > until:
                pytest.skip(f"needs 24 GiB of free GPU memory: {free / 2**30:.0f} are free")
            time.sleep(0.5)
        yield
        torch.cuda.empty_cache()


@pytest.fixture(params=["native", "numba", "torch"])
def where(request: pytest.FixtureRequest) -> Where:
    if (reason := why_not(request.param, "cuda")) is not None:
        pytest.skip(f"needs the kernels {request.param!r}: {reason}")
    return Where(request.param, "cuda")
