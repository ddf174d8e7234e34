"""Who may import whom, read from the sources and tried in fresh processes."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from email.message import Message
from email.parser import HeaderParser
from functools import cache
from pathlib import Path

import pytest

import conformance
import cp_fast
import cp_ref

FOLDERS = {
    name: Path(str(module.__file__)).parent
    for name, module in {"cp_ref": cp_ref, "cp_fast": cp_fast, "conformance": conformance}.items()
}


@cache
def imports(path: Path, *, when_run: bool = False) -> set[str]:
    """Every module that a file names in an import, anywhere in it; when_run: but for type checkers alone."""
    found, tree = set[str](), ast.parse(path.read_text())
    typed = (node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    left_out = {inner for node in typed for inner in ast.walk(node)} if when_run else set[ast.AST]()
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(str(node.module))
    return found


def files(package: str, *below: str) -> list[Path]:
    return sorted(FOLDERS[package].joinpath(*below).rglob("*.py"))


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_the_schedules_need_the_standard_library_and_numpy_alone() -> None:
    for path in files("cp_ref", "schedules"):
        for module in imports(path):
            known = module.split(".")[0] in {"numpy", *sys.stdlib_module_names}
            assert known or within(module, "cp_ref.schedules"), (path, module)


def test_cp_ref_knows_nothing_of_the_others() -> None:
    for path in files("cp_ref"):
        for module in imports(path):
            assert module.split(".")[0] not in {"cp_fast", "conformance", "numba", "triton", "flash_attn"}, (
                path,
                module,
            )


INTEGERS = ("cp_ref.schedules", "cp_ref.problems", "cp_ref.show")  # rooms that know no tensor
SHARED = ("cp_ref.groups", "cp_ref.batches", "cp_ref.calls", "cp_ref.thd_helpers")  # rooms of both packages


def in_rooms(module: str, rooms: Iterable[str]) -> bool:
    return any(within(module, room) for room in rooms)


def of_integers(module: str) -> bool:
    """cp_ref/show/cli makes options of tensors: of command lines alone."""
    return in_rooms(module, INTEGERS) and not within(module, "cp_ref.show.cli")


def test_rooms_of_integers_need_the_standard_library_and_numpy_alone() -> None:
    for room in INTEGERS:
        for path in files("cp_ref", room.rpartition(".")[2]):
            for module in imports(path, when_run=True) if "cli" not in path.parts else ():
                known = module.split(".")[0] in {"numpy", *sys.stdlib_module_names}
                assert known or of_integers(module) or module == "cp_ref.groups.group", (path, module)
    assert not {m for m in imports(FOLDERS["cp_ref"] / "groups" / "group.py") if m.split(".")[0] in ("torch", "cp_ref")}


def test_shared_rooms_need_each_other_and_torch_alone() -> None:
    for room in SHARED:
        shared = files("cp_ref", room.rpartition(".")[2])
        assert len(shared) > 3
        for path in shared:
            for module in imports(path):
                known = module.split(".")[0] in {"torch", "numpy", *sys.stdlib_module_names}
                assert known or in_rooms(module, (*SHARED, *INTEGERS)), (path, module)


def test_cp_fast_enters_neither_the_reference_nor_the_traces() -> None:
    """`cp_fast/__init__.py` also names what debugs (the oracle, the simulated group, traces) for type checkers, and
    `cp_fast/tools/fast_trace.py` imports it when it is asked for.
    """
    for path in files("cp_fast"):
        for module in imports(path):
            allowed = in_rooms(module, (*SHARED, *INTEGERS))
            allowed |= path.name == "__init__.py" and path.parent == FOLDERS["cp_fast"] and module == "cp_ref"
            assert not within(module, "cp_ref") or allowed, (path, module)
        if path.name not in ("__init__.py", "fast_trace.py"):
            assert 'import_module("cp_ref' not in path.read_text(), path
        for module in imports(path):
            if "cli" not in path.parts:
                assert not within(module, "conformance"), (path, module)


def test_conformance_sees_the_oracle_through_one_module() -> None:
    """Adapters are of what is tested, and each sees what it adapts."""
    others = [path for path in files("conformance") if path not in files("conformance", "adapters")]
    beyond = {
        path.name for path in others for module in imports(path) if within(module, "cp_ref") and not of_integers(module)
    }
    assert beyond == {"reference.py"}
    assert not any(within(m, "cp_fast") for path in others for m in imports(path))
    for path in files("conformance", "adapters"):
        seen = {module.split(".")[0] for module in imports(path) if not of_integers(module)}
        own = path.stem.removesuffix("_operators").removesuffix("_step")
        assert seen.isdisjoint({"cp_ref", "cp_fast"} - {own}), path


TO_DEBUG = ("SimGroup", "Trace", "compare", "dense_attention")  # names of cp_ref
INTEGRATIONS = [
    ".".join(("cp_fast", *path.relative_to(FOLDERS["cp_fast"]).with_suffix("").parts))
    for path in files("cp_fast", "integrations")
    if path.stem != "__init__"
]
NOT_YET = {  # after an import: what builds and loads kernels, Dynamo, which takes as long as PyTorch, what only debugs
    "cp_ref": ["cp_fast"],
    "cp_fast": [
        "cp_ref.reference.reference_attention",
        "cp_ref.reference.oracle",
        "cp_ref.reference.simulator",
        "cp_ref.tracing.recorded_trace",
        "cp_ref.tracing.compare_traces",
        "cp_ref.reference.executor.play_schedule",
    ],
}


def needs_little(modules: list[str], not_yet: list[str]) -> str:
    """A program that imports these, where the optional packages cannot be imported."""
    return f"""
