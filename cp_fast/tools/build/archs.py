"""GPU architectures, as numbers: 90 is sm_90."""

from __future__ import annotations

import os

import torch

from cp_fast.tools.build.build_errors import Unavailable

__all__ = ["ALL_ARCHS", "VARIABLE", "machine_archs", "read_archs"]

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
