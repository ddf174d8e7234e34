"""Predicates over cases: a small language for the ledger of known failures. Python's syntax, without Python's powers.

    qkv_format == "thd" and cp_comm_type == "all_gather" and window_size[1] > 0
    causal and len_q != len_kv and not bottom_right
    max(len_q) > 1024 or 0 in len_kv
    text == "error lengths-decrease"

Grammar, loosest first; there is nothing else, and no way to call or look up anything else:

    or, and, not
    == != < <= > >= in, not in        chains like 1 < cp_size <= 4 too
    + - * // %                        of numbers
    x[n]                              n an integer, from the end when negative
    max(x) min(x) sum(x) len(x)       of a tuple; max and min of an empty one are 0
    names, numbers, "texts", True, False, None, (tuples), [lists]

Names are the fields of `Case` and of its `Problem`; the problem's `causal`, `bottom_right`, `group_size` and `pairs`;
`len_q`, `len_kv`, `slots_q` and `slots_kv`, each a tuple with one number for each sequence; and `text`, what `--repro`
takes. A problem that is no case has `text` alone: a predicate with any other name does not hold for it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from conformance.case import Case
from cp_ref.spec import Problem, Sequence

__all__ = ["NAMES", "Predicate", "PredicateError"]

_LENGTHS = tuple(f.name for f in fields(Sequence))
_CASE = tuple(f.name for f in fields(Case) if f.name != "problem")
_PROBLEM = (
    *(f.name for f in fields(Problem) if f.name != "sequences"),
    "causal",
    "bottom_right",
    "group_size",
    "pairs",
)
NAMES = ("text", *_PROBLEM, *_LENGTHS, *_CASE)

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda x, many: x in many,
    ast.NotIn: lambda x, many: x not in many,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CALLS: dict[str, Callable[[Any], Any]] = {
    "max": lambda many: max(many, default=0),
    "min": lambda many: min(many, default=0),
    "sum": sum,
    "len": len,
}


class PredicateError(ValueError):
    """The predicate is not in the language, or makes no sense for a case."""


@dataclass(frozen=True)
class Predicate:
    """A parsed predicate: its text, and its syntax tree, of which every node has been checked."""

    text: str
    tree: ast.expr

    @staticmethod
    def parse(text: str) -> Predicate:
        """Check the text, and try it on a plain case.

        Raises:
            PredicateError: it says what is not understood.
        """
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise PredicateError(f"cannot be read: {error}") from error
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if id(node) not in called:
                _check(node)
        predicate = Predicate(text, tree)
        predicate.holds(str(_PLAIN))
        return predicate

    @property
    def names(self) -> set[str]:
        """The names that it reads."""
        called = {id(node.func) for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        return {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and id(n) not in called}

    def holds(self, text: str, case: str | None = None) -> bool:
        """Whether it is true of a problem: `text` is what `--repro` takes, `case` the "Case(...)" behind a name.

        >>> Predicate.parse("max(len_q) % 2").holds("Case(Problem(cp_size=2, sequences=[(7, 7, 7, 7)]))")
        True

        Raises:
            PredicateError: it compares a number with a text, say.
        """
        values = {"text": text, **_values(case or text)}
        if not self.names <= values.keys():
            return False
        try:
            result = _value(self.tree, values)
        except (TypeError, ValueError, IndexError, ArithmeticError, RecursionError) as error:
            raise PredicateError(f"cannot be judged for {text}: {error}") from error
        return bool(result)


_PLAIN = Case(Problem(2, (Sequence(8, 8, 8, 8), Sequence(8, 8, 8, 8))))


@lru_cache(maxsize=64)  # of one problem for many entries
def _values(text: str) -> dict[str, Any]:
    if not text.startswith("Case("):
        return {}
    case = Case.parse(text)
    p = case.problem
    values = {name: getattr(case, name) for name in _CASE} | {name: getattr(p, name) for name in _PROBLEM}
    return values | {name: tuple(getattr(s, name) for s in p.sequences) for name in _LENGTHS}


_PLAIN_NODES = (ast.BoolOp, ast.UnaryOp, ast.Compare, ast.BinOp, ast.Tuple, ast.List, ast.expr_context, ast.boolop)
_UNARY = (ast.Not, ast.USub)


def _check(node: ast.AST) -> None:
    """Raise unless the node is in the grammar. Names and calls are checked here, so that a typo is found at once."""
    match node:
        case ast.Constant(value=value):
            understood = value is None or isinstance(value, (str, int, float))
        case ast.Name(id=name):
            understood = name in NAMES
            if not understood:
                raise PredicateError(f"{name!r} is no name of a case; there are {', '.join(NAMES)}")
        case ast.Call(func=ast.Name(id=name), args=[_], keywords=[]):  # of a name, which is looked up here
            understood = name in _CALLS
        case ast.Subscript(slice=index):
            index = index.operand if isinstance(index, ast.UnaryOp) else index
            understood = isinstance(index, ast.Constant) and type(index.value) is int
        case _:
            allowed = (*_PLAIN_NODES, *_UNARY, *_COMPARE, *_ARITHMETIC)
            understood = isinstance(node, allowed)
    if not understood:
        raise PredicateError(f"{_words(node)} is not in the language of predicates")


def _words(node: ast.AST) -> str:
    return repr(ast.unparse(node)) if isinstance(node, ast.expr) else type(node).__name__


def _value(node: ast.expr, values: dict[str, Any]) -> Any:
    """The value of a checked tree."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return values[name]
        case ast.Tuple(elts=many) | ast.List(elts=many):
            return tuple(_value(one, values) for one in many)
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_value(part, values) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_value(part, values) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, values)
        case ast.UnaryOp(operand=operand):
            return -_number(_value(operand, values))
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_number(_value(left, values)), _number(_value(right, values)))
        case ast.Compare(left=left, ops=ops, comparators=others):
            operands = [_value(one, values) for one in (left, *others)]
            return all(_COMPARE[type(op)](*operands[n : n + 2]) for n, op in enumerate(ops))
        case ast.Subscript(value=value, slice=index):
            return _value(value, values)[_value(index, values)]
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            return _CALLS[name](_value(argument, values))
    raise AssertionError(f"{ast.dump(node)} was not checked")


def _number(value: Any) -> Any:
    """Arithmetic is for numbers: no text is repeated, formatted or joined."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return value
