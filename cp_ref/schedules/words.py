"""The words that arguments take, each as a type and as a tuple, and the features that a problem requires.

Type checkers and the checks at run time read one list of words. A problem *requires* features; an implementation (a
schedule, a kernel library) *has* features. A feature that is required and not offered is missing, and `Unsupported`
names it. The support matrix is the sets themselves: there is no if-chain anywhere else that decides what runs.

>>> CP_COMM_TYPES
('p2p', 'all_gather', 'a2a', 'a2a+p2p')
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Literal, get_args

__all__ = [
    "AUTO",
    "CP_COMM_TYPES",
    "LAYOUTS",
    "MASKS",
    "OFFSET_GRADS",
    "QKV_FORMATS",
    "SOFTMAX_TYPES",
    "AttnMaskType",
    "CPCommType",
    "Feature",
    "Layout",
    "OffsetGrad",
    "QKVFormat",
    "ScheduleName",
    "SoftmaxType",
    "Unsupported",
    "canonical_layout",
    "describe",
]

# One for each entry of `cp_ref.schedules.planners.make_schedule.SCHEDULES`, in its order: a new schedule adds its name
# to both.
ScheduleName = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
CPCommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p", "auto"]
Layout = Literal["dual_chunk", "zigzag", "contiguous", "balanced"]  # zigzag: another name of dual_chunk
QKVFormat = Literal["bshd", "sbhd", "thd"]
AttnMaskType = Literal[
    "no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "padding_causal_bottom_right"
]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
OffsetGrad = Literal["share", "total"]

CP_COMM_TYPES: tuple[ScheduleName, ...] = get_args(ScheduleName)
AUTO: tuple[ScheduleName, ...] = ("all_gather", "a2a", "p2p")  # What "auto" chooses from; of equal ones the first.
LAYOUTS: tuple[Layout, ...] = ("dual_chunk", "contiguous", "balanced")
QKV_FORMATS: tuple[QKVFormat, ...] = get_args(QKVFormat)
MASKS: tuple[AttnMaskType, ...] = get_args(AttnMaskType)
SOFTMAX_TYPES: tuple[SoftmaxType, ...] = get_args(SoftmaxType)
OFFSET_GRADS: tuple[OffsetGrad, ...] = get_args(OffsetGrad)


def canonical_layout(layout: Any) -> Any:
    """The name that the packages use for a layout: "dual_chunk" for "zigzag"; any other value unchanged.

    >>> canonical_layout("zigzag"), canonical_layout("balanced")
    ('dual_chunk', 'balanced')
    """
    return "dual_chunk" if isinstance(layout, str) and layout == "zigzag" else layout


class Feature(StrEnum):
    """One thing that a problem can ask for. The value is what error messages and tables print."""

    # tensor formats (qkv_format)
    BSHD = "bshd"
    SBHD = "sbhd"
    THD = "thd"
    # layouts
    DUAL_CHUNK = "dual_chunk"
    CONTIGUOUS = "contiguous"
    BALANCED = "balanced"
    GIVEN_LAYOUT = "layout given as a table"
    # masks
    NO_MASK = "no_mask"
    CAUSAL = "causal"
    BOTTOM_RIGHT = "bottom_right"
    PADDING = "padding"
    WINDOW = "sliding window"
    AREAS = "areas"
    CROSS_ATTENTION = "cross attention"
    # heads
    GQA = "GQA (h_q > h_kv)"
    ASYMMETRIC_DIMS = "d_qk != d_v"
    GQA_ASYMMETRIC_DIMS = "GQA with d_qk != d_v"
    HEAD_DIM_OVER_128 = "head dim > 128"
    HEAD_DIM_OVER_256 = "head dim > 256"
    HEAD_DIM_ODD = "head dim not a multiple of 8"
    # softmax
    SOFTCAP = "softcap"
    ALIBI = "alibi_slopes"
    SCORE_MOD = "score_mod"
    DROPOUT = "dropout"
    OFF_BY_ONE = "softmax_type off-by-one"
    LEARNABLE = "softmax_type learnable"
    # results
    LSE_GRADIENT = "gradient through lse"
    MAX_LOGIT = "max_logit"
    DETERMINISTIC = "deterministic"
    # plans
    IN_PLACE = "max_sequences (plans updated in place)"
    # devices, dtypes and the like
    CPU = "device cpu"
    CUDA = "device cuda"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


def describe(features: Iterable[Feature]) -> str:
    """The features as one readable list, in the order of the enumeration.

    >>> describe({Feature.WINDOW, Feature.CAUSAL})
    'causal, sliding window'
    """
    wanted = set(features)
    return ", ".join(f.value for f in Feature if f in wanted)


class Unsupported(NotImplementedError):
    """The problem is well formed, but this implementation lacks something that it needs.

    Attributes:
        missing: every feature that is missing, by the implementation that lacks it.
    """

    def __init__(self, what: str, missing: Mapping[str, Iterable[Feature]], hint: str = "") -> None:
        """`what` names the refused request; `missing` maps an implementation's name to its missing features."""
        self.missing: dict[str, frozenset[Feature]] = {name: frozenset(fs) for name, fs in missing.items()}
        lines = [f"{what} is not supported:"]
        lines += [f"  {name} lacks {describe(fs)}" for name, fs in self.missing.items()]
        if hint:
            lines.append(f"  {hint}")
        super().__init__("\n".join(lines))
