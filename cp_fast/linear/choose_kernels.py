"""The choice of a library of linear attention, by the rule of `cp_fast.backends.choose`."""

from __future__ import annotations

from functools import cache

from cp_fast.backends.backend_protocol import NotInstalled
from cp_fast.linear.chunked import ChunkedKernels
from cp_fast.linear.fla.fla_kernels import FlaKernels
from cp_fast.linear.linear_kernels import LinearKernels
from cp_fast.log import log_once
from cp_ref.schedules.words import Feature, Unsupported

__all__ = ["LIBRARIES", "choose_kernels", "features_of_call"]

LIBRARIES: tuple[LinearKernels, ...] = FlaKernels(), ChunkedKernels()
_NAMES = {"torch": ("torch",), "cpu": ("torch",)}  # by ContextParallel.backend; others mean all, in their order


def features_of_call(device: str, dtype: str, d_k: int, d_v: int) -> frozenset[Feature]:
    """What a call asks of a library. dtype: PyTorch's name without "torch.".

    >>> sorted(features_of_call("cpu", "float32", 128, 20))
    [<Feature.CPU: 'device cpu'>, <Feature.FLOAT32: 'float32'>, <Feature.HEAD_DIM_ODD: 'head dim not a multiple of 8'>]
    """
    conditions = {
        Feature.HEAD_DIM_OVER_128: max(d_k, d_v) > 128,
        Feature.HEAD_DIM_OVER_256: max(d_k, d_v) > 256,
        Feature.HEAD_DIM_ODD: d_k % 8 != 0 or d_v % 8 != 0,
    }
    always = {Feature(f"device {device}"), Feature(dtype)}
    return frozenset(always | {feature for feature, needed in conditions.items() if needed})


@cache
def choose_kernels(required: frozenset[Feature], backend: str) -> LinearKernels:
    """The first library that works here and has every feature. `ContextParallel.backend` "torch" or "cpu" takes plain
    PyTorch; "auto", and the name of a library of attention, take flash-linear-attention first.

    Raises:
        Unsupported: there is none; it names for every library the features that it lacks, or why it does not work.
    """
    names = _NAMES.get(backend)
    missing: dict[str, frozenset[Feature]] = {}
    reasons: list[str] = []
    missed: list[str] = []
    for library in LIBRARIES:
        if names is not None and library.name not in names:
            continue
        if lacking := required - library.features:
            missing[library.name] = lacking
        elif (reason := library.why_not()) is not None:
            reasons.append(f"{library.name} does not work here: {reason}")
            if isinstance(reason, NotInstalled):
                missed.append(f"{library.name}: {reason}")
        else:
            if missed:
                log_once(
                    f"linear attention runs on {library.name}; what this GPU prefers is not installed "
                    f"({'; '.join(missed)}); ContextParallel(backend={library.name!r}) takes it without a word"
                )
            return library
    raise Unsupported(f"linear attention with backend {backend!r}", missing, hint="\n  ".join(reasons))
