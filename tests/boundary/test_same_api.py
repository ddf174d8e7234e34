"""cp_ref and cp_fast have the same public names and signatures, so that a user debugs by swapping the import.

The page docs/api.md has each of these names.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name
from types import CellType, FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

import conformance
import cp_fast
import cp_ref
from conformance import step
from conformance.case import Case
from conformance.implementation import Context
from conformance.step.compare_step import compare_step
from cp_fast import integrations
from cp_fast.kernels.attention.choose_backend import BACKENDS
from cp_fast.tools.cli import app as fast_app
from cp_fast.tools.cli.demo import Job
from cp_fast.tools.cost.predict import candidates
from cp_ref.cli import app as ref_app
from cp_ref.groups.context import ContextParallel
from cp_ref.groups.group import PaperGroup
from cp_ref.schedules.problem import Problem, Sequence
from tests.marks import HANGS_S

ROOT = Path(__file__).parents[2]
ONLY_FAST = {"checked"}
TO_DEBUG = {"SimGroup", "Trace", "compare", "dense_attention"}  # of cp_ref, in both


def test_names() -> None:
    assert set(cp_ref.__all__) == set(cp_fast.__all__) - ONLY_FAST
    assert all(getattr(cp_fast, name) is getattr(cp_ref, name) for name in TO_DEBUG)
    assert set(cp_fast.__all__) <= set(dir(cp_fast))


def test_the_version_is_that_of_the_installed_package() -> None:
    """pyproject.toml has it, and nothing else but CITATION.cff."""
    assert cp_ref.__version__ == cp_fast.__version__ == metadata.version("cp-attention")


def test_a_trace_of_the_fast_path_is_refused_and_not_empty() -> None:
    """A trace records the reference: nobody may take an empty one for a run."""

    def one(member: Any) -> None:
        x = torch.ones(1, 4, 1, 8)
        cp_fast.attention(x, x, x, cp=cp_fast.ContextParallel(member))

    with pytest.raises(RuntimeError, match=r"recorded nothing.*import cp_ref as cp"), cp_fast.trace():
        cp_fast.SimGroup(2).run(one)


SHARED = {"compare_layouts", "position_ids", "roll", "shard", "unshard", "thd.pad_v", "thd.trim_out"}
FUNCTIONS = {name for name in cp_fast.__all__ if inspect.isfunction(getattr(cp_fast, name))} - ONLY_FAST - TO_DEBUG
TWICE = sorted((FUNCTIONS | {f"thd.{name}" for name in cp_fast.thd.__all__} | {"Plan.update"}) - SHARED - {"trace"})


def test_the_other_functions_are_one_object() -> None:
    assert cp_ref.thd.__all__ == cp_fast.thd.__all__
    for name in SHARED:
        assert resolve_name(f"cp_ref:{name}") is resolve_name(f"cp_fast:{name}")


def parameters_of_the_code(function: Any) -> list[tuple[str, Any]]:
    """The parameters that a function's own code has, whatever signature it and its decorators show."""
    code = inspect.unwrap(function).__code__
    plain = FunctionType(code, {}, closure=tuple(CellType() for _ in code.co_freevars))
    return [(p.name, p.kind) for p in inspect.signature(plain).parameters.values()]


@pytest.mark.parametrize("name", TWICE)
def test_both_packages_have_one_signature_and_docstring(name: str) -> None:
    implementations = [resolve_name(f"{package}:{name}") for package in ("cp_ref", "cp_fast")]
    assert implementations[0] is not implementations[1]
    signature = inspect.signature(implementations[0])
    for function in implementations:
        assert inspect.signature(function) == signature
        own = parameters_of_the_code(function)
        parameters = [(p.name, p.kind) for p in signature.parameters.values()]
        left = [p for p in parameters if p not in own]
        assert [p for p in own if p[1] is not inspect.Parameter.VAR_KEYWORD] == [p for p in parameters if p in own]
        assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind in left)
        assert bool(left) <= (own[-1][1] is inspect.Parameter.VAR_KEYWORD)
        assert inspect.getdoc(function) == inspect.getdoc(implementations[0])
        assert inspect.getdoc(function)


