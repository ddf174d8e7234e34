"""Bad implementations of the kinds that came by: each is `cp_ref`, but for one habit. What the suite says of each is in
`test_zoo.py`.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import cp_ref

SURROGATE = "caf\udce9"  # what a path of Latin-1 becomes


class Zoo:
    """`cp_ref`, to be spoiled."""

    def __getattr__(self, name: str) -> Any:
        return getattr(cp_ref, name)


class HangsAlways(Zoo):
    """It has no `supports` either, so each question is a call."""

    supports = make_plan = None

    def attention(self, *tensors: torch.Tensor, cp: Any, **rest: Any) -> Any:
        while True:
            time.sleep(0.01)


class HangsAlwaysInProcesses(HangsAlways):
    group_kind = "process"


class SupportsHangs(Zoo):
    def supports(self, **arguments: Any) -> Any:
        while True:
            time.sleep(0.01)


class Acts(Zoo):
    """Does something at every call, and then answers as `cp_ref` does."""

    def act(self) -> Any:
        """Nothing."""

    def attention(self, *tensors: torch.Tensor, **rest: Any) -> Any:
        self.act()
        return cp_ref.attention(*tensors, **rest)


class SaysSurrogates(Acts):
    def act(self) -> Any:
        raise RuntimeError(f"no such file: {SURROGATE}")


class Leaves(Acts):
    def act(self) -> Any:
        sys.exit(5)


class LeavesProcesses(Leaves):
    group_kind = "process"


class Forks(Acts):
    def act(self) -> Any:
        os.fork()


class ForksProcesses(Forks):
    group_kind = "process"


class ReturnsNone(Zoo):
    """None from the one member that `silent` names."""

    silent = "attention"

    def __getattribute__(self, name: str) -> Any:
        if name == "silent" or name != type(self).silent:
            return object.__getattribute__(self, name)
        return lambda *_, **__: None


def none_from(member: str) -> ReturnsNone:
    return type("NoneFrom", (ReturnsNone,), {"silent": member})()


SETTERS: dict[str, Callable[[], Any]] = {
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "the default device": lambda: torch.set_default_device("meta"),
    "the number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "the deterministic algorithms": lambda: torch.use_deterministic_algorithms(False),
    "cuDNN's deterministic flag": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "the precision of float32 products": lambda: torch.set_float32_matmul_precision("medium"),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "PyTorch's random state": lambda: torch.rand(3, device="cpu"),
    "Python's random state": random.random,
    "numpy's random state": lambda: np.random.rand(3),
}


def sets(setting: str) -> Zoo:
    """Leaves a setting changed behind."""

    class Sets(Zoo):
        def attention(self, *tensors: torch.Tensor, **rest: Any) -> Any:
            result = cp_ref.attention(*tensors, **rest)
            SETTERS[setting]()
            return result

    return Sets()
