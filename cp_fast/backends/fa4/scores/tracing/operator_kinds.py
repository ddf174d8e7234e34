"""The kind in which an operator computes: an expression has float32, int32, int64 and bool alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from cp_fast.backends.fa4.scores.expressions import BOOL, FLOAT, INT, LONG, NoExpression

__all__ = ["LOADED", "UNCHANGED", "common_kind", "kind_of_number", "name_of", "result_kind"]

_KINDS = {torch.float32: FLOAT, torch.int32: INT, torch.int64: LONG, torch.bool: BOOL}
LOADED = _KINDS | {  # A captured tensor's dtype -> the kind of its elements.
    torch.float16: FLOAT,
    torch.bfloat16: FLOAT,
    torch.int8: INT,
    torch.uint8: INT,
    torch.int16: INT,
}
UNCHANGED = {"clone", "detach", "alias", "lift_fresh_copy", "lift_fresh", "view_of"}
_EXACT = {"neg", "abs", "minimum", "maximum", "where", "masked_fill", "relu", "_to_copy"} | UNCHANGED  # In any dtype.


def name_of(node: Node) -> str:
    """The operator's name, without its overload."""
    return str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")


def result_kind(node: Node) -> str:
    """The kind of an operator's result. Half precisions are float where the operator does not round."""
    dtype, name = node.meta["val"].dtype, name_of(node)
    if name in _EXACT and dtype in (torch.float16, torch.bfloat16) and not _rounds(name, node):
        return FLOAT
    if dtype not in _KINDS:
        raise NoExpression(f"{node.target} in {dtype}")
    return _KINDS[dtype]


def _rounds(name: str, node: Node) -> bool:
    """Whether a conversion to a half dtype changes values."""
    source: Any = node.args[0]
    return name == "_to_copy" and source.meta["val"].dtype != node.meta["val"].dtype


def common_kind(args: Sequence[Any]) -> str:
    """The kind in which arguments are compared.

    >>> common_kind([torch.ones(2, dtype=torch.int32), 0.5]), common_kind([torch.ones(2, dtype=torch.bool), True])
    ('float', 'int')
    """
    dtype = torch.result_type(*[x.meta["val"] if isinstance(x, Node) else x for x in args])
    return LONG if dtype == torch.int64 else FLOAT if dtype.is_floating_point else INT


def kind_of_number(x: float) -> str:
    """The kind of a number of Python.

    >>> kind_of_number(True), kind_of_number(3), kind_of_number(0.5)
    ('bool', 'int', 'float')
    """
    return BOOL if isinstance(x, bool) else INT if isinstance(x, int) else FLOAT
