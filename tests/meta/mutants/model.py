"""A mutant: an implementation with one bug planted, which a row of a table describes.

A row of `cp_ref.mutants` or `cp_fast.mutants`; rows are separated by empty lines, and lines that begin with # are
comments:

    window-off-by-one (probes): the window shows one key more
    cp_ref.reference.executor.tile_attention.visible_pairs
    - (lo <= j - i)
    + (lo - 1 <= j - i)

The first line has the name, the tier that has to see it within the quick profile, and what is wrong. Behind the tier
may stand an entry of its table, or the function of its level that has to see it; without it any entry may, and below
the level "schedule" the function with the target's own name. Then come the functions that are changed, by dotted names
(several on one line are changed alike), each with what happens to its source:

    - +   the text behind -, which occurs once, becomes that behind +
    +     without a - before it: statements at the beginning of the function
    >     statements at its end, in which `result` is what it returns

Several lines of one kind are lines of one text. All this may use the names of the function's module, and those of
`tests.meta.mutants.functions`: there stands what takes more than a few lines. The changed function is compiled, and the
function that is there gets its code, so that it does not matter where it has been imported to.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Literal, NamedTuple, cast

from conformance.implementation import Implementation, load
from conformance.record import Level
from conformance.runner.tiers import TIERS
from cp_fast.movers.select_movers import use
from tests.meta.mutants import functions

__all__ = ["Mutant", "loaded", "read_mutants"]

Package = Literal["cp_ref", "cp_fast"]


class Edit(NamedTuple):
    """Changes of one function: texts that become others, statements at its beginning and at its end."""

    target: str
    texts: tuple[tuple[str, str], ...]
    first: str
    last: str


@dataclass(frozen=True)
class Mutant:
    """One row; see the module's text."""

    name: str
    package: Package
    tier: str
    where: str
    text: str
    edits: tuple[Edit, ...]

    @property
    def level(self) -> Level:
        """The level of its tier."""
        return TIERS[self.tier].level

    @property
    def function(self) -> str:
        """The function of the tier's level that has to see it: `where`, or the target's own name."""
        return self.where or self.edits[0].target.rsplit(".", 1)[1]

    def check(self) -> None:
        """Raise AssertionError where a function has not what the row changes."""
        for edit in self.edits:
            function = _function(edit.target)
            assert _compiled(edit, function).co_freevars == function.__code__.co_freevars, edit.target

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Inside, the package is wrong, for every thread. `cp_fast` computes with PyTorch's operators, which mutants
        of its kernels are of.
        """
        with ExitStack() as stack:
            if self.package == "cp_fast":
                stack.enter_context(use("torch"))
            for edit in self.edits:
                stack.enter_context(_changed(edit))
            yield


def loaded(package: Package) -> Implementation:
    """The implementation that mutants of a package are planted in."""
    return load("conformance.adapters.cp_fast:cpu" if package == "cp_fast" else package)


def read_mutants(package: Package, text: str = "") -> dict[str, Mutant]:
    """The mutants of a package by name: those of its table, or of the given text."""
    lines = (text or Path(__file__).with_name(f"{package}.mutants").read_text()).splitlines()
    rows = [list(row) for full, row in groupby((x for x in lines if not x.startswith("#")), key=bool) if full]
    found: dict[str, Mutant] = {}
    for head, *edits in rows:
        name, _, rest = head.partition(" (")
        tier, _, what = rest.partition("): ")
        tier, _, where = tier.partition(" ")
        assert what, head
        assert name not in found, name
        found[name] = Mutant(name, package, tier, where, what, tuple(_edits(edits)))
    return found


def _edits(lines: list[str]) -> Iterator[Edit]:
    targets: list[str] = []
    texts: list[tuple[str, str]] = []
    first = last = ""
    for sign, some in groupby([*lines, "."], key=lambda line: line[0] if line[0] in "-+>" else ""):
        text = "\n".join(line[2 if sign else 0 :] for line in some)
        if sign == "-":
            texts.append((text, ""))
        elif sign == "+" and texts and not texts[-1][1]:
            texts[-1] = texts[-1][0], text
        elif sign == "+":
            first = text
        elif sign == ">":
            last = text
        else:
            yield from (Edit(target, tuple(texts), first, last) for target in targets)
            targets, texts, first, last = text.split(), [], "", ""


def _function(target: str) -> FunctionType:
    """The function behind a dotted name: what decorators and properties keep."""
    owner, _, name = target.rpartition(".")
    found: Any = inspect.getattr_static(pkgutil.resolve_name(owner), name)
    while not isinstance(found, FunctionType) or hasattr(found, "__wrapped__"):
        found = next(getattr(found, x) for x in ("__wrapped__", "__func__", "fget", "func") if hasattr(found, x))
    return found


def _compiled(edit: Edit, function: FunctionType) -> CodeType:
    """The function's code with the changes."""
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in edit.texts:
        begin = re.search(f"^( *).*{re.escape(old.splitlines()[0])}", source, re.MULTILINE)
        assert begin, f"{edit.target} has no {old!r}"
        old, new = (text.replace("\n", "\n" + begin[1]) for text in (old, new))
        assert source.count(old) == 1, f"{edit.target} has {old!r} {source.count(old)} times"
        source = source.replace(old, new)
    free = function.__code__.co_freevars  # such as the class, for super()
    tree = ast.parse(f"def outer({', '.join(free)}):\n{textwrap.indent(source, ' ')}")
    [made] = cast(Any, tree.body[0]).body
    made.name, made.decorator_list = "mutated", []  # a method may call a function that has its name
    documented = ast.get_docstring(made) is not None
    if edit.last:
        body = [*made.body, *ast.parse("return None").body]
        made.body = [one for line in body for one in _listed(_Returns(edit.last).visit(line))]
    made.body[documented:documented] = ast.parse(edit.first).body
    code = compile(ast.fix_missing_locations(tree), function.__code__.co_filename, "exec")
    for name in ("outer", made.name):
        [code] = [x for x in code.co_consts if isinstance(x, CodeType) and x.co_name == name]
    return code.replace(co_name=function.__name__)


class _Returns(ast.NodeTransformer):
    """Before each return of a function `result` is what it returns, and the last statements run."""

    def __init__(self, last: str) -> None:
        self.last = last

    def visit_Return(self, node: ast.Return) -> Any:
        value = "None" if node.value is None else ast.unparse(node.value)
        return ast.parse(f"result = {value}\n{self.last}\nreturn result").body

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:  # one inside it
        return node


def _listed(x: Any) -> list[Any]:
    return x if isinstance(x, list) else [x]


@contextmanager
def _changed(edit: Edit) -> Iterator[None]:
    function = _function(edit.target)
    right, known = function.__code__, function.__globals__
    added = {name: x for name, x in vars(functions).items() if name not in known}
    function.__code__ = _compiled(edit, function)
    known.update(added)
    try:
        yield
    finally:
        function.__code__ = right
        for name in added:
            del known[name]
