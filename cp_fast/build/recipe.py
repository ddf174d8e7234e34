"""The recipe of a build: sources, flags and programs, and the key that they give.

A build's sources, flags and programs are everything that determines the result, and so its key in the cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

import torch

__all__ = [
    "ALL_ARCHS",
    "DEVICES",
    "VARIABLE",
    "BuildError",
    "Recipe",
    "Target",
    "Unavailable",
    "cxx",
    "host_compiler",
    "machine_archs",
    "ninja",
    "nvcc",
    "nvcc_release",
    "read_archs",
    "recipe",
    "sources_folder",
    "target",
]

# ---- errors


class Unavailable(RuntimeError):
    """Something that a build needs is not on this machine; the message names it."""


class BuildError(RuntimeError):
    """A build was tried and failed; the message has the command and what the compiler said."""


# ---- GPU architectures


ALL_ARCHS = (80, 90, 100, 120)
VARIABLE = "CP_ATTENTION_CUDA_ARCHS"


def read_archs(text: str, name: str = VARIABLE) -> tuple[int, ...]:
    """Architectures separated by commas or semicolons, in any usual spelling, or "all".

    Raises:
        ValueError: naming `name`, its value and the rule.

    >>> read_archs("9.0;sm_100,80"), read_archs("all")
    ((80, 90, 100), (80, 90, 100, 120))
    """
    if text.strip() == "all":
        return ALL_ARCHS
    words = [word.strip().removeprefix("sm_").replace(".", "") for word in text.replace(";", ",").split(",")]
    if not all(word.isdecimal() and 70 <= int(word) < 1000 for word in words):
        raise ValueError(f"{name} is {text!r}; it must be 'all' or architectures such as '90' or '80,90', 70 or newer")
    return tuple(sorted({int(word) for word in words}))


def machine_archs() -> tuple[int, ...]:
    """Those that the environment asks for, or else those of this machine's GPUs.

    Raises:
        Unavailable: neither. ValueError: the variable cannot be read.
    """
    if text := os.environ.get(VARIABLE):
        return read_archs(text)
    if not torch.cuda.is_available():
        raise Unavailable(f"no GPU here to choose an architecture for: set {VARIABLE}, such as to 90 or all")
    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return tuple(sorted(major * 10 + minor for major, minor in capabilities))


# ---- programs


_CXX = ("c++", "g++", "clang++")


def cxx() -> tuple[str, ...]:
    """The C++ compiler: $CXX, which may be several words ("ccache g++"), or the first of c++, g++ and clang++.

    Returns:
        The words of its command, programs by their paths.

    Raises:
        Unavailable: none is there. ValueError: $CXX names none.
    """
    if asked := os.environ.get("CXX"):
        return _asked("CXX", asked, "a C++ compiler")
    return (_found("a C++ compiler", _CXX, "$CXX is not set"),)


def host_compiler(command: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """(program, options) of a compiler's command, without a launcher such as ccache.

    >>> host_compiler(("/usr/bin/ccache", "/usr/bin/g++", "-m64"))
    ('/usr/bin/g++', ('-m64',))
    """
    programs = list(takewhile(_no_option, command))
    return programs[-1], command[len(programs) :]


def nvcc() -> str:
    """The CUDA compiler: $NVCC, bin/nvcc of $CUDA_HOME or $CUDA_PATH, nvcc, or /usr/local/cuda/bin/nvcc.

    Raises:
        Unavailable: none is there. ValueError: $NVCC names none.
    """
    if asked := os.environ.get("NVCC"):
        if (path := shutil.which(asked)) is None:
            raise ValueError(f"NVCC is {asked!r}; it must name CUDA's compiler, by its path or on PATH")
        return path
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            return _found("CUDA's compiler", [str(Path(home) / "bin" / "nvcc")], f"${variable}")
    return _found("CUDA's compiler", ["nvcc", "/usr/local/cuda/bin/nvcc"], "$NVCC and $CUDA_HOME are not set")


def ninja() -> str:
    """ninja, of its Python package or of the system.

    Raises:
        Unavailable: neither is there.
    """
    if importlib.util.find_spec("ninja") is not None:
        from ninja import BIN_DIR

        if (program := Path(BIN_DIR) / "ninja").exists():
            return str(program)
    return _found("ninja", ["ninja"], "the Python package ninja is not installed")


@lru_cache
def identity(*command: str) -> str:
    """A program's identity: the real paths of its command, and the version that it prints.

    Raises:
        Unavailable: it does not run.
    """
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{shlex.join(command)} --version does not run: {error}") from error
    programs = [os.path.realpath(program) for program in takewhile(_no_option, command)]
    return "\n".join([*programs, *command[len(programs) :], said])


def nvcc_release(program: str) -> tuple[int, int]:
    """Its CUDA release, (13, 0).

    Raises:
        Unavailable: it does not say.
    """
    match = re.search(r"release (\d+)\.(\d+)", identity(program))
    if match is None:
        raise Unavailable(f"{program} --version names no CUDA release")
    return int(match[1]), int(match[2])


@lru_cache
def cpu_identity() -> str:
    """The CPU's model and instruction sets, which code for this CPU may depend on."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = [line for line in first.splitlines() if line.startswith(wanted)]
    return "\n".join([platform.machine(), *lines])


