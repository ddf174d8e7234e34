"""Hypothesis profiles: the same examples every time, here and in CI; `--hypothesis-profile random` to look further. The
fast tests draw 15 of 100 examples; CI draws all of them, by the mark `drawn`. And the mark `smoke`: what other
versions of PyTorch are tried with, that is, what leans on PyTorch most. And processes.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import is_hypothesis_test, settings

if TYPE_CHECKING:
    from tests.dist.workers import Processes

# Tensors here are small: a thread for each core costs a third more, in this process and in those that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if "CP_TESTS_BACKEND" in os.environ:  # backend fa4's way on the host, on a CPU
    from tests.fa4_dry import install_asked

    install_asked()

settings.register_profile("deterministic", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("fast", settings.get_profile("deterministic"), max_examples=15)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("deterministic")

HERE = Path(__file__).parent
SMOKE = (
    "cp_fast/kernels/test_implementations.py",
    "cp_fast/kernels/test_native.py",
    "cp_fast/test_torch_integration.py",
    "cp_ref/test_oracle.py",
    "dist/test_dtensors.py",
    "dist/test_gloo.py",
    "layers/test_graphs.py",
    "layers/test_uses.py",
)


def smokes(path: Path) -> bool:
    """Whether a file is one of these."""
    return path.is_relative_to(HERE) and path.relative_to(HERE).as_posix() in SMOKE


# Run by tests; they import what the tests' extra lacks, or end their process.
PROGRAMS = (
    *(
        HERE / "integrations" / "hugging_face" / f"{name}.py"
        for name in ("accelerate_losses", "accelerate_steps", "trainer_losses", "trl_losses")
    ),
    HERE / "cp_fast" / "kernels" / "compiled_kernels.py",
    HERE / "linear" / "interpreted_kernels.py",
    HERE / "meta" / "zoo" / "exits_when_imported.py",
    HERE / "sparse" / "interpreted_kernels.py",
)


def says_faults(path: Path) -> bool:
    """Whether a file has a test with the mark `faults`."""
    return "mark.faults" in path.read_text()


@cache
def says_extras(path: Path) -> bool:
    """Whether a file has tests that are skipped without these extras."""
    return "test-integrations" in path.read_text()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Programs are no tests. For `-m smoke...` no other file is imported: some need more than the wheel and its tests.
    Nor for `-m faults`: importing all files takes longer than many a test.
    """
    if collection_path in PROGRAMS:
        return True
    of_tests = collection_path.suffix == ".py" and collection_path.name != "__init__.py"
    wanted = {"smoke": smokes, "faults": says_faults}.get(config.option.markexpr.partition(" ")[0])
    return True if wanted is not None and of_tests and not wanted(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before Hypothesis loads the profile that --hypothesis-profile names
def pytest_configure(config: pytest.Config) -> None:
    """The fast tests, those of `python -m pytest`, draw fewer examples. What is tested is imported as it is: pytest
    would rewrite the assertions of all modules of a package that has a plugin for it, which takes longer than their
    import.
    """
    if "not thorough" in config.option.markexpr:
        settings.load_profile("fast")
    rewritten: set[str] = getattr(config.pluginmanager.rewrite_hook, "_must_rewrite", set[str]())
    rewritten -= {name for name in rewritten if name.partition(".")[0] in ("cp_ref", "cp_fast", "conformance")}


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is drawn, what the fast tests leave out by `one_in`, and the tests of these files."""
    counts = Counter[str]()
    for item in items:
        one_in = item.get_closest_marker("one_in")
        if one_in and not item.get_closest_marker("thorough"):
            function = item.nodeid.partition("[")[0]
            if counts[function] % one_in.args[0]:
                item.add_marker(pytest.mark.thorough)
            counts[function] += 1
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.drawn)
        if item.path.is_relative_to(HERE / "integrations") and says_extras(item.path):
            item.add_marker(pytest.mark.extras)
        if smokes(item.path):
            item.add_marker(pytest.mark.smoke)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Garbage is looked for in what tests make, and not in all that is imported. The server of processes is started
    before another one takes its place, which has imported less.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 20)  # from 700, 10, 10
    if "tests.dist.workers" in sys.modules and not session.config.option.collectonly:
        from tests.dist.workers import start_server

        start_server()


def _processes(size: int) -> Iterator[Processes]:
    from tests.dist.workers import Processes

    group = Processes(size)
    yield group
    group.close()


@pytest.fixture(scope="module")
def one() -> Iterator[Processes]:
    """A process, started once for the tests of a file."""
    yield from _processes(1)


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    """Two processes, started once for the tests of a file."""
    yield from _processes(2)


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    """Four of them."""
    yield from _processes(4)
