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
from cp_ref.contract import arguments
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.words import Feature, Unsupported

__all__ = [
    "BACKENDS",
    "EXECUTOR",
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
    "required",
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


def choose(wanted: frozenset[Feature], backend: str) -> Backend:
    """The backend for a problem that requires these features; those outside `KERNEL_FEATURES` are not looked at.

    "auto" takes the first that works here and has every feature; a name takes that one. If none fits, `Unsupported`
    lists for every candidate the features it lacks and why it does not work here. A name never falls back to another
    backend. If "auto" takes a later one because a library for this GPU is not installed, it warns once.
    """
    candidates = BACKENDS if backend == "auto" else (by_name(backend),)
    wanted = wanted & KERNEL_FEATURES
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


# ---- what a problem requires


EXECUTOR = frozenset(
    {
        Feature.BSHD,
        Feature.SBHD,
        Feature.THD,
        Feature.DUAL_CHUNK,
        Feature.CONTIGUOUS,
        Feature.BALANCED,
        Feature.GIVEN_LAYOUT,
        Feature.NO_MASK,
        Feature.CAUSAL,
        Feature.BOTTOM_RIGHT,
        Feature.PADDING,
        Feature.WINDOW,
        Feature.AREAS,
        Feature.CROSS_ATTENTION,
        Feature.OFF_BY_ONE,
        Feature.LEARNABLE,
    }
)
"""Features that plans, packing and merging add to every kernel library: masks become diagonal band tiles, sinks are
merged in at the end.
"""


def required(
    problem: Problem, device: str, *, deterministic: bool = False, max_logit: bool = False, in_place: bool = False
) -> frozenset[Feature]:
    """Every feature that computing the problem on a device type ("cpu", "cuda") needs; a ValueError for another."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; it must be 'cpu' or 'cuda'")
    needs = {
        Feature(problem.qkv_format),
        Feature(problem.layout) if isinstance(problem.layout, str) else Feature.GIVEN_LAYOUT,
        Feature(f"device {device}"),
        Feature(problem.dtype),
    }
    conditions = {
        Feature.NO_MASK: problem.areas is None and not problem.causal,
        Feature.CAUSAL: problem.causal,
        Feature.BOTTOM_RIGHT: problem.bottom_right,
        Feature.PADDING: problem.attn_mask_type.startswith("padding"),
        Feature.CROSS_ATTENTION: problem.lengths.len_q != problem.lengths.len_kv,
        Feature.GQA: problem.heads_per_kv > 1,
        Feature.ASYMMETRIC_DIMS: problem.d_qk != problem.d_v,
        Feature.GQA_ASYMMETRIC_DIMS: problem.heads_per_kv > 1 and problem.d_qk != problem.d_v,
        Feature.HEAD_DIM_OVER_128: max(problem.d_qk, problem.d_v) > 128,
        Feature.HEAD_DIM_OVER_256: max(problem.d_qk, problem.d_v) > 256,
        Feature.HEAD_DIM_ODD: problem.d_qk % 8 != 0 or problem.d_v % 8 != 0,
        Feature.OFF_BY_ONE: problem.softmax_type == "off-by-one",
        Feature.LEARNABLE: problem.softmax_type == "learnable",
        Feature.DETERMINISTIC: deterministic,
        Feature.MAX_LOGIT: max_logit,
        Feature.IN_PLACE: in_place,
    }
    return frozenset(
        needs | arguments.features_of(problem) | {feature for feature, needed in conditions.items() if needed}
    )
