"""What PyTorch's operators mean for one element: each becomes nodes of an expression, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from cp_fast.backends.fa4.scores.expressions import BOOL, FLOAT, INT, LONG, Writer
from cp_ref.spec import Unsupported

__all__ = ["DOCUMENTED", "Translation"]

DOCUMENTED = (
    "+ - * / // % and unary -, comparisons, logical and, or and not (also & | ~ of booleans), where, masked_fill, abs, "
    "sign, minimum, maximum, clamp, relu, exp, exp2, expm1, log, log2, log1p, sqrt, rsqrt, sin, cos, tanh, sigmoid, "
    "softplus, square, powers with a constant, conversions between float32, int32, int64 and bool, and elements of "
    "captured tensors by integer indices"
)

_KINDS = {torch.float32: FLOAT, torch.int32: INT, torch.int64: LONG, torch.bool: BOOL}
_LOADED = _KINDS | {  # A captured tensor's dtype -> the kind of its elements.
    torch.float16: FLOAT,
    torch.bfloat16: FLOAT,
    torch.int8: INT,
    torch.uint8: INT,
    torch.int16: INT,
}

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
_UNCHANGED = {"clone", "detach", "alias", "lift_fresh_copy", "lift_fresh", "view_of"}
_EXACT = {"neg", "abs", "minimum", "maximum", "where", "masked_fill", "relu", "_to_copy"} | _UNCHANGED  # In any dtype.
_CONSTANTS = {"scalar_tensor": 0, "full": 1, "full_like": 1, "new_full": 2}
_ZEROS_ONES = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_POWERS = 8  # The largest exponent, in whole numbers; halves too.


class _Captured:
    """A captured tensor, some of whose first dimensions have constant indices."""

    def __init__(self, name: str, sizes: Sequence[int], indices: Sequence[int | None]) -> None:
        self.name, self.sizes, self.indices = name, list(sizes), list(indices)


class Translation:
    """From the nodes of a traced module to those of an expression."""

    def __init__(self, module: GraphModule, name: str) -> None:
        self.writer = Writer()
        self.values: dict[Node, int | _Captured] = {}
        self._module, self._name = module, name

    def give_leaf(self, node: Node, leaf: str) -> None:
        """This input is a leaf."""
        self.values[node] = self.writer.leaf(leaf)

    def give_tensor(self, node: Node, name: str) -> None:
        """This input is a captured tensor."""
        shape = node.meta["val"].shape
        self.values[node] = _Captured(name, shape, [None] * len(shape))

    def translate(self, node: Node) -> None:
        """Translate a node whose inputs are translated."""
        if node.op == "get_attr":
            self.values[node] = self._constant_tensor(node)
            return
        target: Any = node.target
        name = str(getattr(target, "overloadpacket", target)).removeprefix("aten.")
        if name == "select" and isinstance(chosen := self.values.get(node.args[0]), _Captured):  # type: ignore[arg-type]
            self.values[node] = self._selected(chosen, *cast(Any, node.args[1:]))
        elif name == "index":
            self.values[node] = self._index(node)
        else:
            self.values[node] = self._element(name, node)

    def number_of(self, x: Any, kind: str | None = None) -> int:
        """The number of an argument's value: of a node, or of a number. In `kind`, where it is given."""
        if isinstance(x, Node):
            value = self.values[x]
            number = self._whole(value) if isinstance(value, _Captured) else value
        else:
            number = self.writer.constant(
                x, kind or (BOOL if isinstance(x, bool) else INT if isinstance(x, int) else FLOAT)
            )
        return number if kind is None else self.writer.convert(number, kind)

    def _element(self, name: str, node: Node) -> int:
        """The number of an element-wise operator's result."""
        args, kwargs = node.args, node.kwargs
        if name in _UNCHANGED:
            return self.number_of(args[0])
        if name in _CONSTANTS and isinstance(args[_CONSTANTS[name]], int | float | bool):
            value: Any = args[_CONSTANTS[name]]
            return self.writer.constant(value, self._kind(node))
        if name in _ZEROS_ONES:
            return self.writer.constant(_ZEROS_ONES[name], self._kind(node))
        kind = self._kind(node)
        if name in ("_to_copy", "expand", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"):
            if name != "_to_copy" and not self._is_constant(args[0]) and not _same_shape(node):
                self._refuse(f"{node.target}, which moves elements")
            return self.number_of(args[0], kind)
        if name in _COMPARISONS:
            common = self._common(args[:2])
            return self.writer.write(name, [self.number_of(x, common) for x in args[:2]], BOOL)
        if name in _LOGICAL:
            return self.writer.write(_LOGICAL[name], [self._truth(x) for x in args], BOOL)
        if name == "where" and len(args) == 3:
            return self.writer.write(
                "where", [self._truth(args[0]), *(self.number_of(x, kind) for x in args[1:])], kind
            )
        if name == "div" and (mode := kwargs.get("rounding_mode")) is not None:
            if mode != "floor":
                self._refuse(f"division with rounding_mode={mode!r}")
            return self.writer.write("floor_div", [self.number_of(x, kind) for x in args[:2]], kind)
        if name in _SAME and (kind != BOOL or name.startswith("bitwise")):
            inputs = [self.number_of(x, kind) for x in args[:2]]
            if (alpha := kwargs.get("alpha", 1)) != 1:
                inputs[1] = self.writer.write("mul", [inputs[1], self.number_of(alpha, kind)], kind)
            return self.writer.write(_SAME[name], inputs, kind)
        if name not in _COMPOSED:
            self._refuse(str(node.target))
        return _COMPOSED[name](self, kind, args)

    def _constant_tensor(self, node: Node) -> int:
        """A number that the function made a tensor of."""
        value: Any = getattr(self._module, str(node.target))
        value = getattr(value, "constant", None) if getattr(value, "constant", None) is not None else value
        if value.numel() != 1 or isinstance(value, FakeTensor):
            self._refuse("a tensor that it makes itself; give it as one of aux_tensors")
        number = value.item()
        return self.writer.constant(number, _KINDS.get(value.dtype, FLOAT if value.is_floating_point() else LONG))

    def _selected(self, chosen: _Captured, dim: int, index: int) -> _Captured:
        """A captured tensor with one dimension fixed."""
        free = [n for n, one in enumerate(chosen.indices) if one is None]
        place = free[dim]
        index = index + chosen.sizes[place] if index < 0 else index
        indices = list(chosen.indices)
        indices[place] = self.writer.constant(index, INT)
        return _Captured(chosen.name, chosen.sizes, indices)

    def _index(self, node: Node) -> int:
        """An element of a captured tensor."""
        tensor: Any = self.values.get(node.args[0]) if isinstance(node.args[0], Node) else None  # type: ignore[index]
        if not isinstance(tensor, _Captured):
            self._refuse("an index into a tensor that is not one of aux_tensors")
        given: Any = node.args[1]
        free = [n for n, one in enumerate(tensor.indices) if one is None]
        if len(given) != len(free) or any(one is None for one in given):
            self._refuse(f"fewer indices than dimensions: aux_tensors[{tensor.name!r}] needs {len(tensor.sizes)}")
        indices: list[Any] = list(tensor.indices)
        for place, one in zip(free, given, strict=True):
            number = self.number_of(one)
            kind = self.writer.nodes[number].kind
            if kind not in (INT, LONG):
                self._refuse(f"an index of kind {kind} into aux_tensors[{tensor.name!r}]")
            indices[place] = number
        return self._load(tensor.name, indices, node)

    def _whole(self, tensor: _Captured) -> int:
        """A captured tensor of one element, without an index."""
        if any(size != 1 for size, index in zip(tensor.sizes, tensor.indices, strict=True) if index is None):
            self._refuse(f"aux_tensors[{tensor.name!r}] without an index")
        zero = self.writer.constant(0, INT)
        return self._load(tensor.name, [zero if one is None else one for one in tensor.indices], None)

    def _load(self, name: str, indices: Sequence[int], node: Node | None) -> int:
        dtype = self._dtypes()[name]
        if dtype not in _LOADED and not (dtype == torch.float64 and node is None):
            self._refuse(f"aux_tensors[{name!r}] of {dtype}")
        return self.writer.load(name, indices or [self.writer.constant(0, INT)], _LOADED.get(dtype, FLOAT))

    def _dtypes(self) -> dict[str, torch.dtype]:
        return {x.name: node.meta["val"].dtype for node, x in self.values.items() if isinstance(x, _Captured)}

    def _kind(self, node: Node) -> str:
        """The kind of an operator's result."""
        dtype, name = node.meta["val"].dtype, str(getattr(node.target, "overloadpacket", "")).removeprefix("aten.")
        if name in _EXACT and dtype in (torch.float16, torch.bfloat16) and not _rounds(name, node):
            return FLOAT
        if dtype not in _KINDS:
            self._refuse(f"{node.target} in {dtype}")
        return _KINDS[dtype]

    def _common(self, args: Sequence[Any]) -> str:
        """The kind in which arguments are compared."""
        tensors = [x.meta["val"] if isinstance(x, Node) else x for x in args]
        dtype = torch.result_type(*tensors)
        if dtype == torch.bool:
            return INT
        return LONG if dtype == torch.int64 else FLOAT if dtype.is_floating_point else INT

    def _truth(self, x: Any) -> int:
        number = self.number_of(x)
        kind = self.writer.nodes[number].kind
        return number if kind == BOOL else self.writer.write("ne", [number, self.writer.constant(0, kind)], BOOL)

    def _is_constant(self, x: Any) -> bool:
        return self.writer.nodes[self.number_of(x)].op == "constant"

    def _refuse(self, what: str) -> Any:
        raise Unsupported(
            f"{self._name} on backend 'fa4', which compiles it,",
            {},
            f"it has {what}; it may have {DOCUMENTED}. backend='torch' runs any function",
        )


def _same_shape(node: Node) -> bool:
    source: Any = node.args[0]
    return source.meta["val"].shape == node.meta["val"].shape


def _rounds(name: str, node: Node) -> bool:
    """Whether a conversion to a half dtype changes values."""
    source: Any = node.args[0]
    return name == "_to_copy" and source.meta["val"].dtype != node.meta["val"].dtype


Composed = Callable[[Translation, str, Sequence[Any]], int]


def _power(translation: Translation, kind: str, args: Sequence[Any]) -> int:
    """x ** n for a constant n, or c ** x for a constant c > 0."""
    writer, (base, exponent) = translation.writer, args[:2]
    if not hasattr(exponent, "op"):
        x, (whole, half) = translation.number_of(base, kind), divmod(abs(exponent), 1)
        if half not in (0, 0.5) or whole > _POWERS or ((half or exponent < 0) and kind != FLOAT):
            translation._refuse(f"the power {exponent}")
        factors = [x] * int(whole) + ([writer.write("sqrt", [x], kind)] if half else [])
        result = factors[0] if factors else writer.constant(1, kind)
        for factor in factors[1:]:
            result = writer.write("mul", [result, factor], kind)
        return result if exponent >= 0 else writer.write("div", [writer.constant(1, kind), result], kind)
    if hasattr(base, "op") or base <= 0 or kind != FLOAT:
        translation._refuse(f"a power of {base if not hasattr(base, 'op') else 'one tensor by another'}")
    by = writer.constant(log2(base), FLOAT)
    return writer.write("exp2", [writer.write("mul", [translation.number_of(exponent, FLOAT), by], FLOAT)], FLOAT)


def _clamp(translation: Translation, kind: str, args: Sequence[Any]) -> int:
    low, high = args[1] if len(args) > 1 else None, args[2] if len(args) > 2 else None
    x = translation.number_of(args[0], kind)
    if low is not None:
        x = translation.writer.write("maximum", [x, translation.number_of(low, kind)], kind)
    if high is not None:
        x = translation.writer.write("minimum", [x, translation.number_of(high, kind)], kind)
    return x


def _sign(translation: Translation, kind: str, args: Sequence[Any]) -> int:
    writer, x = translation.writer, translation.number_of(args[0], kind)
    zero, one = writer.constant(0, kind), writer.constant(1, kind)
    below = writer.write("where", [writer.write("lt", [x, zero], BOOL), writer.constant(-1, kind), zero], kind)
    return writer.write("where", [writer.write("gt", [x, zero], BOOL), one, below], kind)


def _scaled(first: str | None, factor: float, last: str | None, shift: float = 0.0, before: float = 0.0) -> Composed:
    """last(first(x + before) * factor) + shift."""

    def written(translation: Translation, kind: str, args: Sequence[Any]) -> int:
        writer, x = translation.writer, translation.number_of(args[0], kind)
        if before:
            x = writer.write("add", [x, writer.constant(before, kind)], kind)
        x = x if first is None else writer.write(first, [x], kind)
        x = x if factor == 1 else writer.write("mul", [x, writer.constant(factor, kind)], kind)
        x = x if last is None else writer.write(last, [x], kind)
        return writer.write("add", [x, writer.constant(shift, kind)], kind) if shift else x

    return written


def _reversed_sub(translation: Translation, kind: str, args: Sequence[Any]) -> int:
    return translation.writer.write("sub", [translation.number_of(x, kind) for x in reversed(args[:2])], kind)


def _reciprocal(translation: Translation, kind: str, args: Sequence[Any]) -> int:
    one = translation.writer.constant(1, kind)
    return translation.writer.write("div", [one, translation.number_of(args[0], kind)], kind)


def _relu(translation: Translation, kind: str, args: Sequence[Any]) -> int:
    zero = translation.writer.constant(0, kind)
    return translation.writer.write("maximum", [translation.number_of(args[0], kind), zero], kind)


def _masked_fill(translation: Translation, kind: str, args: Sequence[Any]) -> int:
    inputs = [translation._truth(args[1]), translation.number_of(args[2], kind), translation.number_of(args[0], kind)]
    return translation.writer.write("where", inputs, kind)


_COMPOSED: dict[str, Composed] = {
    "pow": _power,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda translation, kind, args: _clamp(translation, kind, (args[0], None, args[1])),
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