@lru_cache
def libc_identity() -> str:
    """The C library: a library linked to a newer one does not load with it."""
    return " ".join(platform.libc_ver())


def _asked(variable: str, text: str, what: str) -> tuple[str, ...]:
    """The words of a command in an environment variable; a path may contain blanks."""
    try:
        words = [text] if shutil.which(text) else shlex.split(text)
    except ValueError:
        words = []
    programs = [shutil.which(word) for word in takewhile(_no_option, words)]
    if not programs or None in programs:
        raise ValueError(f"{variable} is {text!r}; it must name {what}, by its path or on PATH")
    return (*map(str, programs), *words[len(programs) :])


def _no_option(word: str) -> bool:
    return not word.startswith("-")


def _found(what: str, names: Iterable[str], source: str) -> str:
    looked_for = list(names)
    for name in looked_for:
        if path := shutil.which(name):
            return path
    raise Unavailable(f"{what} was not found: looked for {', '.join(looked_for)} ({source})")


# ---- what is compiled, and how


DEVICES = ("cpu", "cuda")
_SUFFIX = {"cpu": "cpp", "cuda": "cu"}

# The oldest supported PyTorch: only the stable ABI of that release is used.
_TARGET = "0x020b000000000000"

# Code for this machine's CPU. Its identity is part of the key, so machines can share a home.
_NATIVE = {"x86_64": ("-march=native",), "aarch64": ("-mcpu=native",)}


