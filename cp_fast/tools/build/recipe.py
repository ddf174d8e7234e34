"""A build's sources, flags and programs: everything that determines the result, and so its key in the cache."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cp_fast.tools.build import tools
from cp_fast.tools.build.archs import machine_archs
from cp_fast.tools.build.build_errors import Unavailable

__all__ = ["DEVICES", "Recipe", "Target", "recipe", "sources_folder", "target"]

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
        programs = [tools.identity(*self.cxx), *([tools.identity(self.nvcc)] if self.nvcc else [])]
        return f"{self.target.key()}-{_hash(programs)}"

    def commands(self) -> dict[str, list[str]]:
        """The compile and link commands as words, without their inputs and outputs."""
        t = self.target
        cxx = [*self.cxx, *t.flags, *t.cxx_flags]
        if self.nvcc is None:
            return {"cxx": cxx, "link": [*self.cxx]}
        program, options = tools.host_compiler(self.cxx)
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
    package = Path(__file__).resolve().parents[2]
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
        depends_on=(platform.machine(), f"torch {torch.__version__}", f"ABI {_TARGET}", tools.libc_identity()),
    )
    if device == "cpu":
        return replace(made, depends_on=(*made.depends_on, tools.cpu_identity()))
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
    return Recipe(wanted, tools.cxx(), tools.nvcc() if wanted.device == "cuda" else None)


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
