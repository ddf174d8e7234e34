"""Which implementation of the planner's loops is in use: the rule of `cp_fast.kernels.select`, for the CPU.

native   C++, built on first use    where the native kernels for the CPU can be had
numpy    operations on arrays       where they cannot, or where other kernels are asked for
"""

from __future__ import annotations

import importlib

from cp_fast.kernels import select
from cp_fast.planning.loops.base import Loops
from cp_fast.planning.loops.by_numpy import ByNumpy

__all__ = ["BY_NUMPY", "Loops", "loops"]

BY_NUMPY = ByNumpy()


def loops() -> Loops:
    """The loops for one plan.

    Raises:
        ValueError, RuntimeError, cp_fast.build.BuildError: as `cp_fast.kernels.select.kernels`.

    >>> from cp_fast.kernels.select import use
    >>> with use("torch"):
    ...     loops().name
    'numpy'
    """
    asked, _ = select.asked()
    if asked not in (None, "native"):
        return BY_NUMPY
    if select.chosen("cpu")[0] == "native":
        return importlib.import_module("cp_fast.planning.loops.by_native").load().for_one_plan()
    return BY_NUMPY
