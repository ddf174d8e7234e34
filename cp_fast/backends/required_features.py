"""The features that a problem requires, and those that the executor has with any kernel library."""

from __future__ import annotations

from cp_ref.contract.arguments import features_of
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.words import Feature

__all__ = ["EXECUTOR", "required"]

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
    return frozenset(needs | features_of(problem) | {feature for feature, needed in conditions.items() if needed})