@pytest.mark.parametrize("package", [cp_ref, cp_fast])
def test_calls_that_python_itself_would_refuse(package: Any) -> None:
    q = torch.zeros(1, 4, 1, 8)
    arguments = {"seqlen_q": 4, "batch_size": 1, "heads_q": 1, "heads_kv": 1, "d_qk": 8, "d_v": 8}

    def one(member: Any) -> None:
        cp = package.ContextParallel(member)
        with pytest.raises(TypeError, match=r"attention\(\).*'windows'"):
            package.attention(q, q, q, cp=cp, windows=(1, 0))
        with pytest.raises(TypeError, match=r"attention\(\).*'cp'"):
            package.attention(q, q, q)
        for call in (package.make_plan, package.supports):
            with pytest.raises(TypeError, match="'windows'"):
                call(cp=cp, dtype=q.dtype, device="cpu", windows=(1, 0), **arguments)
            with pytest.raises(TypeError, match="'device'"):
                call(cp=cp, dtype=q.dtype, **arguments)

    cp_ref.SimGroup(1).run(one)


def test_contexts_differ_in_the_names_of_backends_alone() -> None:
    one, other = cp_ref.ContextParallel, cp_fast.ContextParallel
    assert inspect.signature(one) == inspect.signature(other) == inspect.signature(ContextParallel)
    assert inspect.getdoc(one) == inspect.getdoc(other) == inspect.getdoc(ContextParallel)
    expected = "(group: 'Any', cp_comm_type: 'CPCommType' = 'p2p', *, layout: 'Layout' = 'dual_chunk', backend: "
    assert str(inspect.signature(other)).startswith(expected)
    assert one.backends == ("auto",)
    assert other.backends == ("auto", *(backend.name for backend in BACKENDS))


def test_one_exception() -> None:
    assert cp_ref.Unsupported is cp_fast.Unsupported
    assert issubclass(cp_fast.Unsupported, NotImplementedError)


def test_plans_have_the_same_attributes() -> None:
    for attribute in ("problem", "schedule", "position_ids", "rank", "device"):
        assert hasattr(cp_ref.Plan, attribute) or attribute in cp_ref.Plan.__annotations__
        assert hasattr(cp_fast.Plan, attribute) or attribute in cp_fast.Plan.__annotations__


_RUNNER = CliRunner(env={"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"})
_SEQUENCES = (Sequence(16, 16, 16, 16),)


