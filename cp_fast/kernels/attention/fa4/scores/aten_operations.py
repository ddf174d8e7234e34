"""The meaning of PyTorch's operators for one element: an operator becomes nodes of an expression, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2
from typing import Any, NamedTuple, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from cp_fast.kernels.attention.fa4.scores.expressions import BOOL, FLOAT, INT, LONG, NoExpression, Writer

__all__ = [
    "COMPOSED",
    "DOCUMENTED",
    "LOADED",
    "UNCHANGED",
    "Captured",
    "TracedValues",
    "common_kind",
    "kind_of_number",
    "name_of",
    "result_kind",
    "translate",
]

# ---- in which kind an operator computes: where a value is rounded
#
# The kind in which an operator computes: an expression has float32, int32, int64 and bool alone.


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


# ---- the values so far
#
# The values of a traced function so far: leaves, numbers, results of operators, and captured tensors.


class Captured(NamedTuple):
    """A captured tensor, some of whose dimensions have constant indices."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    indices: tuple[int | None, ...]  # The number of a node for each dimension, None for a free one.

    @property
    def free(self) -> list[int]:
        """The dimensions without an index."""
        return [n for n, one in enumerate(self.indices) if one is None]

    def at(self, places: Sequence[int], numbers: Sequence[int]) -> Captured:
        """With these numbers as indices of these dimensions."""
        chosen = dict(zip(places, numbers, strict=True))
        return self._replace(indices=tuple(chosen.get(n, one) for n, one in enumerate(self.indices)))


class TracedValues:
    """The value of each node of a traced module: the number of an expression's node, or a captured tensor."""

    def __init__(self, module: GraphModule) -> None:
        self.writer = Writer()
        self._module = module
        self._values: dict[Node, int | Captured] = {}

    def give_leaf(self, node: Node, leaf: str) -> None:
        """This input is a leaf."""
        self._values[node] = self.writer.leaf(leaf)

    def give_tensor(self, node: Node, name: str) -> None:
        """This input is a captured tensor."""
        x = node.meta["val"]
        self._values[node] = Captured(name, x.dtype, tuple(x.shape), (None,) * x.dim())

    def give(self, node: Node, value: int | Captured) -> None:
        """The value of an operator."""
        self._values[node] = value

    def captured(self, x: Any) -> Captured | None:
        """The argument, if it is a captured tensor."""
        value = self._values.get(x) if isinstance(x, Node) else None
        return value if isinstance(value, Captured) else None

    def number_of(self, x: Any, kind: str | None = None) -> int:
        """The number of an argument's value: of a node, or of a number. In `kind`, where it is given."""
        if isinstance(x, Node):
            value = self._values[x]
            number = self._whole(value) if isinstance(value, Captured) else value
        else:
            number = self.writer.constant(x, kind or kind_of_number(x))
        return number if kind is None else self.writer.convert(number, kind)

    def truth(self, x: Any) -> int:
        """The number of an argument as a boolean."""
        number = self.number_of(x)
        kind = self.writer.nodes[number].kind
        return number if kind == BOOL else self.writer.write("ne", [number, self.writer.constant(0, kind)], BOOL)

    def is_constant(self, x: Any) -> bool:
        """Whether an argument is a number."""
        return self.writer.nodes[self.number_of(x)].op == "constant"

    def constant_tensor(self, node: Node) -> int:
        """A number that the function made a tensor of."""
        value: Any = getattr(self._module, str(node.target))
        value = getattr(value, "constant", None) if getattr(value, "constant", None) is not None else value
        if value.numel() != 1 or isinstance(value, FakeTensor):
            raise NoExpression("a tensor that it makes itself; give it as one of aux_tensors")
        kind = LOADED.get(value.dtype, FLOAT if value.is_floating_point() else LONG)
        return self.writer.constant(value.item(), kind)

    def selected(self, tensor: Captured, dim: int, index: int) -> Captured:
        """A captured tensor with one dimension fixed."""
        place = tensor.free[dim]
        index = index + tensor.sizes[place] if index < 0 else index
        return tensor.at([place], [self.writer.constant(index, INT)])

    def element(self, x: Any, given: Sequence[Any]) -> int:
        """An element of a captured tensor."""
        tensor = self.captured(x)
        if tensor is None:
            raise NoExpression("an index into a tensor that is not one of aux_tensors")
        if len(given) != len(tensor.free) or any(one is None for one in given):
            raise NoExpression(f"fewer indices than dimensions: aux_tensors[{tensor.name!r}] needs {len(tensor.sizes)}")
        numbers = [self.number_of(one) for one in given]
        for number in numbers:
            if (kind := self.writer.nodes[number].kind) not in (INT, LONG):
                raise NoExpression(f"an index of kind {kind} into aux_tensors[{tensor.name!r}]")
        if tensor.dtype not in LOADED:
            raise NoExpression(f"aux_tensors[{tensor.name!r}] of {tensor.dtype}")
        return self._load(tensor.at(tensor.free, numbers))

    def _whole(self, tensor: Captured) -> int:
        """A captured tensor of one element, without an index. Also in float64: its dtype decides no result's."""
        if any(tensor.sizes[place] != 1 for place in tensor.free):
            raise NoExpression(f"aux_tensors[{tensor.name!r}] without an index")
        if tensor.dtype not in LOADED and tensor.dtype != torch.float64:
            raise NoExpression(f"aux_tensors[{tensor.name!r}] of {tensor.dtype}")
        return self._load(tensor.at(tensor.free, [self.writer.constant(0, INT)] * len(tensor.free)))

    def _load(self, tensor: Captured) -> int:
        indices = [one for one in tensor.indices if one is not None] or [self.writer.constant(0, INT)]
        return self.writer.load(tensor.name, indices, LOADED.get(tensor.dtype, FLOAT))


