"""The n-th operation, upload, file access or launch fails on one rank, for every n until one run goes through: all
ranks raise, and the next call works.
"""

from __future__ import annotations

import builtins
import importlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import cp_fast
import cp_fast.api.plan
import cp_fast.build.builder
from cp_fast.movers import select_movers as select
from tests.dist.workers import Processes
from tests.marks import needs_cxx

pytestmark = pytest.mark.faults

SIZES: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.bfloat16, "device": "cpu"}
LIMIT = 3.0  # seconds of the groups in which a peer is waited for
MOST = 400  # attempts


class Nth:
    """Counts what passes, and raises when the n-th does; never for n = 0."""

    def __init__(self, n: int, error: Callable[[], Exception]) -> None:
        self.left, self.fired, self._error = n, False, error

    def passes(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.fired = True
            raise self._error()

    def before(self, fn: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.passes()
            return fn(*arguments, **options)

        return counted


class Operations(TorchDispatchMode):
    """Every operation of PyTorch that may allocate."""

    def __init__(self, nth: Nth) -> None:
        super().__init__()
        self._nth = nth

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._nth.passes()
        return func(*args, **(kwargs or {}))


def no_memory() -> Exception:
    return torch.OutOfMemoryError("no memory is left")


def full_disk() -> Exception:
    return OSError(28, "No space left on device")


@contextmanager
def operations(n: int) -> Iterator[Nth]:
    """Of making a plan; what an agreement itself needs is PyTorch's."""
    nth, made = Nth(n, no_memory), cp_fast.api.plan.plan_of_rank  # pyright: ignore[reportAttributeAccessIssue]

    def counted(*arguments: Any, **options: Any) -> Any:
        with Operations(nth):
            return made(*arguments, **options)

    with mock.patch("cp_fast.api.plan.plan_of_rank", counted):
        yield nth


@contextmanager
def uploads(n: int) -> Iterator[Nth]:
    nth = Nth(n, no_memory)
    with (
        mock.patch("cp_fast.api.compiled_batch.upload", nth.before(cp_fast.api.compiled_batch.upload)),  # pyright: ignore
        mock.patch("cp_fast.compile.in_place.linked", nth.before(cp_fast.compile.in_place.linked)),  # pyright: ignore
    ):
        yield nth


@contextmanager
def files(n: int) -> Iterator[Nth]:
    """What looking for the native kernels opens, reads and locks, as in a new process."""
    nth = Nth(n, full_disk)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {select.VARIABLE: "native"}))
        for forget in (select._choice, select._loaded, importlib.import_module("cp_fast.movers.native_movers").load):
            forget.cache_clear()
            stack.callback(forget.cache_clear)
        for owner, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat"), (os, "mkdir")):
            stack.enter_context(mock.patch.object(owner, name, nth.before(getattr(owner, name))))
        yield nth


POINTS = {"operations": operations, "uploads": uploads, "files": files}


def call(phase: str, cp: Any) -> None:
    cu = torch.tensor([0, 8 * cp.size], dtype=torch.int32)
    how: dict[str, Any] = {"cp": cp, "qkv_format": "thd", "cu_seqlens_q": cu}
    if phase == "without a plan":
        x = torch.ones(8, 2, 8, dtype=torch.bfloat16)
        cp_fast.attention(x, x, x, **how)
    else:
        room: dict[str, Any] = {"max_sequences": 2} if phase == "in place" else {}
        cp_fast.make_plan(**how, **SIZES, **room)


def every_n(phase: str, point: str) -> list[str]:
    """What this rank said for n = 1, 2, ..., and "" for the run that went through. Rank 1 is the one that fails."""
    torch.manual_seed(0)
    said: list[str] = []
    for n in range(1, MOST):
        cp = cp_fast.ContextParallel(dist.group.WORLD)
        text = ""
        with POINTS[point](n if cp.rank == 1 else 0) as nth:
            try:
                call(phase, cp)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
        fired: list[Any] = [None] * cp.size
        dist.all_gather_object(fired, nth.fired)
        if not fired[1]:
            return said if not text else [*said, f"without a fault: {text}"]
        said.append(text)
        call(phase, cp)  # which works
    return [*said, "without an end"]


@pytest.mark.parametrize("phase", ["make_plan", "in place"])
@pytest.mark.parametrize("point", ["operations", "uploads", pytest.param("files", marks=needs_cxx)])
def test_all_ranks_raise_and_the_next_call_works(two: Processes, phase: str, point: str) -> None:
    first, second = two.run(every_n, phase, point)
    assert not isinstance(first, Exception), first
    assert not isinstance(second, Exception), second
    assert len(first) == len(second) >= 1
    wanted = "No space left" if point == "files" else "no memory is left"
    assert any(second)
    for n, (here, there) in enumerate(zip(first, second, strict=True), 1):
        if not here and not there:  # what failed was not needed
            continue
        assert wanted in there, (n, there)
        assert "rank 1 refused its arguments" in here, (n, here)
        assert wanted in here, (n, here)


def every_launch(direction: str) -> list[str]:
    """The same of a planned call's launches, after which a group has no use: another one each time."""
    said: list[str] = []
    for n in range(1, MOST):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=LIMIT))
        cp = cp_fast.ContextParallel(group)
        plan = cp_fast.make_plan(cp=cp, batch_size=1, seqlen_q=8 * cp.size, **SIZES)
        x = torch.ones(1, 8, 2, 8, dtype=torch.bfloat16, requires_grad=True)
        nth, text = Nth(n if cp.rank == 1 else 0, no_memory), ""
        kind = type(plan.backend)
        with mock.patch.object(kind, direction, nth.before(getattr(kind, direction))):
            try:
                cp_fast.attention(x, x, x, cp=cp, plan=plan).sum().backward()
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
        fired: list[Any] = [None] * cp.size
        dist.all_gather_object(fired, nth.fired)
        if not fired[1]:
            return said if not text else [*said, f"without a fault: {text}"]
        said.append(text)
    return [*said, "without an end"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_launch_that_fails(two: Processes, direction: str) -> None:
    """Too late for an agreement: the others end in the time-out, unless they need nothing from it any more."""
    first, second = two.run(every_launch, direction)
    assert not isinstance(first, Exception), first
    assert not isinstance(second, Exception), second
    assert len(second) >= 2
    assert all("no memory is left" in text for text in second), second
    assert all(text.startswith("PeerError") and "rank 1" in text for text in first if text), first
