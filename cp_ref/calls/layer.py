"""Both packages describe a linear or sparse layer here: its tensors and options, and how its calls are read and
checked.

    CONVOLUTION = Layer(
        "causal_conv1d",
        (Operand("x", autocast), Operand("weight"), Operand("bias", optional=True)),
        {"activation": "str?"},
        _read_convolution,
    )

Each package computes a declared layer by one driver: `cp_fast.layers.layers`, and `cp_ref.reference.layer_calls`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import isfinite
from numbers import Real
from typing import Any, TypeVar

import torch

from cp_ref.calls.declared import implements
from cp_ref.calls.plan_arguments import Plan
from cp_ref.groups.context import ContextParallel
from cp_ref.problems.call_checks import check_plan_device, check_plan_owner, check_slice
from cp_ref.problems.read_problem import DTYPES, ROW_AXES, check_axes
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.values import check_dtype, check_one_device, check_tensor, dtype_of, kind_of

__all__ = [
    "Layer",
    "LayerCall",
    "Operand",
    "check_last",
    "check_linear_plan",
    "check_local",
    "check_rows",
    "check_same_rows",
    "public_function",
    "read_scale",
]

F = TypeVar("F", bound=Callable[..., Any])


# ---- a layer, declared


@dataclass(frozen=True)
class Operand:
    """One tensor of a layer.

    Attributes:
        cast: what becomes of it before the call is read, such as `autocast`; None for nothing.
        optional: whether it may be None.
        constant: whether no gradient flows to it.
    """

    name: str
    cast: Callable[[Any], Any] | None = None
    optional: bool = False
    constant: bool = False


@dataclass(frozen=True)
class Layer:
    """A function of both packages that computes on this rank's slices of tensors.

    Attributes:
        name: of the function.
        operands: its tensors, in order.
        options: the type of each other argument, by name, as an operator of torch.library has it.
        read: the call of `read(cp, plan, package_plan, **arguments)`, once the arguments are checked against the plan;
            sends nothing. package_plan: the package's own Plan. Raises ValueError or TypeError, naming the argument,
            its value and the rule; Unsupported, naming what is missing.
        second: the option that asks for a second result; empty where there is one result.
    """

    name: str
    operands: tuple[Operand, ...]
    options: Mapping[str, str]
    read: Callable[..., LayerCall]
    second: str = ""

    casts: tuple[tuple[int, Callable[[Any], Any]], ...] = field(init=False)  # of operands, by place

    def __post_init__(self) -> None:
        found = [(i, operand.cast) for i, operand in enumerate(self.operands) if operand.cast is not None]
        found += [(i, _detached) for i, operand in enumerate(self.operands) if operand.constant]
        object.__setattr__(self, "casts", tuple(found))

    def cast(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the operands after the casts. Constants are detached."""
        found = [*tensors]
        for place, cast in self.casts:
            found[place] = cast(found[place])
        return found

    def results(self, options: Mapping[str, Any]) -> int:
        """How many results a call with these options has."""
        return 2 if self.second and options[self.second] else 1


def public_function(stub: F, called: Callable[..., Sequence[torch.Tensor]], of: Any, module: str) -> F:
    """The public function of a layer in one package, with the parameters, the defaults and the docstring of the stub.
    It is made as `dataclasses` makes `__init__`: so a call costs no more than that of a function that is written out.

    Args:
        called: the package's driver. `called(of, cp, plan, tensors, **options)` gives the results of a call.
        of: what the package computes of the layer, which is declared as `of.declared`.
        module: the name of the module that the function is in.
    """
    layer: Layer = of.declared
    parameters = inspect.signature(stub).parameters.values()
    names = [f"{'*, ' if p.name == 'cp' else ''}{p.name}" for p in parameters]
    tensors = ", ".join(operand.name for operand in layer.operands)
    options = ", ".join(f"{name}={name}" for name in layer.options)
    lines = [
        "def made(called, of):",
        f"    def {layer.name}({', '.join(names)}):",
        f"        results = called(of, cp, plan, ({tensors},), {options})",
        "        return results if len(results) > 1 else results[0]",
        f"    return {layer.name}",
    ]
    found, code = dict[str, Any](), stub.__code__
    before = "\n" * (code.co_firstlineno - 2)  # a traceback shows the stub
    exec(compile(before + "\n".join(lines), code.co_filename, "exec"), vars(sys.modules[module]), found)
    function = found["made"](called, of)
    function.__module__, function.__qualname__ = module, layer.name
    function.__annotations__ = dict(stub.__annotations__)
    return implements(stub)(function)


