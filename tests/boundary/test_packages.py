"""What is packed: a source distribution, and a wheel that is built from it and not from the checkout."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cp_ref", "cp_fast", "conformance")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


pytestmark = pytest.mark.extras


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


def test_nothing_else_is_at_top_level(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert top == {*PACKAGES, f"cp_attention-{PROJECT['version']}.dist-info"}


def test_everything_travels(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES, "csrc"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in tracked.stdout.splitlines():
        assert (f"cp_fast/{name}" if name.startswith("csrc/") else name) in names, name
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_what_registries_show(wheel: zipfile.ZipFile) -> None:
    [metadata] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    found: Message = HeaderParser().parsestr(wheel.read(metadata).decode())
    assert found["License-Expression"] == "Apache-2.0"
    assert "Project-URL" not in found  # there is no public repository to lead to
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    assert "ring attention" in found["Keywords"]


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
