"""From a call's arguments to a `Problem`: everything that can be wrong with them is found here, before anything is
sent.

Nothing here imports torch. A tensor is anything with a shape, a dtype and a device, and lengths are read with `tolist`.
Every refusal is a ValueError (or a TypeError, for a wrong type) that names the argument, its value and the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cp_ref.spec.arguments.argument_words import CP_COMM_TYPES, MASKS, QKV_FORMATS, SOFTMAX_TYPES
from cp_ref.spec.arguments.read_sequences import read_sequences
from cp_ref.spec.arguments.single_values import (
    check_choice,
    check_data,
    read_choice,
    read_count,
    read_dropout,
    read_number,
    read_window,
)
from cp_ref.spec.layouts.named_layouts import check_layout, read_layout
from cp_ref.spec.masks.read_areas import read_areas
from cp_ref.spec.tables.problem import Problem, Sequences
from cp_ref.spec.tables.row_positions import check_one_document

__all__ = ["DTYPES", "SCORE_OPTIONS", "Sizes", "check_heads", "check_offset", "counted", "read_problem", "read_sizes"]

DTYPES = ("float16", "bfloat16", "float32", "float64")
SCORE_OPTIONS: dict[str, Callable[[str, Any], Any]] = {  # an option of scores -> its check; of (name, value)
    "softmax_scale": lambda name, value: None if value is None else read_number(name, value, positive=True),
    "softcap": lambda name, value: read_number(name, value, positive=False),
    "softmax_type": lambda name, value: read_choice(name, value, SOFTMAX_TYPES),
    "dropout_p": lambda name, value: read_dropout(name, value),
}
_NEEDED = ("heads_q", "heads_kv", "d_qk", "d_v")
_LEAST = dict.fromkeys(_NEEDED, 1) | {"batch_size": 1, "seqlen_q": 0, "seqlen_kv": 0}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that q, k and v have. Sequence lengths are global; None in thd, where `cu_seqlens_*` have them."""

    heads_q: int
    heads_kv: int
    d_qk: int
    d_v: int
    dtype: str
    batch_size: int | None = None
    seqlen_q: int | None = None
    seqlen_kv: int | None = None


def read_sizes(q: Any, k: Any, v: Any, qkv_format: str, cp_size: int) -> Sizes:
    """The sizes of one rank's q, k, v (pass cp_size 1 for global tensors); they must agree in rank, dtype, device
    and heads.
    """
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    dims = "t h d" if qkv_format == "thd" else " ".join(qkv_format)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not str(getattr(x, "dtype", "")).startswith("torch."):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a tensor")
        check_data(name, x)
        if len(x.shape) != len(qkv_format):
            raise ValueError(
                f"{name} has shape {list(x.shape)}; qkv_format {qkv_format!r} needs [{dims.replace(' ', ', ')}]"
            )
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype} and q has {q.dtype}; q, k and v must have one dtype")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q is on {q.device}; q, k and v must be on one device")
    dtype = str(q.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise TypeError(f"q has dtype {q.dtype}; it must be one of {', '.join(DTYPES)}")
    if tuple(k.shape[:-1]) != tuple(v.shape[:-1]):
        raise ValueError(f"k has shape {list(k.shape)} and v {list(v.shape)}; all but the last size must be equal")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head dim {q.shape[-1]} and k has {k.shape[-1]}; they must be equal (d_qk)")
    heads = Sizes(q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], dtype)
    if qkv_format == "thd":
        return heads
    batch, seq = (0, 1) if qkv_format == "bshd" else (1, 0)
    if q.shape[batch] != k.shape[batch]:
        raise ValueError(f"q has batch size {q.shape[batch]} and k has {k.shape[batch]}; they must be equal")
    lengths = {"seqlen_q": q.shape[seq] * cp_size, "seqlen_kv": k.shape[seq] * cp_size}
    return replace(heads, batch_size=q.shape[batch], **lengths)


