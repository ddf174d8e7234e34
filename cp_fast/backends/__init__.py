"""Attention kernel libraries behind one interface (`backend_protocol.Backend`), in order of preference."""

from __future__ import annotations

from cp_fast.backends import fa2
from cp_fast.backends.backend_probe import probe
from cp_fast.backends.backend_protocol import (
    Backend,
    BackwardOperands,
    Gradients,
    LaunchOptions,
    NotInstalled,
    Partial,
    VarlenBatch,
)
from cp_fast.backends.backend_variants import IN_PLACE_RULE, features_of, missing_in, variants
from cp_fast.backends.blockwise import BlockwiseBackend, ScoreBlockSize
from cp_fast.backends.cudnn import CudnnBackend
from cp_fast.backends.fa2 import BUILT_IN, Fa2Backend
from cp_fast.backends.fa4.fa4_backend import Fa4Backend
from cp_fast.log import log_once
from cp_ref.schedules.words import Feature, Unsupported

__all__ = [
    "BACKENDS",
    "KERNEL_FEATURES",
    "Backend",
    "BackwardOperands",
    "Gradients",
    "LaunchOptions",
    "Partial",
    "VarlenBatch",
    "by_name",
    "choose",
    "features_of",
    "installed",
    "probe",
    "remark_on",
]

BACKENDS: tuple[Backend, ...] = (  # the features on any machine; `installed` may find more
    Fa4Backend(),
    CudnnBackend(),
    BUILT_IN,
    BlockwiseBackend(
        "cpu", Feature.CPU, ScoreBlockSize(scores=2**18, columns=256, rows=512)
    ),  # 1 MiB of a core's cache
    BlockwiseBackend("torch", Feature.CUDA, ScoreBlockSize(scores=2**25, columns=2048, rows=4096)),
)

KERNEL_FEATURES: frozenset[Feature] = frozenset().union(*map(features_of, BACKENDS))
"""What a kernel library decides; schedules, formats, masks and sinks are the executor's, on every library alike."""


def by_name(name: str) -> Backend:
    """The installed backend of that name; a ValueError for any other name.

    >>> by_name("cpu").name
    'cpu'
    """
    for backend in BACKENDS:
        if backend.name == name:
            return installed(backend)
    known = ", ".join(repr(b.name) for b in BACKENDS)
    raise ValueError(f"backend must be 'auto' or one of {known}, got {name!r}")


def choose(required: frozenset[Feature], backend: str) -> Backend:
    """The backend for a problem that requires these features; those outside `KERNEL_FEATURES` are not looked at.

    "auto" takes the first that works here and has every feature; a name takes that one. If none fits, `Unsupported`
    lists for every candidate the features it lacks and why it does not work here. A name never falls back to another
    backend. If "auto" takes a later one because a library for this GPU is not installed, it warns once.
    """
    candidates = BACKENDS if backend == "auto" else (by_name(backend),)
    wanted = required & KERNEL_FEATURES
    reasons: list[str] = []
    seen: list[Backend] = []
    missed: list[str] = []
    for candidate in map(installed, candidates):
        seen.append(candidate)
        reason = candidate.why_not()
        if reason is not None:
            reasons.append(f"{candidate.name} does not work here: {reason}")
            if isinstance(reason, NotInstalled) and not missing_in(candidate, wanted):
                missed.append(f"{candidate.name}: {reason}")
        elif (served := next((v for v in variants(candidate) if wanted <= v.features), None)) is not None:
            if missed:
                log_once(
                    f"attention runs on {candidate.name}; what this GPU prefers is not installed "
                    f"({'; '.join(missed)}); "
                    f"ContextParallel(backend={candidate.name!r}) takes it without a word"
                )
            return served
        elif remark := remark_on(candidate):
            reasons.append(f"{candidate.name} is {remark}")
    if Feature.IN_PLACE in wanted:
        reasons.append(IN_PLACE_RULE)
    missing = {c.name: lacking for c in seen if (lacking := missing_in(c, wanted))}
    raise Unsupported(f"attention with backend {backend!r}", missing, hint="\n  ".join(reasons))


def installed(backend: Backend) -> Backend:
    """The backend installed on this machine: "fa2" uses the kernels of the flash-attn package if they work."""
    return fa2.installed() if backend is BUILT_IN else backend


def remark_on(backend: Backend) -> str:
    """A remark for `doctor` on a backend that works."""
    return fa2.origin_of(backend) if isinstance(backend, Fa2Backend) else ""