def _planned(package: Any, layout: Any) -> str:
    cp = package.ContextParallel(PaperGroup(2), layout=layout)
    sizes = {"batch_size": 1, "seqlen_q": 16, "heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float32}
    plan = package.make_plan(cp=cp, device="cpu", **sizes)
    return f"{cp}\n{plan.problem}\n{plan}"


def _said(app: Any, *options: str) -> str:
    done = _RUNNER.invoke(app, list(options))
    assert done.exit_code == 0, done.output
    return done.output


def _step(layout: Any) -> Any:
    """The layout that `compare_step` gives to its ranks; none is started."""
    to_runs = patch("conformance.step.compare_step.Runs", side_effect=InterruptedError)
    with to_runs as runs, pytest.raises(InterruptedError):
        compare_step(lambda cp: None, None, 1, layout=layout)
    return runs.call_args.args[0].layout


ENTRIES: dict[str, Callable[[Any], object]] = {
    "cp_ref": lambda layout: _planned(cp_ref, layout),
    "cp_fast": lambda layout: _planned(cp_fast, layout),
    "compare_layouts": lambda layout: cp_fast.compare_layouts(
        [16], cp_size=2, heads_q=2, heads_kv=2, layouts=[layout], cp_comm_types=["p2p"]
    ),
    "candidates": lambda layout: candidates(Problem(2, _SEQUENCES), 8, [layout]),
    "Problem": lambda layout: Problem(2, _SEQUENCES, layout=layout).slots,
    "Case": lambda layout: Case.parse(f"Case(Problem(cp_size=2, sequences=[(16, 16, 16, 16)], layout='{layout}'))"),
    "plan": lambda layout: _said(fast_app, "plan", "--layout", layout, "--cp-size", "2", "--seqlen", "16"),
    "plan --predict": lambda layout: _said(fast_app, "plan", "--predict", "--layout", layout, "--cp-size", "2"),
    "explain": lambda layout: _said(ref_app, "explain", "--layout", layout, "--cp-size", "2", "--seqlens", "5"),
    "demo": lambda layout: Job(layout=layout),
    "conformance context": lambda layout: Context(PaperGroup(2), layout=layout),
    "conformance step": lambda layout: _step(layout),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_zigzag_is_dual_chunk(entry: str) -> None:
    said = str(ENTRIES[entry]("zigzag"))
    assert "zigzag" not in said
    assert said == str(ENTRIES[entry]("dual_chunk")) != str(ENTRIES[entry]("contiguous"))


# ---- the page docs/api.md


API = (ROOT / "docs" / "api.md").read_text()


def resolve(name: str) -> Any:
    """What an entry of the API page shows: the object by its dotted name."""
    package, _, rest = name.partition(".")
    return resolve_name(f"{package}:{rest}")


def test_the_api_page_has_every_public_name() -> None:
    shown = {resolve(name) for name in re.findall(r"^::: ([\w.]+)$", API, re.MULTILINE)}
    public = [getattr(package, name) for package in (cp_fast, cp_ref, conformance, step) for name in package.__all__]
    public = [thing for thing in public if callable(thing) or isinstance(thing, ModuleType)]
    both = {name: [getattr(cp_fast, name), getattr(cp_ref, name)] for name in cp_ref.__all__}
    twins = {id(one): pair for pair in both.values() for one in pair}  # one of two with the same docstring is enough
    assert [thing for thing in public if not shown & {*twins.get(id(thing), [thing])}] == []
    modules = {path.stem for path in (ROOT / "cp_fast" / "integrations").glob("*.py")} - {"__init__"}
    assert {*integrations._MODULES} == modules
    listed = re.findall(r"^ {4}(\w+)  +\S", str(integrations.__doc__), re.MULTILINE)
    assert sorted(listed) == sorted(modules)
    assert {getattr(integrations, name) for name in modules} | {cp_fast.checkpoint} <= shown


def test_the_api_page_names_what_a_module_s_entry_does_not_show() -> None:
    """The site shows functions and classes that have a docstring; a constant or an operator needs a sentence."""
    entries = {name: resolve(name) for name in re.findall(r"^::: ([\w.]+)$", API, re.MULTILINE)}
    modules = {name: thing for name, thing in entries.items() if isinstance(thing, ModuleType)}
    assert len(modules) > 15
    for module, thing in modules.items():
        for name in thing.__all__:
            value = getattr(thing, name)
            shown = (inspect.isfunction(value) or inspect.isclass(value)) and value.__doc__
            assert shown or f"`{module}.{name}`" in API, f"{module}.{name}"
    assert "`conformance.step.CAUSES`" in API


def test_the_api_page_shows_the_arguments_of_classes_that_users_make() -> None:
    for name in ("cp_fast.ContextParallel", "cp_ref.SimGroup"):
        assert re.search(rf"^::: {name}\n    options: .*merge_init_into_class: true", API, re.MULTILINE), name


# ---- what type checkers see: the words that arguments take, and what `attention` returns. By pyright, which `dev` has


PROGRAM = """\
from typing import Any, assert_type
from torch import Tensor
import {package} as cp

def right(group: Any, q: Tensor, lse: bool) -> None:
    cp.ContextParallel(group, layout="zigzag")
    context = cp.ContextParallel(group, "p2p", layout="contiguous")
    assert_type(cp.attention(q, q, q, cp=context), Tensor)
    assert_type(cp.attention(q, q, q, cp=context, attn_mask_type="causal", return_lse=True), tuple[Tensor, Tensor])
    assert_type(cp.attention(q, q, q, cp=context, return_max_logit=True), tuple[Tensor, Tensor])
    both = cp.attention(q, q, q, cp=context, return_lse=True, return_max_logit=True)
    assert_type(both, tuple[Tensor, Tensor, Tensor])
    cp.attention(q, q, q, cp=context, return_lse=lse)

def wrong(group: Any, q: Tensor, sizes: dict[str, Any]) -> None:
    context = cp.ContextParallel(group)
    cp.attention(q, q, q, cp=context, attn_mask_type="casual")
    cp.attention(q, q, q, cp=context, softmax_type="sink")
    cp.attention(q, q, q, cp=context, qkv_format="bsdh")
    cp.attention(q, q, q, cp=context, windows=(1, 0))
    cp.ContextParallel(group, "ring")
    cp.ContextParallel(group, layout="striped")
    cp.make_plan(cp=context, attn_mask_type="casual", **sizes)
    cp.make_plan(cp=context, alibi_slopes=q, **sizes)
    cp.supports(cp=context, qkv_format="bsdh", **sizes)
    cp.dense_attention(q, q, q, softmax_type="sink")
    cp.dense_attention(q, q, q, deterministic=True)
"""


@pytest.mark.thorough
@pytest.mark.extras
@pytest.mark.parametrize("package", ["cp_ref", "cp_fast"])
def test_a_word_that_does_not_exist_is_an_error(tmp_path: Path, package: str) -> None:
    pytest.importorskip("pyright", reason="needs pyright: pip install '.[dev]'")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(package=package))
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = PROGRAM.splitlines()
    wrong = range(lines.index("    context = cp.ContextParallel(group)") + 1, len(lines))
    assert {one["range"]["start"]["line"] for one in found} == set(wrong), found