@dataclass(frozen=True)
class LayerCall:
    """The sizes of a call that all ranks must have in common: they decide what is sent.

    Attributes:
        function: the name of the public function that is called.
    """

    function: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.function}({repr(self).partition('(')[2]}"

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that are equal for equal calls."""
        return blake2b(str(self).encode()).digest()[:32]


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


# ---- checks of arguments


def check_linear_plan(cp: ContextParallel, plan: Any, package_plan: type) -> None:
    """The package's plan, for linear layers and for this context."""
    if not isinstance(plan, package_plan) or not isinstance(plan, Plan):
        package = package_plan.__module__.split(".")[0]
        raise TypeError(f"plan is {kind_of(plan)}; it must be a {package}.Plan, made with linear=True")
    if not plan.linear:
        raise ValueError("plan was made without linear=True, so it has no state messages; make it with linear=True")
    check_plan_owner(plan.problem, plan.rank, cp)


def check_local(name: str, x: Any, first: str, like: Any) -> None:
    """A plain tensor with values, on the device of the tensor `like`, whose name is `first`; None: on any device."""
    check_tensor(name, x)
    if hasattr(x, "placements"):
        raise TypeError(f"{name} is a DTensor; give its local tensor, this rank's slice")
    if like is not None:
        check_one_device(name, x, first, like)


def check_rows(
    plan: Plan,
    name: str,
    x: Any,
    last: str,
    first: Any = None,
    *,
    wide: bool = False,
    side: str = "q",
    first_name: str = "q",
) -> None:
    """A slice of the plan's format with these last axes; of the same rows, device and dtype as the `first` tensor.

    wide: it may be float32 too. side: "kv" for a slice of keys, whose rows are not those of `first`.
    """
    check_local(name, x, first_name, first)
    check_axes(name, x, plan.problem.qkv_format, last)
    if first is not None:
        check_dtype(name, x, dtype_of(first), *(("float32",) if wide else ()))
    if first is not None and side == "q":
        check_same_rows(plan.problem, name, x, first_name, first)
        return
    check_dtype(name, x, *DTYPES)
    check_plan_device(plan.device, name, x)
    check_slice(plan.problem, plan.room, plan.rank, name, x, side)


def check_same_rows(problem: Problem, name: str, x: Any, other: str, like: Any) -> None:
    """The leading axes of two slices."""
    leading = len(ROW_AXES[problem.qkv_format].split(", "))
    if x.shape[:leading] != like.shape[:leading]:
        raise ValueError(f"{name} has shape {list(x.shape)} and {other} {list(like.shape)}; their rows must be equal")


def check_last(name: str, x: torch.Tensor, wanted: tuple[int, ...]) -> None:
    """The sizes of the last axes."""
    if tuple(x.shape[-len(wanted) :]) != wanted:
        raise ValueError(f"{name} has shape {list(x.shape)}; its last sizes must be {list(wanted)}")


def read_scale(scale: Any, d_k: int) -> float:
    if scale is None:
        return d_k**-0.5
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"scale is {scale!r}; it must be a number")
    try:
        number = float(scale)
    except OverflowError:
        number = float("inf")
    if not isfinite(number):
        raise ValueError(f"scale is {scale!r}; it must be finite")
    return number
