"""The helpers that are one operator each.

An argument is checked here if it cannot reach the operator: other types than tensors, integers or flags, and tensors
whose gradient autograd would lack. The operators check everything else (`cp_fast.movers.operands`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cp_fast.movers import operators  # noqa: F401  (registers the operators)
from cp_ref.contract import thd_corrections, thd_indices
from cp_ref.contract.thd_checks import Tensors, as_list, check_given, check_tensor, like
from cp_ref.contract.thd_corrections import ACTIONS
from cp_ref.schedules.values import check_choice, check_flag

__all__ = [
    "get_cu_seqlens_on_cp_rank",
    "thd_copy_valid_tokens_from_per_split_to_rank_local",
    "thd_cp_rank_order_to_sequence_order",
    "thd_get_partitioned_indices",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
    "thd_sequence_order_to_cp_rank_order",
]

_MOST = 2**63 - 1
_Check = Callable[[str, Any], None]


@thd_indices.thd_get_partitioned_indices
def thd_get_partitioned_indices(
    cu_seqlens_padded: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int
) -> torch.Tensor:
    return _call("partition_indices", cu_seqlens_padded, total_tokens, cp_size, cp_rank)


@thd_indices.thd_sequence_order_to_cp_rank_order
def thd_sequence_order_to_cp_rank_order(x: Tensors, cu_seqlens_padded: torch.Tensor, cp_size: int) -> Tensors:
    return like(x, _call("reorder", as_list(x), cu_seqlens_padded, cp_size, True))


@thd_indices.thd_cp_rank_order_to_sequence_order
def thd_cp_rank_order_to_sequence_order(x: Tensors, cu_seqlens_padded: torch.Tensor, cp_size: int) -> Tensors:
    return like(x, _call("reorder", as_list(x), cu_seqlens_padded, cp_size, False))


@thd_indices.get_cu_seqlens_on_cp_rank
def get_cu_seqlens_on_cp_rank(
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded: torch.Tensor,
    cp_size: int,
    cp_rank: int,
    first_half: bool,
    second_half: bool,
) -> torch.Tensor:
    return _call("rank_lengths", cu_seqlens, cu_seqlens_padded, cp_size, cp_rank, first_half, second_half)


@thd_indices.thd_copy_valid_tokens_from_per_split_to_rank_local
def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: torch.Tensor, inp: torch.Tensor, cu_seqlens_padded: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    _call("copy_valid_", out, inp, cu_seqlens_padded, cu_seqlens)


@thd_corrections.thd_read_half_tensor
def thd_read_half_tensor(x: Tensors, cu_seqlens_padded: torch.Tensor, half: int) -> Tensors:
    return like(x, _call("read_half", as_list(x), cu_seqlens_padded, half))


@thd_corrections.thd_read_second_half_lse
def thd_read_second_half_lse(
    lse: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool, max_seqlen: int
) -> torch.Tensor:
    return _call("read_second_half_lse", lse, cu_seqlens_padded, lse_packed, max_seqlen)


@thd_corrections.thd_second_half_lse_correction
def thd_second_half_lse_correction(
    lse: torch.Tensor, lse_step: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool
) -> None:
    _call("lse_correction_", lse, lse_step, cu_seqlens_padded, lse_packed)


@thd_corrections.thd_out_correction
def thd_out_correction(
    out: torch.Tensor,
    out_step: torch.Tensor,
    lse: torch.Tensor,
    lse_step: torch.Tensor,
    cu_seqlens_padded: torch.Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    _call("out_correction_", out, out_step, lse, lse_step, cu_seqlens_padded, only_second_half, lse_packed)


@thd_corrections.thd_grad_correction
def thd_grad_correction(
    grad: torch.Tensor, grad_step: torch.Tensor, cu_seqlens_padded: torch.Tensor, first_half: str, second_half: str
) -> None:
    _call("grad_correction_", grad, grad_step, cu_seqlens_padded, first_half, second_half)


def _call(operator: str, *arguments: Any) -> Any:
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
    if isinstance(value, int) and not -_MOST <= value <= _MOST:
        raise ValueError(f"{name} is {value}; it must fit into 64 bits")


def _check_operand(name: str, x: Any) -> None:
    """Raise unless x is a strided tensor that requires no gradient: these helpers have none."""
    check_tensor(name, x)
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(
            f"{name} requires grad, and this helper is not differentiable; call it inside an "
            "autograd.Function or under torch.no_grad()"
        )


_BY_TYPE: dict[str, _Check] = {
    "Tensor": _check_operand,
    "List[Tensor]": lambda name, value: None,  # `as_list` has checked them.
    "int": _check_integer,
    "SymInt": _check_integer,
    "bool": check_flag,
    "str": lambda name, value: check_choice(name, value, ACTIONS),
}


def _checks_of(operator: str) -> tuple[tuple[str, _Check], ...]:
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