import sys
from pkgutil import resolve_name
for name in ("numba", "triton", "flash_attn", "cudnn", "ninja", "cupy"): sys.modules[name] = None
for name in {modules}: resolve_name(name)
late = {{"torch.utils.cpp_extension", "torch._dynamo", "cp_fast.movers.native_movers", "cp_fast.build"}}
late |= {{*{not_yet}}}
assert not late & set(sys.modules), late & set(sys.modules)
"""


LIBRARIES = {"transformers", "megatron", "torchtitan", "transformer_engine", "flash_attn", "accelerate"}
AFTER_PYTORCH = {
    "cp_ref": needs_little(["cp_ref", *(f"cp_ref:{name}" for name in cp_ref.__all__)], NOT_YET["cp_ref"]),
    "cp_fast": needs_little(
        ["cp_fast", *(f"cp_fast:{x}" for x in cp_fast.__all__ if x not in TO_DEBUG), *INTEGRATIONS], NOT_YET["cp_fast"]
    ),
    "integrations import the libraries that they are for when they are used": f"""
import sys, cp_fast
assert "cp_fast.integrations" not in sys.modules
import importlib, cp_fast.integrations as integrations
assert cp_fast.integrations.sdpa.scaled_dot_product_attention
for name in {INTEGRATIONS}:
    importlib.import_module(name)
assert {LIBRARIES}.isdisjoint(sys.modules), {LIBRARIES} & set(sys.modules)
""",
    "the question which kernel libraries are there imports none": """
import sys, cp_fast.kernels.attention.choose_backend as b
[backend.why_not() for backend in b.BACKENDS]
assert not {"flash_attn", "cudnn"} & set(sys.modules)
""",
}
TIME = """
import time
began = time.process_time()
import cp_fast
cp_fast.attention
print(time.process_time() - began)
"""
IN_FORKS = """
import os, sys, traceback
import torch
for program in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            exec(program, {})
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print(end="\\0", flush=True)
"""


def test_importing_needs_no_compiler_no_optional_package_and_no_gpu_and_takes_a_tenth_of_a_second() -> None:
    """With CUDA hidden and an empty PATH. PyTorch, whose import takes two seconds, is imported once for all. The time
    was 80 to 90 ms of the processor when this was written; a busy machine may take more, and the first run may compile.
    """
    assert len(INTEGRATIONS) > 8
    environment = {"PATH": "", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(p for p in sys.path if p)}
    command = [sys.executable, "-c", IN_FORKS, *AFTER_PYTORCH.values(), TIME, TIME]
    done = subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    *said, first, second, last = done.stdout.split("\0")
    assert not last
    assert dict(zip(AFTER_PYTORCH, said, strict=True)) == dict.fromkeys(AFTER_PYTORCH, "")
    assert min(float(first), float(second)) < 0.25


def test_importing_cp_fast_does_not_import_pytorch() -> None:
    """So it costs next to nothing, and its command line answers without PyTorch."""
    code = "import sys, cp_fast; assert not {'torch', 'numpy', 'cp_ref'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_reference_plans_without_a_machine() -> None:
    """No numbers of a machine decide its schedules: it has no such module, and reads no such file."""
    sources = [path for path in FOLDERS["cp_ref"].rglob("*") if path.suffix in (".py", ".toml")]
    assert [path for path in sources if "machine" in path.name] == []
    program = """
import sys

opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)

import cp_ref
from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem, Sequence

for comm, size in (("p2p", 1), ("all_gather", 1), ("a2a", 4), ("a2a+p2p", 2)):
    make_schedule(Problem(4, (Sequence(2**20, 2**20, 2**20, 2**20),), comm, size, heads_q=32, heads_kv=32))
print(len(opened) > 0, [name for name in opened if name.endswith(".toml")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"


# ---- what is packed: a source distribution, and a wheel that is built from it and not from the checkout


ROOT = Path(__file__).parents[2]
PACKAGES = ("cp_ref", "cp_fast", "conformance")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling", reason="needs hatchling, which the extra dev has")
    folder = tmp_path_factory.mktemp("dist")

    def build(target: str, source: Path) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    build("sdist", ROOT)
    [packed] = folder.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        if hasattr(tarfile, "data_filter"):  # since Python 3.11.4
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    build("wheel", folder / packed.name.removesuffix(".tar.gz"))
    [made] = folder.glob("*.whl")
    return zipfile.ZipFile(made)


@pytest.mark.extras
def test_nothing_else_is_at_top_level(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert top == {*PACKAGES, f"cp_attention-{PROJECT['version']}.dist-info"}


@pytest.mark.extras
def test_everything_travels(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES, "csrc"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in tracked.stdout.splitlines():
        assert (f"cp_fast/{name}" if name.startswith("csrc/") else name) in names, name
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


@pytest.mark.extras
def test_what_registries_show(wheel: zipfile.ZipFile) -> None:
    [metadata] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    found: Message = HeaderParser().parsestr(wheel.read(metadata).decode())
    assert found["License-Expression"] == "Apache-2.0"
    assert "Project-URL" not in found  # there is no public repository to lead to
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    assert "ring attention" in found["Keywords"]


@pytest.mark.extras
@pytest.mark.thorough
def test_what_is_imported_on_import_is_declared() -> None:
    """Modules that are imported at the top of a file, where the package works without extras."""
    declared = {re.split(r"[<>=\[ ]", need)[0].lower() for need in PROJECT["dependencies"]}
    extras = {"pytest", "hypothesis", "numba", "llvmlite", "triton", "fla"}  # of the suite, and of kernels
    of_module = importlib.metadata.packages_distributions()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if "adapters" in path.parts:  # of libraries that are not ours to install
            continue
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for module in {name.split(".")[0] for name in names} - {*sys.stdlib_module_names, *PACKAGES, *extras}:
                assert {name.lower() for name in of_module[module]} & declared, (path, module)
