"""Native builds: what their key depends on, what goes wrong and what is said then, and the GPU's sources."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cp_fast.build import builder as build
from cp_fast.build import cache, recipe
from cp_fast.build.recipe import ALL_ARCHS, VARIABLE, BuildError, Recipe, Unavailable, machine_archs, read_archs
from tests.cp_fast.build.small import make_small, use_small
from tests.dist.workers import CONTEXT
from tests.marks import HANGS_S, needs_cxx


def nvcc_missing() -> bool:
    try:
        recipe.nvcc()
    except Unavailable:
        return True
    return False


needs_nvcc = pytest.mark.skipif(nvcc_missing(), reason="needs nvcc")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, to spoil."""
    folder = tmp_path / "csrc"
    shutil.copytree(recipe.sources_folder(), folder)
    monkeypatch.setattr(recipe, "sources_folder", lambda: folder)
    return folder


@pytest.fixture(autouse=True)
def fresh_reasons() -> None:
    build.why_not.cache_clear()


def with_target(made: Recipe, **changes: Any) -> Recipe:
    return dataclasses.replace(made, target=dataclasses.replace(made.target, **changes))


def other_dependency(made: Recipe, number: int) -> Recipe:
    depends_on = list(made.target.depends_on)
    depends_on[number] = "another"
    return with_target(made, depends_on=tuple(depends_on))


CHANGES: dict[str, Callable[[Recipe], Recipe]] = {
    "the compilers' flags": lambda r: with_target(r, flags=(*r.target.flags, "-g")),
    "the compiler's flags": lambda r: with_target(r, cxx_flags=(*r.target.cxx_flags, "-g")),
    "the linker's flags": lambda r: with_target(r, link_flags=(*r.target.link_flags, "-s")),
    "PyTorch": lambda r: other_dependency(r, 1),
    "the C library": lambda r: other_dependency(r, 3),
    "the CPU": lambda r: other_dependency(r, -1),
    "the device": lambda r: with_target(r, device="cuda"),
    "the compiler": lambda r: dataclasses.replace(r, cxx=(sys.executable,)),
    "a launcher": lambda r: dataclasses.replace(r, cxx=("/usr/bin/env", *r.cxx)),
    "a file less": lambda r: with_target(r, headers=r.target.headers[1:]),
}


def made_here() -> Recipe:
    return recipe.recipe(recipe.target("cpu"))


@needs_cxx
@pytest.mark.parametrize("change", CHANGES)
def test_the_key_changes_with(change: str) -> None:
    made = made_here()
    assert made.key() == made_here().key()
    assert CHANGES[change](made).key() != made.key()


@needs_cxx
@pytest.mark.parametrize("file", ["common/row_map.h", "cpu/copy.h", "cpu/heads.cpp", "common/bindings.cpp"])
def test_the_key_changes_with_content(sources: Path, file: str) -> None:
    before = made_here().key()
    (sources / file).write_text((sources / file).read_text() + "\n// more\n")
    assert made_here().key() != before