# ---- operators that become several nodes
#
# Operators that become several nodes of an expression.


_POWERS = 8  # The largest exponent, in whole numbers; halves too.

Composed = Callable[[TracedValues, str, Sequence[Any]], int]


def _power(values: TracedValues, kind: str, args: Sequence[Any]) -> int:
    """x ** n for a constant n, or c ** x for a constant c > 0."""
    writer, (base, exponent) = values.writer, args[:2]
    if not hasattr(exponent, "op"):
        x, (whole, half) = values.number_of(base, kind), divmod(abs(exponent), 1)
        if half not in (0, 0.5) or whole > _POWERS or ((half or exponent < 0) and kind != FLOAT):
            raise NoExpression(f"the power {exponent}")
        factors = [x] * int(whole) + ([writer.write("sqrt", [x], kind)] if half else [])
        result = factors[0] if factors else writer.constant(1, kind)
        for factor in factors[1:]:
            result = writer.write("mul", [result, factor], kind)
        return result if exponent >= 0 else writer.write("div", [writer.constant(1, kind), result], kind)
    if hasattr(base, "op") or base <= 0 or kind != FLOAT:
        raise NoExpression(f"a power of {base if not hasattr(base, 'op') else 'one tensor by another'}")
    by = writer.constant(log2(base), FLOAT)
    return writer.write("exp2", [writer.write("mul", [values.number_of(exponent, FLOAT), by], FLOAT)], FLOAT)


def _clamp(values: TracedValues, kind: str, args: Sequence[Any]) -> int:
    low, high = args[1] if len(args) > 1 else None, args[2] if len(args) > 2 else None
    x = values.number_of(args[0], kind)
    if low is not None:
        x = values.writer.write("maximum", [x, values.number_of(low, kind)], kind)
    if high is not None:
        x = values.writer.write("minimum", [x, values.number_of(high, kind)], kind)
    return x


def _sign(values: TracedValues, kind: str, args: Sequence[Any]) -> int:
    writer, x = values.writer, values.number_of(args[0], kind)
    zero, one = writer.constant(0, kind), writer.constant(1, kind)
    below = writer.write("where", [writer.write("lt", [x, zero], BOOL), writer.constant(-1, kind), zero], kind)
    return writer.write("where", [writer.write("gt", [x, zero], BOOL), one, below], kind)


def _scaled(first: str | None, factor: float, last: str | None, shift: float = 0.0, before: float = 0.0) -> Composed:
    """last(first(x + before) * factor) + shift."""

    def written(values: TracedValues, kind: str, args: Sequence[Any]) -> int:
        writer, x = values.writer, values.number_of(args[0], kind)
        if before:
            x = writer.write("add", [x, writer.constant(before, kind)], kind)
        x = x if first is None else writer.write(first, [x], kind)
        x = x if factor == 1 else writer.write("mul", [x, writer.constant(factor, kind)], kind)
        x = x if last is None else writer.write(last, [x], kind)
        return writer.write("add", [x, writer.constant(shift, kind)], kind) if shift else x

    return written


def _reversed_sub(values: TracedValues, kind: str, args: Sequence[Any]) -> int:
    return values.writer.write("sub", [values.number_of(x, kind) for x in reversed(args[:2])], kind)


def _reciprocal(values: TracedValues, kind: str, args: Sequence[Any]) -> int:
    one = values.writer.constant(1, kind)
    return values.writer.write("div", [one, values.number_of(args[0], kind)], kind)


def _relu(values: TracedValues, kind: str, args: Sequence[Any]) -> int:
    zero = values.writer.constant(0, kind)
    return values.writer.write("maximum", [values.number_of(args[0], kind), zero], kind)


def _masked_fill(values: TracedValues, kind: str, args: Sequence[Any]) -> int:
    inputs = [values.truth(args[1]), values.number_of(args[2], kind), values.number_of(args[0], kind)]
    return values.writer.write("where", inputs, kind)


COMPOSED: dict[str, Composed] = {
    "pow": _power,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda values, kind, args: _clamp(values, kind, (args[0], None, args[1])),
    "sign": _sign,
    "sgn": _sign,
    "rsub": _reversed_sub,
    "reciprocal": _reciprocal,
    "relu": _relu,
    "masked_fill": _masked_fill,
    "log10": _scaled("log", 0.4342944819032518, None),
    "log1p": _scaled("log", 1.0, None, before=1.0),
    "expm1": _scaled("exp", 1.0, None, shift=-1.0),
}


# ---- one operator


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
