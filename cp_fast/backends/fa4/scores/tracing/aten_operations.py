"""The meaning of PyTorch's operators for one element: an operator becomes nodes of an expression, or is refused."""

from __future__ import annotations

from typing import Any, cast

from torch.fx import Node

from cp_fast.backends.fa4.scores.expressions import BOOL, NoExpression
from cp_fast.backends.fa4.scores.tracing.composed_operations import COMPOSED
from cp_fast.backends.fa4.scores.tracing.operator_kinds import UNCHANGED, common_kind, name_of, result_kind
from cp_fast.backends.fa4.scores.tracing.traced_values import TracedValues

__all__ = ["DOCUMENTED", "translate"]

DOCUMENTED = (
    "+ - * / // % and unary -, comparisons, logical and, or and not, & | ^ ~ of integers and booleans, where, "
    "masked_fill, abs, sign, minimum, maximum, clamp, relu, exp, exp2, expm1, log, log2, log1p, sqrt, rsqrt, sin, cos, "
    "tanh, sigmoid, softplus, square, powers with a constant, conversions between float32, int32, int64 and bool, and "
    "elements of captured tensors by integer indices"
)

_SAME = {  # All inputs have the result's kind.
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "div",
    "floor_divide": "floor_div",
    "remainder": "mod",
    "minimum": "minimum",
    "maximum": "maximum",
    "neg": "neg",
    "abs": "abs",
    "exp": "exp",
    "exp2": "exp2",
    "log": "log",
    "log2": "log2",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "sin": "sin",
    "cos": "cos",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "bitwise_not": "not",
}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_LOGICAL = {"logical_and": "and", "logical_or": "or", "logical_xor": "xor", "logical_not": "not"}
_CONSTANTS = {"scalar_tensor": 0, "full": 1, "full_like": 1, "new_full": 2}
_ZEROS_ONES = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_SHAPES = {"expand", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"}


def translate(values: TracedValues, node: Node) -> None:
    """Translate a node whose inputs are translated.

    Raises:
        NoExpression: it has no meaning for one element.
    """
    name, args = name_of(node), node.args
    if node.op == "get_attr":
        values.give(node, values.constant_tensor(node))
    elif name == "select" and (chosen := values.captured(args[0])) is not None:
        values.give(node, values.selected(chosen, *cast(Any, args[1:])))
    elif name == "index":
        values.give(node, values.element(args[0], cast(Any, args[1])))
    else:
        values.give(node, _element(values, name, node))


def _element(values: TracedValues, name: str, node: Node) -> int:
    """The number of an element-wise operator's result."""
    writer, args, kwargs = values.writer, node.args, node.kwargs
    if name in UNCHANGED:
        return values.number_of(args[0])
    kind = result_kind(node)
    if name in _CONSTANTS and isinstance(args[_CONSTANTS[name]], int | float | bool):
        return writer.constant(cast(Any, args[_CONSTANTS[name]]), kind)
    if name in _ZEROS_ONES:
        return writer.constant(_ZEROS_ONES[name], kind)
    if name == "_to_copy":
        return values.number_of(args[0], kind)
    if name in _SHAPES:
        if not values.is_constant(args[0]) and cast(Any, args[0]).meta["val"].shape != node.meta["val"].shape:
            raise NoExpression(f"{node.target}, which moves elements")
        return values.number_of(args[0], kind)
    if name in _COMPARISONS:
        common = common_kind(args[:2])
        return writer.write(name, [values.number_of(x, common) for x in args[:2]], BOOL)
    if name in _LOGICAL:
        return writer.write(_LOGICAL[name], [values.truth(x) for x in args], BOOL)
    if name == "where" and len(args) == 3:
        chosen = (values.number_of(x, kind) for x in args[1:])
        return writer.write("where", [values.truth(args[0]), *chosen], kind)
    if name == "div" and (mode := kwargs.get("rounding_mode")) is not None:
        if mode != "floor":
            raise NoExpression(f"division with rounding_mode={mode!r}")
        return writer.write("floor_div", [values.number_of(x, kind) for x in args[:2]], kind)
    if name in _SAME and (kind != BOOL or name.startswith("bitwise")):
        inputs = [values.number_of(x, kind) for x in args[:2]]
        if (alpha := kwargs.get("alpha", 1)) != 1:
            inputs[1] = writer.write("mul", [inputs[1], values.number_of(alpha, kind)], kind)
        return writer.write(_SAME[name], inputs, kind)
    if name not in COMPOSED:
        raise NoExpression(str(node.target))
    return COMPOSED[name](values, kind, args)
