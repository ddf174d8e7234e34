"""The values of a traced function so far: leaves, numbers, results of operators, and captured tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from cp_fast.backends.fa4.scores.expressions import BOOL, FLOAT, INT, LONG, NoExpression, Writer
from cp_fast.backends.fa4.scores.tracing.operator_kinds import LOADED, kind_of_number

__all__ = ["Captured", "TracedValues"]


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
