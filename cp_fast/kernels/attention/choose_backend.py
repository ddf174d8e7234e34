"""The choice of an attention kernel library: all of them in order, their variants, and what a problem requires."""

from __future__ import annotations

from functools import cache

from cp_fast.kernels.attention import fa2
from cp_fast.kernels.attention.backend_protocol import Backend
from cp_fast.kernels.attention.blockwise import BlockwiseBackend
from cp_fast.kernels.attention.cudnn import CudnnBackend
from cp_fast.kernels.attention.fa2 import BUILT_IN, Fa2Backend
from cp_fast.kernels.attention.fa4.fa4_backend import Fa4Backend
from cp_fast.kernels.attention.largest_logit import LargestLogit
from cp_fast.kernels.attention.score_blocks import ScoreBlockSize
from cp_fast.kernels.this_gpu import NotInstalled
from cp_fast.log import log_once
from cp_ref.problems import arguments
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.words import Feature, Unsupported

__all__ = [
    "BACKENDS",
    "EXECUTOR",
    "IN_PLACE_RULE",
    "KERNEL_FEATURES",
    "by_name",
    "choose",
    "features_of",
    "installed",
    "missing_in",
    "remark_on",
    "required",
    "variants",
]

# ---- all variants of a library
#
# Plain, with max_logit from a separate pass, or for plans updated in place.
#
# A CUDA graph captured with one batch is replayed with the next one. A value that a library derives from the host's
# lengths at launch (sizes of a grid, a window's corner, one launch a segment) stays that of the first batch. So a plan
# updated in place needs a library that reads lengths on a GPU from the device only. cudnn does not, nor does
# deterministic fa2.


IN_PLACE_RULE = (
    "a captured graph finds new lengths only where its kernels read them on the device; 'cudnn', and 'fa2' where it is "
    "deterministic, follow the host's: make a plan for each batch instead"
)


@cache
def variants(backend: Backend) -> tuple[Backend, ...]:
    """All variants of a library, the plainest first; the same objects each time, so that plans of equal problems share
    them.
    """
    plain = (backend, type(backend)(in_place=True)) if isinstance(backend, Fa2Backend) else (backend,)
    return (*plain, *map(LargestLogit, plain))


def features_of(backend: Backend) -> frozenset[Feature]:
    """All features that a backend can be chosen for, in any of its variants."""
    return frozenset().union(*(v.features for v in variants(backend)))


def missing_in(backend: Backend, wanted: frozenset[Feature]) -> frozenset[Feature]:
    """The features of `wanted` that the library lacks, in the variant that lacks least."""
    return min((wanted - v.features for v in variants(backend)), key=len)


# ---- the choice


BACKENDS: tuple[Backend, ...] = (  # the features on any machine; `installed` may find more
    Fa4Backend(),
    CudnnBackend(),
    BUILT_IN,
    BlockwiseBackend(
        "cpu", Feature.CPU, ScoreBlockSize(scores=2**18, columns=128, rows=512, unit=16)
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
