"""Expressions of one score and of the places of its pair: data that a tracer writes and any interpreter reads.

An expression is a list of nodes. Each node has an operation, and inputs that stand before it. Its level says what it
varies with: nothing in a tile, its rows, its columns, or both. So an interpreter computes what one row shares once.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

__all__ = [
    "BOOL", "COLUMN", "FLOAT", "INT", "LEAVES", "LONG", "PAIR", "ROW", "TILE", "Expression", "NoExpression", "Node",
    "Writer",
]  # fmt: skip

FLOAT, INT, LONG, BOOL = "float", "int", "long", "bool"  # float32, int32, int64, bool
TILE, ROW, COLUMN, PAIR = 0, 1, 2, 3

LEAVES = {  # Name -> kind and level.
    "score": (FLOAT, PAIR),
    "grad": (FLOAT, PAIR),
    "b": (INT, ROW),
    "h": (INT, ROW),  # Heads share a tile's rows where the library packs them.
    "q_idx": (INT, ROW),
    "kv_idx": (INT, COLUMN),
    "diagonal": (INT, ROW),
}


class NoExpression(Exception):
    """A function has something that no expression has; the text says what."""


class Node(NamedTuple):
    """One operation.

    `leaf` (value: its name), `constant` (value: a number), `load` (value: the name of a captured tensor; inputs: one
    index for each dimension), `convert` (to `kind`), and the operations of `trace_scores`.
    """

    op: str
    inputs: tuple[int, ...]
    value: Any
    kind: str


class Expression(NamedTuple):
    """Nodes, and the number of the one that is the result.

    >>> writer = Writer()
    >>> score, slope = writer.leaf("score"), writer.constant(0.5, FLOAT)
    >>> half = writer.expression(writer.write("mul", (score, slope), FLOAT))
    >>> [(node.op, node.inputs, node.value) for node in half.nodes]
    [('leaf', (), 'score'), ('constant', (), 0.5), ('mul', (0, 1), None)]
    """

    nodes: tuple[Node, ...]
    result: int

    @property
    def levels(self) -> tuple[int, ...]:
        """The places with which each node varies."""
        levels = list[int]()
        for node in self.nodes:
            level = LEAVES[node.value][1] if node.op == "leaf" else TILE
            for number in node.inputs:
                level |= levels[number]
            levels.append(level)
        return tuple(levels)

    @property
    def captured(self) -> tuple[str, ...]:
        """The names of the captured tensors that it loads from."""
        return tuple(dict.fromkeys(node.value for node in self.nodes if node.op == "load"))

    @property
    def digest(self) -> str:
        """Equal where the expressions are."""
        return blake2b(repr(self).encode(), digest_size=16).hexdigest()

    @property
    def is_leaf(self) -> bool:
        """Whether the result is what came in."""
        return self.nodes[self.result].op == "leaf"


class Writer:
    """Writes an expression node by node; equal nodes are one."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[tuple[Any, ...], int] = {}

    def leaf(self, name: str) -> int:
        """The number of a leaf."""
        return self._add(Node("leaf", (), name, LEAVES[name][0]))

    def constant(self, value: float, kind: str) -> int:
        """The number of a constant."""
        as_kind = {FLOAT: float, INT: int, LONG: int, BOOL: bool}[kind]
        return self._add(Node("constant", (), as_kind(value), kind))

    def load(self, name: str, indices: Sequence[int], kind: str) -> int:
        """The number of an element of a captured tensor."""
        return self._add(Node("load", tuple(indices), name, kind))

    def write(self, op: str, inputs: Sequence[int], kind: str) -> int:
        """The number of an operation's result."""
        return self._add(Node(op, tuple(inputs), None, kind))

    def convert(self, number: int, kind: str) -> int:
        """The number of a value in another kind; constants are converted here."""
        node = self.nodes[number]
        if node.kind == kind:
            return number
        if node.op == "constant":
            return self.constant(node.value, kind)
        return self.write("convert", (number,), kind)

    def expression(self, result: int) -> Expression:
        """The expression of a node, without the nodes that it does not need."""
        needed = {result}
        for number in range(result, -1, -1):
            if number in needed:
                needed.update(self.nodes[number].inputs)
        places = {old: new for new, old in enumerate(sorted(needed))}
        nodes = [self.nodes[old] for old in sorted(needed)]
        return Expression(
            tuple(one._replace(inputs=tuple(places[n] for n in one.inputs)) for one in nodes), places[result]
        )

    def _add(self, node: Node) -> int:
        key = (node.op, node.inputs, repr(node.value), node.kind)  # 0.0 and -0.0, 1 and True are different.
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(node)
        return self._known[key]