@needs_cxx
def test_the_key_is_not_of_a_place(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = made_here().key()
    moved = sources.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(recipe, "sources_folder", lambda: moved)
    assert made_here().key() == before


@needs_cxx
def test_a_new_source_is_compiled(sources: Path) -> None:
    (sources / "cpu" / "more.cpp").write_text("int more() { return 1; }\n")
    assert "cpu_more_cpp.o" in made_here().ninja()


@needs_cxx
def test_a_first_build_says_one_line(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    use_small(tmp_path, monkeypatch)
    path = build.library("cpu")
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == f"cp-attention: building the native kernels for the CPU, once, into {own_cache}\n"
    assert build.library("cpu") == path == build.find("cpu")
    assert capfd.readouterr().err == ""
    assert sorted(x.name for x in path.parent.iterdir() if x.suffix == ".o") == []


@needs_cxx
def test_a_compiler_that_fails(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = use_small(tmp_path, monkeypatch)
    (sources / "cpu" / "heads.cpp").write_text("int broken(;\n")
    with pytest.raises(BuildError) as caught:
        build.build("cpu", say=lambda line: None)
    said = str(caught.value)
    assert "building the native kernels for the CPU failed after" in said
    assert "CP_FAST_KERNELS=torch does without them" in said
    assert f"{recipe.cxx()[0]} -std=c++17" in said  # the command
    assert "heads.cpp:1" in said  # the compiler
    assert build.find("cpu") is None


def load_small(cache_folder: Path, sources: Path, said: Path, results: Any) -> None:
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ[cache.VARIABLE] = str(cache_folder)
    recipe.sources_folder = lambda: sources
    results.put(ctypes.CDLL(str(build.library("cpu"))).one())


@needs_cxx
def test_of_eight_ranks_one_compiles_and_all_load(own_cache: Path, tmp_path: Path) -> None:
    results = CONTEXT.Queue()
    given = own_cache, make_small(tmp_path), tmp_path / "said", results
    processes = [CONTEXT.Process(target=load_small, args=given) for _ in range(8)]
    for process in processes:
        process.start()
    assert [results.get(timeout=HANGS_S) for _ in processes] == [1] * 8
    for process in processes:
        process.join(timeout=HANGS_S)
    assert (tmp_path / "said").read_text().count("building the native kernels") == 1


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CP_ATTENTION_CACHE", str(tmp_path / "empty"))  # a library that is there would be used
    rule = r"a C\+\+ compiler was not found: looked for c\+\+, g\+\+, clang\+\+ \(\$CXX is not set\)"
    reason = build.why_not("cpu")
    assert reason is not None
    with pytest.raises(Unavailable, match=f"the native kernels for the CPU cannot be had: {rule}"):
        build.library("cpu")
    with pytest.raises(Unavailable, match=rule):
        build.build("cpu")
    assert build.status("cpu") == (None, reason)


@pytest.mark.parametrize("text", ["no-such-compiler", "ccache no-such-compiler", "'", "-m64", " "])
def test_a_compiler_that_is_not_there_is_no_reason_for_another(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("CXX", text)
    for ask in (build.why_not, build.library, build.find, build.build):
        with pytest.raises(
            ValueError, match=f"^CXX is {re.escape(repr(text))}; it must name a C\\+\\+ compiler, by its"
        ):
            ask("cpu")


def launcher(path: Path, log: Path) -> Path:
    """A program that runs the command that it is given, as ccache does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\necho run >> {shlex.quote(str(log))}\nexec "$@"\n')
    path.chmod(0o755)
    return path


@needs_cxx
def test_the_compiler_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = launcher(tmp_path / "my tools" / "my-c++", tmp_path / "log")
    monkeypatch.setenv("CXX", str(program))  # a path with blanks is one word
    assert recipe.cxx() == (str(program),)
    monkeypatch.setenv("CXX", f"{shlex.quote(str(program))} c++ -DMORE=1")
    assert recipe.cxx() == (str(program), shutil.which("c++"), "-DMORE=1")
    assert recipe.host_compiler(recipe.cxx()) == (shutil.which("c++"), ("-DMORE=1",))


@needs_cxx
@pytest.mark.parametrize("name", ["blanks in it", "a&b", "(c)", "it's", "x;y", "$HOME", "d|e", 'q"q', "a:b"])
@pytest.mark.one_in(3)
def test_odd_paths_and_launchers_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The sources, the cache and the compiler's launcher lie in a folder with such a name."""
    odd = tmp_path / name
    program = launcher(odd / "ccache", tmp_path / "log")
    use_small(odd, monkeypatch)
    monkeypatch.setenv("CXX", f"{shlex.quote(str(program))} c++")
    monkeypatch.setenv(cache.VARIABLE, str(odd / "cache"))
    assert ctypes.CDLL(str(build.library("cpu"))).one() == 1
    assert (tmp_path / "log").read_text().count("run") >= 3  # its version, a source, the library


@needs_cxx
def test_what_was_built_with_a_compiler_runs_without_one(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built in a development image, run in a slim one; of other sources, or another machine, it is not taken."""
    use_small(tmp_path, monkeypatch)
    path = build.build("cpu", say=lambda line: None)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    build.why_not.cache_clear()
    assert build.why_not("cpu") is None
    assert build.library("cpu") == build.find("cpu") == path
    build.why_not.cache_clear()
    monkeypatch.setattr(recipe, "libc_identity", lambda: "another libc")
    reason = build.why_not("cpu")
    assert reason is not None
    assert reason.endswith("; and the cache has none that fits")
    assert build.find("cpu") is None


@needs_cxx
def test_a_full_disk_says_where_and_what_to_do(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "g++"
    said = "fatal error: error writing to /tmp/x.s: No space left on device"
    program.write_text(f'#!/bin/sh\ncase "$*" in --version) echo 1;; *) echo "{said}"; exit 1;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    rule = (
        rf"{own_cache}, is full \(.*compilers write to .*make room there, or set {cache.VARIABLE} to a folder with room"
    )
    with pytest.raises(Unavailable, match=rule):
        build.library("cpu")


def test_cudas_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NVCC", "/no/nvcc")
    with pytest.raises(ValueError, match="NVCC is '/no/nvcc'; it must name CUDA's compiler, by its path or on PATH"):
        recipe.nvcc()
    monkeypatch.delenv("NVCC")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(Unavailable, match=rf"looked for {tmp_path}/bin/nvcc \(\$CUDA_HOME\)"):
        recipe.nvcc()


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a PyTorch without CUDA")
def test_without_cuda_the_gpu_kernels_say_so() -> None:
    reason = f"PyTorch {torch.__version__} is built without CUDA"
    assert build.why_not("cuda") == reason
    with pytest.raises(Unavailable, match=r"the native kernels for GPUs cannot be had: PyTorch .* without CUDA"):
        build.library("cuda")


def test_a_cuda_that_the_driver_may_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    from cp_fast.build import builder

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(recipe, "identity", lambda program: "Cuda compilation tools, release 13.0, V13.0.88")
    with pytest.raises(Unavailable, match=r"nvcc is of CUDA 13.0, newer than the 12.8 that PyTorch was built for"):
        builder._check_nvcc("nvcc")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    builder._check_nvcc("nvcc")


@pytest.mark.parametrize("text", ["", "ninety", "90,", "5.0", "-90"])
def test_architectures_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match=f"{VARIABLE} is '{text}'; it must be 'all' or architectures such as"):
        read_archs(text)


def test_architectures_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "9.0;80")
    assert machine_archs() == (80, 90)
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(9, 0), (12, 0), (9, 0)].__getitem__)
    assert machine_archs() == (90, 120)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable, match=f"no GPU here to choose an architecture for: set {VARIABLE}"):
        machine_archs()


@needs_cxx
@pytest.mark.thorough
def test_sources_give_no_warning(tmp_path: Path) -> None:
    made = made_here()
    for source in made.target.sources:
        command = [*made.commands()["cxx"], "-Werror", "-fsyntax-only", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@needs_cxx
@needs_nvcc
def test_the_gpu_sources_compile_for_the_oldest_and_the_newest_architecture(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have one condition, so what compiles for these two does for those between. The optimizer would take
    half of the time.
    """
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-Xcicc -O0 -Xptxas -O0")
    sources = [path.read_text() for path in recipe.sources_folder().rglob("*.cu*")]
    assert {found for text in sources for found in re.findall(r"__CUDA_ARCH__ (.*)", text)} == {">= 900"}
    ends = ALL_ARCHS[0], ALL_ARCHS[-1]
    path = build.build("cuda", ends, say=lambda line: None)
    content = path.read_bytes()
    for arch in ends:
        assert f"sm_{arch}".encode() in content
    needed = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=False).stdout
    assert "libcudart" not in needed  # it brings its own