@dataclass(frozen=True)
class Target:
    """A library's purpose and sources: everything that determines the result, except the programs of the build."""

    device: str
    folder: Path  # csrc
    sources: tuple[Path, ...]  # The compiled files.
    headers: tuple[Path, ...]  # The included files.
    flags: tuple[str, ...]  # Of every compiler.
    cxx_flags: tuple[str, ...]
    nvcc_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    depends_on: tuple[str, ...]  # Identities: CPU, C library, PyTorch.

    @property
    def file_name(self) -> str:
        """Of the library."""
        return f"cp_attention_native_{self.device}.so"

    def key(self) -> str:
        """A hash of all this, except the paths of the sources and PyTorch."""
        files = {
            str(path.relative_to(self.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.sources + self.headers)
        }
        places = {str(self.folder): "csrc", str(_torch_folder()): "torch"}
        flags = [list(flags) for flags in (self.flags, self.cxx_flags, self.nvcc_flags, self.link_flags)]
        for place, name in places.items():
            flags = [[flag.replace(place, name) for flag in some] for some in flags]
        return f"{self.device}-{_hash([self.device, files, flags, self.depends_on])}"


@dataclass(frozen=True)
class Recipe:
    """One library and the programs that make it here."""

    target: Target
    cxx: tuple[str, ...]  # The words of its command.
    nvcc: str | None

    def key(self) -> str:
        """The target's, and a hash of which programs these are."""
        programs = [identity(*self.cxx), *([identity(self.nvcc)] if self.nvcc else [])]
        return f"{self.target.key()}-{_hash(programs)}"

    def commands(self) -> dict[str, list[str]]:
        """The compile and link commands as words, without their inputs and outputs."""
        t = self.target
        cxx = [*self.cxx, *t.flags, *t.cxx_flags]
        if self.nvcc is None:
            return {"cxx": cxx, "link": [*self.cxx]}
        program, options = host_compiler(self.cxx)
        host = [f"-ccbin={program}", *(f"-Xcompiler={option}" for option in options)]
        return {
            "cxx": [*cxx, f"-I{_cuda_include(self.nvcc)}"],
            "nvcc": [self.nvcc, *t.flags, *t.nvcc_flags, *host],
            "link": [self.nvcc, *host],
        }

    def ninja(self) -> str:
        """The build in ninja's language; outputs lie in the folder that ninja runs in.

        Ninja gives a command to a shell, so every word of it is quoted; no source's name has a meaning in ninja.
        """
        commands = {name: " ".join(map(_word, words)) for name, words in self.commands().items()}
        ends = dict.fromkeys(commands, "-c $source -o $out")
        ends["link"] = " ".join(["$in -o $out", *map(_word, self.target.link_flags)])  # libraries come last
        lines = [f"rule {name}\n  command = {command} {ends[name]}\n" for name, command in commands.items()]
        objects = []
        for source in self.target.sources:
            objects.append(f"{source.parent.name}_{source.stem}_{source.suffix[1:]}.o")
            rule = "nvcc" if source.suffix == ".cu" else "cxx"
            lines.append(f"build {objects[-1]}: {rule}\n  source = {_word(str(source))}")
        name = self.target.file_name
        return "\n".join([*lines, f"build {name}: link {' '.join(objects)}", f"default {name}", ""])


def _torch_folder() -> Path:
    return Path(str(torch.__file__)).parent


def sources_folder() -> Path:
    """The folder csrc: inside an installed package, next to it in a checkout.

    Raises:
        Unavailable: in neither.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "common" / "bindings.cpp").exists():
            return folder
    raise Unavailable(f"the sources of the native kernels are neither in {package / 'csrc'} nor beside the package")


def target(device: str, archs: tuple[int, ...] | None = None) -> Target:
    """The library for a device here; needs no compiler.

    Args:
        device: "cpu" or "cuda".
        archs: GPU architectures; None for those of this machine.

    Raises:
        Unavailable: the sources or a GPU are not here. ValueError: another device.
    """
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}; it must be 'cpu' or 'cuda'")
    folder, torch_folder = sources_folder(), _torch_folder()
    common, own = folder / "common", folder / device
    binding = ("-fPIC", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={_TARGET}")
    binding = (*binding, f"-isystem{torch_folder / 'include'}", "-Wall", "-Wextra")
    libraries = (f"-L{torch_folder / 'lib'}", "-ltorch_cpu")
    made = Target(
        device=device,
        folder=folder,
        sources=(*sorted(own.glob(f"*.{_SUFFIX[device]}"), key=_largest_first), common / "bindings.cpp"),
        headers=tuple(sorted({*common.glob("*.h"), *own.glob("*.h"), *own.glob("include/*.cuh")})),
        flags=("-std=c++17", f"-DCP_DEVICE={device}", f"-I{common}"),
        cxx_flags=(*binding, "-O3", *_NATIVE.get(platform.machine(), ())),
        nvcc_flags=(),
        link_flags=("-shared", "-fPIC", "-Wl,--no-undefined", *libraries),
        depends_on=(platform.machine(), f"torch {torch.__version__}", f"ABI {_TARGET}", libc_identity()),
    )
    if device == "cpu":
        return replace(made, depends_on=(*made.depends_on, cpu_identity()))
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs or machine_archs()]
    # Without PyTorch's CUDA library the result can be built but not loaded: enough to check that sources compile.
    on_gpu = ("-ltorch_cuda", "-Xlinker=--no-undefined") if (torch_folder / "lib" / "libtorch_cuda.so").exists() else ()
    return replace(
        made,
        cxx_flags=(*binding, "-O2", "-DUSE_CUDA"),
        nvcc_flags=("-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", *codes),
        # The CUDA runtime is linked in, so no installed release is needed; the driver's streams are shared.
        link_flags=("-shared", "-cudart=static", *libraries, *on_gpu),
        depends_on=(*made.depends_on, f"CUDA {torch.version.cuda}"),
    )


def recipe(wanted: Target) -> Recipe:
    """How a library is built here.

    Raises:
        Unavailable: a program is missing. ValueError: CXX or NVCC names no program.
    """
    include = _torch_folder() / "include"
    if not (include / "torch" / "csrc" / "stable" / "library.h").exists():
        raise Unavailable(f"PyTorch {torch.__version__} comes without its headers: looked in {include}")
    return Recipe(wanted, cxx(), nvcc() if wanted.device == "cuda" else None)


def _largest_first(path: Path) -> tuple[int, str]:
    """The longest compilations are begun first."""
    return -path.stat().st_size, path.name


def _cuda_include(nvcc: str) -> Path:
    return Path(nvcc).resolve().parents[2] / "include"


def _word(text: str) -> str:
    """A word of a command, quoted for the shell and for ninja."""
    return shlex.quote(text).replace("$", "$$")


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
