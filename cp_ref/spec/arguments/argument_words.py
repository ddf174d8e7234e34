"""The words that arguments take, each as a type and as a tuple: type checkers and the checks at run time read one list.

>>> CP_COMM_TYPES
('p2p', 'all_gather', 'a2a', 'a2a+p2p')
"""

from __future__ import annotations

from typing import Any, Literal, get_args

__all__ = [
    "CP_COMM_TYPES",
    "LAYOUTS",
    "MASKS",
    "OFFSET_GRADS",
    "QKV_FORMATS",
    "SOFTMAX_TYPES",
    "AttnMaskType",
    "CPCommType",
    "Layout",
    "OffsetGrad",
    "QKVFormat",
    "SoftmaxType",
    "canonical_layout",
]

CPCommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
Layout = Literal["dual_chunk", "zigzag", "contiguous", "balanced"]  # zigzag: another name of dual_chunk
QKVFormat = Literal["bshd", "sbhd", "thd"]
AttnMaskType = Literal[
    "no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "padding_causal_bottom_right"
]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
OffsetGrad = Literal["share", "total"]

CP_COMM_TYPES: tuple[CPCommType, ...] = get_args(CPCommType)
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
