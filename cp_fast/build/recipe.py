"""What a build is made from and how: everything that decides about the result, and so the key it is kept under."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from cp_fast.build import tools
from cp_fast.build.archs import machine_archs
from cp_fast.build.errors import Unavailable

__all__ = ["DEVICES", "Recipe", "recipe", "sources_folder"]

DEVICES = ("cpu", "cuda")

# The oldest PyTorch that is supported: the stable ABI of that release is all that is used.
_TARGET = "0x020b000000000000"

# Code for this machine's CPU; its identity is part of the key, so a home that machines share is no problem.
_NATIVE = {"x86_64": ("-march=native",), "aarch64": ("-mcpu=native",)}


@dataclass(frozen=True)
class Recipe:
    """One library: its sources, the programs and flags, and what else it depends on."""

    device: str
    folder: Path  # csrc
    sources: tuple[Path, ...]  # what is compiled
    headers: tuple[Path, ...]  # what is included
    cxx: str
    nvcc: str | None
    cxx_flags: tuple[str, ...]
    nvcc_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    depends_on: tuple[str, ...]  # identities: compilers, CPU, PyTorch

    @property
    def file_name(self) -> str:
        """Of the library."""
        return f"cp_attention_native_{self.device}.so"

    def key(self) -> str:
        """A hash of everything that decides about the result; not of where the sources and PyTorch lie."""
        files = {
            str(path.relative_to(self.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.sources + self.headers)
        }
        programs = [tools.identity(program) for program in (self.cxx, self.nvcc) if program]
        places = {str(self.folder): "csrc", str(_torch_folder()): "torch"}
        flags = list(self.cxx_flags + self.nvcc_flags + self.link_flags)
        for place, name in places.items():
            flags = [flag.replace(place, name) for flag in flags]
        text = json.dumps([self.device, files, programs, flags, self.depends_on], sort_keys=True)
        return f"{self.device}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"

    def ninja(self) -> str:
        """The build in ninja's language; outputs lie in the folder that ninja runs in."""
        rules = [
            ("cxx", [self.cxx, *self.cxx_flags, "-c", "$in", "-o", "$out"]),
            ("nvcc", [self.nvcc or "", *self.nvcc_flags, "-c", "$in", "-o", "$out"]),
            ("link", [self.nvcc or self.cxx, "$in", "-o", "$out", *self.link_flags]),
        ]
        if self.nvcc is None:
            del rules[1]
        lines = [line for name, words in rules for line in (f"rule {name}", f"  command = {_command(words)}", "")]
        objects = []
        for source in self.sources:
            objects.append(f"{source.parent.name}_{source.stem}_{source.suffix[1:]}.o")
            lines.append(f"build {objects[-1]}: {'nvcc' if source.suffix == '.cu' else 'cxx'} {_path(str(source))}")
        lines += [f"build {self.file_name}: link {' '.join(objects)}", f"default {self.file_name}", ""]
        return "\n".join(lines)


def _torch_folder() -> Path:
    return Path(str(torch.__file__)).parent


def sources_folder() -> Path:
    """Where csrc is: in the package where it is installed, beside it in a checkout.

    Raises:
        Unavailable: in neither.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "common" / "bindings.cpp").exists():
            return folder
    raise Unavailable(f"the sources of the native kernels are neither in {package / 'csrc'} nor beside the package")


def recipe(device: str, archs: tuple[int, ...] | None = None) -> Recipe:
    """How the library for a device is built here.

    Args:
        device: "cpu" or "cuda".
        archs: GPU architectures; None for those of this machine.

    Raises:
        Unavailable: something that it takes is not here. ValueError: another device.
    """
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}; it must be 'cpu' or 'cuda'")
    folder, torch_folder, cxx = sources_folder(), _torch_folder(), tools.cxx()
    include = torch_folder / "include"
    if not (include / "torch" / "csrc" / "stable" / "library.h").exists():
        raise Unavailable(f"PyTorch {torch.__version__} comes without its headers: looked in {include}")
    shared = ("-std=c++17", f"-DCP_DEVICE={device}", f"-I{folder / 'common'}")
    cxx_flags = (*shared, "-fPIC", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={_TARGET}", f"-isystem{include}")
    libraries = (f"-L{torch_folder / 'lib'}", "-ltorch_cpu")
    depends_on = (platform.machine(), f"torch {torch.__version__}", f"ABI {_TARGET}")
    common, own = folder / "common", folder / device
    headers = tuple(sorted({*common.glob("*.h"), *own.glob("*.h"), *own.glob("*.cuh")}))
    binding = common / "bindings.cpp"
    if device == "cpu":
        return Recipe(
            device=device,
            folder=folder,
            sources=(*sorted(own.glob("*.cpp"), key=_largest_first), binding),
            headers=headers,
            cxx=cxx,
            nvcc=None,
            cxx_flags=(*cxx_flags, "-O3", "-Wall", "-Wextra", *_NATIVE.get(platform.machine(), ())),
            nvcc_flags=(),
            link_flags=("-shared", "-fPIC", "-Wl,--no-undefined", *libraries),
            depends_on=(*depends_on, tools.cpu_identity()),
        )
    nvcc = tools.nvcc()
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs or machine_archs()]
    # without PyTorch's CUDA library the result can be made, not loaded: enough to see that sources compile
    on_gpu = ("-ltorch_cuda", "-Xlinker=--no-undefined") if (torch_folder / "lib" / "libtorch_cuda.so").exists() else ()
    return Recipe(
        device=device,
        folder=folder,
        sources=(*sorted(own.glob("*.cu"), key=_largest_first), binding),
        headers=headers,
        cxx=cxx,
        nvcc=nvcc,
        cxx_flags=(*cxx_flags, "-O2", "-Wall", "-Wextra", "-DUSE_CUDA", f"-I{_cuda_include(nvcc)}"),
        nvcc_flags=(*shared, "-O3", f"-ccbin={cxx}", "-Xcompiler=-fPIC,-fvisibility=hidden", *codes),
        # its own CUDA runtime inside, so that it needs none of a certain release; the driver's streams are everyone's
        link_flags=("-shared", f"-ccbin={cxx}", "-cudart=static", *libraries, *on_gpu),
        depends_on=(*depends_on, f"CUDA {torch.version.cuda}"),
    )


def _largest_first(path: Path) -> tuple[int, str]:
    """The longest compilations are begun first."""
    return -path.stat().st_size, path.name


def _cuda_include(nvcc: str) -> Path:
    return Path(nvcc).resolve().parents[1] / "include"


def _command(words: list[str]) -> str:
    return " ".join(f"'{_path(word)}'" if " " in word else word for word in words)


def _path(text: str) -> str:
    """A path as ninja reads it."""
    return text.replace("$", "$$").replace(":", "$:").replace(" ", "$ ")