def read_problem(
    *,
    cp_size: int,
    cp_comm_type: str,
    layout: Any,
    qkv_format: str,
    attn_mask_type: str | None,
    window_size: tuple[int, int],
    areas: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    cu_seqlens_q_padded: Any,
    cu_seqlens_kv_padded: Any,
    sizes: Sizes,
    a2a_size: int = 1,
    score_mod: str = "",
    **score_options: Any,
) -> Problem:
    """The problem of a call. See `cp_ref.attention` for the arguments; `sizes` comes from the tensors or from
    `make_plan`, `score_options` are those of `SCORE_OPTIONS`. `score_mod` is the function's digest.
    """
    check_choice("cp_comm_type", cp_comm_type, CP_COMM_TYPES)
    layout = read_layout(layout)
    check_choice("qkv_format", qkv_format, QKV_FORMATS)
    window_size = read_window(window_size)
    if areas is not None:
        _check_alone(qkv_format, attn_mask_type, window_size)
    attn_mask_type = "causal" if attn_mask_type is None else attn_mask_type
    check_choice("attn_mask_type", attn_mask_type, MASKS)
    scores = {name: SCORE_OPTIONS[name](name, value) for name, value in score_options.items()}
    check_choice("dtype", sizes.dtype, DTYPES)
    sizes = counted(sizes)
    check_heads(sizes, cp_comm_type, a2a_size)
    given = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
        "cu_seqlens_q_padded": cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
    }
    sequences = read_sequences(given, qkv_format, attn_mask_type, sizes)
    lengths = Sequences.of(sequences)
    problem = Problem(
        cp_size=cp_size,
        sequences=sequences,
        cp_comm_type=cp_comm_type,
        a2a_size=a2a_size,
        layout=layout,
        qkv_format=qkv_format,
        attn_mask_type=attn_mask_type,
        window_size=window_size,
        areas=None if areas is None else read_areas(areas, sum(lengths.slots_q), sum(lengths.slots_kv)),
        heads_q=sizes.heads_q,
        heads_kv=sizes.heads_kv,
        d_qk=sizes.d_qk,
        d_v=sizes.d_v,
        score_mod=score_mod,
        dtype=sizes.dtype,
        **scores,
    )
    check_layout(problem)
    for name in ("score_mod", "dropout_p"):
        if getattr(problem, name):
            check_one_document(problem, name)
    return problem


def check_offset(problem: Problem, softmax_offset: Any, q: Any) -> None:
    """`softmax_offset` is there exactly when softmax_type is "learnable": one value a query head, on q's device."""
    if problem.softmax_type != "learnable":
        if softmax_offset is not None:
            raise ValueError(
                f"softmax_offset is given, but softmax_type is {problem.softmax_type!r}; it needs 'learnable'"
            )
        return
    if not str(getattr(softmax_offset, "dtype", "")).startswith("torch."):
        raise TypeError(f"softmax_offset is {softmax_offset!r}; softmax_type 'learnable' needs a tensor [h_q]")
    check_data("softmax_offset", softmax_offset)
    if tuple(softmax_offset.shape) != (problem.heads_q,):
        raise ValueError(
            f"softmax_offset has shape {list(softmax_offset.shape)}; it must be [h_q] = [{problem.heads_q}], or "
            "[1, h_q, 1, 1]"
        )
    if str(softmax_offset.dtype).removeprefix("torch.") not in DTYPES:
        raise TypeError(f"softmax_offset has dtype {softmax_offset.dtype}; it must be one of {', '.join(DTYPES)}")
    if softmax_offset.device != q.device:
        raise ValueError(
            f"softmax_offset is on {softmax_offset.device} and q is on {q.device}; they must be on one device"
        )


def _check_alone(qkv_format: str, attn_mask_type: str | None, window_size: tuple[int, int]) -> None:
    """Attention slices are for packed buffers, and have all that a mask and a window say."""
    if qkv_format != "thd":
        raise ValueError(f"areas are given, but qkv_format is {qkv_format!r}; they are rows of packed buffers, 'thd'")
    for name, value, none in (("attn_mask_type", attn_mask_type, None), ("window_size", window_size, (-1, -1))):
        if value != none:
            raise ValueError(f"{name} is {value!r}, but areas are given, which say who sees whom; leave one out")


def counted(sizes: Sizes) -> Sizes:
    """The sizes, checked: every size is an int within bounds."""
    given = {name: getattr(sizes, name) for name in _LEAST if getattr(sizes, name) is not None or name in _NEEDED}
    return replace(sizes, **{name: read_count(name, value, at_least=_LEAST[name]) for name, value in given.items()})


def check_heads(sizes: Sizes, cp_comm_type: str, a2a_size: int) -> None:
    """Raise ValueError unless every kv head serves equally many query heads and every rank gets equally many heads."""
    h_q, h_kv = sizes.heads_q, sizes.heads_kv
    if h_q % h_kv:
        raise ValueError(f"h_q is {h_q} and h_kv is {h_kv}; h_q must be a multiple of h_kv")
    if cp_comm_type in ("a2a", "a2a+p2p"):
        if h_q % a2a_size:
            raise ValueError(f"h_q is {h_q}; cp_comm_type {cp_comm_type!r} needs a multiple of the a2a size {a2a_size}")
        if h_kv % a2a_size and a2a_size % h_kv:
            raise ValueError(
                f"h_kv is {h_kv}; cp_comm_type {cp_comm_type!r} needs a multiple or a divisor of the a2a size "
                f"{a2a_size}"
            )
