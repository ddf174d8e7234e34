"""Each entry point from end to end: `python -m conformance`, and pytest in three ways; each once in a process that has
imported nothing, then in processes that are forked from one that has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance import plugin
from tests.dist.workers import run_module
from tests.marks import HANGS_S

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[3]
LITTLE = ("--cp-examples", "4", "--cp-size", "2")
OBJECT = """
from dataclasses import replace
import pytest
from conformance.suite import *
from conformance.suite import PROFILES
import tests.meta.zoo.samples

PROFILES["quick"] = replace(PROFILES["quick"], shrink_s=1.0)

@pytest.fixture(scope="session")
def impl():
    return {}
"""


def run(folder: Path, *command: str) -> tuple[int, str]:
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=HANGS_S
    )
    return done.returncode, done.stdout + done.stderr


def forked(folder: Path, *command: str) -> tuple[int, str]:
    return run_module(folder, *command, path=(ROOT,))


def run_pytest(folder: Path, *arguments: str, run: Callable[..., tuple[int, str]] = forked) -> tuple[int, str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    return run(folder, "pytest", "-p", "conformance.plugin", "-p", "no:cacheprovider", "-rs", *LITTLE, *arguments)


def tiers(*names: str) -> list[str]:
    return [word for name in names for word in ("--cp-tier", name)]


def test_the_command_line(tmp_path: Path) -> None:
    """The report's folder has a name that is not UTF-8; it is a word of the command, which the report shows."""
    code, output = run(
        tmp_path, "conformance", "--impl", "cp_ref", "--max-examples", "3", "--cp-size", "2", "--tier", "helpers",
        "--tier", "logic", "--report", "out\udcff",
    )  # fmt: skip
    assert code == 0, output
    assert (tmp_path / "out\udcff" / "report.html").exists()
    assert "wrote out\\udcff/report.html" in output


def test_pyargs(tmp_path: Path) -> None:
    """Nothing but the package's name."""
    code, output = run_pytest(
        tmp_path, "--pyargs", "conformance", "--cp-impl", "cp_ref", "--cp-report", "out",
        *tiers("helpers", "merge", "logic"), run=run,
    )  # fmt: skip
    assert code == 0, output
    assert "16 passed" in output
    assert (tmp_path / "out" / "report.json").exists()


@pytest.mark.parametrize("odd", [("--cp-time-limit", "nan"), ("--cp-time-limit", "1e9"), ("--cp-examples", "0")])
def test_numbers_that_make_no_sense_are_named(tmp_path: Path, odd: tuple[str, str]) -> None:
    code, output = run_pytest(tmp_path, "--pyargs", "conformance", *odd)
    assert code == 4, output
    assert f"ERROR: {odd[0]} is " in output


def test_without_an_implementation_nothing_is_tested(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "--pyargs", "conformance", *tiers("logic"))
    assert code == 0, output
    assert "give --cp-impl" in output


@pytest.mark.parametrize(
    ("impl", "options", "code", "words"),
    [
        ('"cp_ref"', tiers("errors"), 0, "passed"),
        ("tests.meta.zoo.samples.Lower()", tiers("merge", "kernel"), 0, "2 passed"),
        ('"tests.meta.zoo.samples:Wrong"', [*tiers("logic"), "--cp-examples", "30"], 1, "--repro 'Case("),
        ('"no_such_module"', tiers("logic"), 1, "No module named"),
    ],
)
def test_a_file_of_ones_own(tmp_path: Path, impl: str, options: list[str], code: int, words: str) -> None:
    (tmp_path / "test_mine.py").write_text(OBJECT.format(impl))
    got, output = run_pytest(tmp_path, "test_mine.py", *options)
    assert got == code, output
    assert words in output


def test_an_entry_point_names_an_implementation(tmp_path: Path) -> None:
    """A package that is installed says what it has."""
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cp_attention.implementations]\nlower = tests.meta.zoo.samples:Lower\n")
    code, output = forked(tmp_path, "conformance", "--impl", "lower", "--tier", "merge", "--max-examples", "3")
    assert code == 0, output


def test_the_plugin_imports_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys, conformance.plugin; sys.exit('torch' in sys.modules or 'hypothesis' in sys.modules)"
    (tmp_path / "light.py").write_text(code)
    assert run(tmp_path, "light")[0] == 0


def test_the_plugins_options_have_a_prefix() -> None:
    """Every environment that has the package has the plugin: it must not claim names such as --impl."""
    parser = pytest.Parser(_ispytest=True)
    plugin.pytest_addoption(parser)
    [group] = [group for group in parser._groups if group.name == "conformance"]
    names = [name for option in group.options for name in option.names()]
    assert len(names) == 10
    assert all(name.startswith("--cp-") for name in names), names
