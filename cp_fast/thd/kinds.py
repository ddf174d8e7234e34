"""Refuse arguments before an operator sees them: other types than tensors, integers or flags, and tensors whose
gradient autograd would lack. The operators refuse everything else (`cp_fast.movers.operators.registered`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cp_fast.movers.operators import correction_operators, mover_gradients  # noqa: F401  (register themselves)
from cp_ref.common.thd.checks import check_given, check_tensor
from cp_ref.common.thd.declared_corrections import ACTIONS
from cp_ref.spec import check_choice, check_flag

__all__ = ["call"]

MOST = 2**63 - 1
Check = Callable[[str, Any], None]


def call(operator: str, *arguments: Any) -> Any:
    """Call `torch.ops.cp_attention.<operator>`, after a check that every argument has the type of the operator's
    schema.
    """
    for (name, check), value in zip(_CHECKS[operator], arguments, strict=True):
        check(name, value)
    return getattr(torch.ops.cp_attention, operator)(*arguments)


def _check_integer(name: str, value: Any) -> None:
    """Raise unless `value` is a valid integer for an operator."""
    if not isinstance(value, int | torch.SymInt) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be an integer")
    if isinstance(value, int) and not -MOST <= value <= MOST:
        raise ValueError(f"{name} is {value}; it must fit into 64 bits")


def _check_operand(name: str, x: Any) -> None:
    """Raise unless x is a strided tensor that requires no gradient: these helpers have none."""
    check_tensor(name, x)
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(
            f"{name} requires grad, and this helper is not differentiable; call it inside an "
            "autograd.Function or under torch.no_grad()"
        )


def _check_action(name: str, value: Any) -> None:
    check_choice(name, value, ACTIONS)


def _check_nothing(name: str, value: Any) -> None:
    """No check: `as_list` has checked the tensors of a tuple."""


_BY_TYPE: dict[str, Check] = {
    "Tensor": _check_operand,
    "List[Tensor]": _check_nothing,
    "int": _check_integer,
    "SymInt": _check_integer,
    "bool": check_flag,
    "str": _check_action,
}


def _checks_of(operator: str) -> tuple[tuple[str, Check], ...]:
    arguments = getattr(torch.ops.cp_attention, operator).default._schema.arguments
    return tuple((a.name, check_given if a.name.startswith("cu_seqlens") else _BY_TYPE[str(a.type)]) for a in arguments)


_CHECKS = {
    operator: _checks_of(operator)
    for operator in (
        "partition_indices",
        "rank_lengths",
        "reorder",
        "read_half",
        "read_second_half_lse",
        "copy_valid_",
        "lse_correction_",
        "out_correction_",
        "grad_correction_",
    )
}
