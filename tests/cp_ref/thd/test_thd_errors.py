"""What the THD helpers refuse, and in which words: the argument, its value and the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cp_ref import thd

CU = torch.tensor([0, 8, 12])  # divides at cp_size 2
ODD = torch.tensor([0, 4, 7])  # sequence 1 has no half
X = torch.zeros(12, 2, 4)
LSE = torch.zeros(2, 12)
NO_LENGTHS = [
    (None, (ValueError, TypeError), "cu_seqlens_padded is"),
    ([0, 8, 12], TypeError, "cu_seqlens_padded is a list"),
    (CU.float(), TypeError, "cu_seqlens_padded has dtype torch.float32; it must be int32 or int64"),
    (CU[None], ValueError, r"cu_seqlens_padded has shape \[1, 3\]"),
    (CU[:0], ValueError, r"cu_seqlens_padded has shape \[0\]"),
    (torch.tensor([0, 12, 8]), ValueError, r"cu_seqlens_padded\[2\] is 8, less than cu_seqlens_padded\[1\] = 12"),
]


def lengths_readers() -> dict[str, Callable[[Any], Any]]:
    """Every helper, called with these padded lengths."""
    return {
        "indices": lambda cu: thd.thd_get_partitioned_indices(cu, 12, 2, 0),
        "rank order": lambda cu: thd.thd_sequence_order_to_cp_rank_order(X, cu, 2),
        "sequence order": lambda cu: thd.thd_cp_rank_order_to_sequence_order(X, cu, 2),
        "copy": lambda cu: thd.thd_copy_valid_tokens_from_per_split_to_rank_local(X.clone(), X, cu, CU),
        "half": lambda cu: thd.thd_read_half_tensor(X, cu, 0),
        "half lse": lambda cu: thd.thd_read_second_half_lse(LSE, cu, True, 6),
        "lse": lambda cu: thd.thd_second_half_lse_correction(LSE.clone(), LSE[:, :6], cu, True),
        "out": lambda cu: thd.thd_out_correction(X.clone(), X[:6], LSE, LSE[:, :6], cu, True, True),
        "grad": lambda cu: thd.thd_grad_correction(X.clone(), X, cu, "add", "add"),
        "real": lambda cu: thd.get_cu_seqlens_on_cp_rank(CU, cu, 2, 0, True, True),
    }


@pytest.mark.parametrize("name", list(lengths_readers()))
@pytest.mark.parametrize(("cu", "error", "words"), NO_LENGTHS)
def test_lengths_that_are_none(name: str, cu: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        lengths_readers()[name](cu)


@pytest.mark.parametrize("name", [name for name in lengths_readers() if name != "copy"])
def test_lengths_begin_at_zero(name: str) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens_padded\[0\] is 4; it must be 0"):
        lengths_readers()[name](torch.tensor([4, 8, 12]))


@pytest.mark.parametrize("name", ["indices", "rank order", "sequence order", "real"])
def test_lengths_that_do_not_divide(name: str) -> None:
    with pytest.raises(ValueError, match=r"sequence 1 the length 6.*cp_size 2 needs a multiple of 4"):
        lengths_readers()[name](torch.tensor([0, 4, 10]))


@pytest.mark.parametrize("name", ["half", "half lse", "lse", "out", "grad"])
def test_odd_lengths_have_no_half(name: str) -> None:
    with pytest.raises(ValueError, match=r"sequence 1 the length 3.*half needs a multiple of 2"):
        lengths_readers()[name](ODD)


@pytest.mark.parametrize("name", [name for name in lengths_readers() if name != "real"])
def test_more_lengths_than_tokens(name: str) -> None:
    with pytest.raises(ValueError, match="16"):
        lengths_readers()[name](torch.tensor([0, 8, 16]))


PACKED = (LSE, LSE[:, :6], CU, True)
REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a rank": (
        lambda: thd.thd_get_partitioned_indices(CU, 12, 2, 2),
        ValueError,
        "cp_rank is 2; it must be from 0 to 1",
    ),
    "no rank": (lambda: thd.thd_get_partitioned_indices(CU, 12, 2, True), TypeError, "cp_rank is True"),
    "cp_size": (
        lambda: thd.thd_sequence_order_to_cp_rank_order(X, CU, 0),
        ValueError,
        "cp_size is 0; it must be at least 1",
    ),
    "tail": (
        lambda: thd.thd_get_partitioned_indices(CU, 13, 2, 0),
        ValueError,
        "total_tokens is 13.*tail of 1 .*cp_size = 2",
    ),
    "x's tail": (
        lambda: thd.thd_sequence_order_to_cp_rank_order(X, CU[:2], 8),
        ValueError,
        r"x.shape\[0\] is 12.*tail of 4",
    ),
    "int32": (
        lambda: thd.thd_get_partitioned_indices(CU.int(), 2**31, 2, 0),
        ValueError,
        "total_tokens is 2147483648; torch.int32",
    ),
    "no tensor": (lambda: thd.thd_read_half_tensor([1], CU, 0), TypeError, "x is a list"),  # type: ignore[arg-type]
    "scalar": (
        lambda: thd.thd_sequence_order_to_cp_rank_order(torch.tensor(1), CU, 2),
        ValueError,
        r"x has shape \[\]",
    ),
    "half": (lambda: thd.thd_read_half_tensor(X, CU, 2), ValueError, "half is 2; it must be from 0 to 1"),
    "four axes": (
        lambda: thd.thd_read_half_tensor(X[None], CU, 0),
        ValueError,
        r"shape \[1, 12, 2, 4\].*\[2, t, h, d\]",
    ),
    "odd tail": (
        lambda: thd.thd_read_half_tensor(torch.zeros(13), CU, 0),
        ValueError,
        "13 tokens must be an even number",
    ),
    "packed": (lambda: thd.thd_read_second_half_lse(LSE, CU, False, 6), ValueError, r"lse_packed=False.*\[2, h, s\]"),
    "batch": (
        lambda: thd.thd_read_second_half_lse(torch.zeros(3, 2, 8), CU, False, 4),
        ValueError,
        r"\[3, 2, 8\].*\[2, h, s\]",
    ),
    "flag": (lambda: thd.thd_read_second_half_lse(LSE, CU, 1, 6), TypeError, "lse_packed is 1"),  # type: ignore[arg-type]
    "room": (
        lambda: thd.thd_read_second_half_lse(LSE, CU, True, 5),
        ValueError,
        "max_seqlen is 5; it must be at least 6",
    ),
    "lse dtype": (
        lambda: thd.thd_second_half_lse_correction(LSE.half(), *PACKED[1:]),
        TypeError,
        "lse has dtype torch.float16",
    ),
    "whole for half": (
        lambda: thd.thd_second_half_lse_correction(LSE, LSE, CU, True),
        ValueError,
        r"lse_step has shape \[2, 12\].*\[2, 6\]",
    ),
    "heads": (
        lambda: thd.thd_second_half_lse_correction(LSE, LSE[:1, :6], CU, True),
        ValueError,
        r"lse_step has shape \[1, 6\]",
    ),
    "out step": (
        lambda: thd.thd_out_correction(X, X, LSE, LSE[:, :6], CU, True, True),
        ValueError,
        r"out_step has shape \[12, 2, 4\]",
    ),
    "out's lse": (
        lambda: thd.thd_out_correction(X, X, LSE.t(), LSE, CU, False, True),
        ValueError,
        r"lse has shape \[12, 2\].*\[2, 12\]",
    ),
    "out axes": (lambda: thd.thd_out_correction(X[0], X, LSE, LSE, CU, False, True), ValueError, r"\[t, h, d\]"),
    "out dtype": (
        lambda: thd.thd_out_correction(X.long(), X, LSE, LSE, CU, False, True),
        TypeError,
        "out has dtype torch.int64",
    ),
    "fp8": (
        lambda: thd.thd_grad_correction(X, X.to(torch.float8_e4m3fn), CU, "add", "add"),
        TypeError,
        "grad_step.*float8_e4m3fn",
    ),
    "action": (
        lambda: thd.thd_grad_correction(X, X, CU, "add", "skip"),
        ValueError,
        "second_half is 'skip'; it must be one",
    ),
    "step for one half": (
        lambda: thd.thd_grad_correction(X, X, CU, "add", "none"),
        ValueError,
        r"\[12, 2, 4\].*must be \[6, 2, 4\]",
    ),
    "step for both": (
        lambda: thd.thd_grad_correction(X, X[:6], CU, "add", "copy"),
        ValueError,
        r"\[6, 2, 4\].*must be \[12, 2, 4\]",
    ),
    "copy shapes": (
        lambda: thd.thd_copy_valid_tokens_from_per_split_to_rank_local(X, X[:6], CU, CU),
        ValueError,
        r"inp has shape \[6, 2, 4\]",
    ),
    "copy dtypes": (
        lambda: thd.thd_copy_valid_tokens_from_per_split_to_rank_local(X, X.long(), CU, CU),
        TypeError,
        "inp has dtype",
    ),
    "copy too much": (
        lambda: thd.thd_copy_valid_tokens_from_per_split_to_rank_local(X, X, CU, torch.tensor([0, 9, 9])),
        ValueError,
        "sequence 0 8 slots, but it has 9 tokens",
    ),
    "copy from below": (
        lambda: thd.thd_copy_valid_tokens_from_per_split_to_rank_local(X, X, torch.tensor([-1, 8, 12]), CU),
        ValueError,
        "at least 0 and must not decrease",
    ),
    "fewer sequences": (
        lambda: thd.get_cu_seqlens_on_cp_rank(CU[:2], CU, 2, 0, True, True),
        ValueError,
        "2 entries and .* has 3",
    ),
    "TransformerEngine's local lengths": (
        lambda: thd.get_cu_seqlens_on_cp_rank(2 * CU, CU, 2, 0, True, True),
        ValueError,
        "sequence 0 8 slots, but it has 16 tokens",
    ),
    "grad's flags": (
        lambda: thd.get_cu_seqlens_on_cp_rank(CU, CU, 2, 0, "add", True),  # type: ignore[arg-type]
        TypeError,
        "first_half is 'add'; it must be True or False",
    ),
    "factor": (lambda: thd.pad_thd_sequences_for_cp(X, X, CU, 0), ValueError, "divisibility_factor is 0"),
    "ids": (lambda: thd.pad_thd_sequences_for_cp(X, X, CU, 4), ValueError, r"input_ids has shape \[12, 2, 4\]"),
    "labels": (lambda: thd.pad_thd_sequences_for_cp(LSE[0], LSE[0, :4], CU, 4), ValueError, r"labels has shape \[4\]"),
    "too few ids": (
        lambda: thd.pad_thd_sequences_for_cp(CU[:2], CU[:2], CU, 4),
        ValueError,
        r"2 tokens, fewer than .* = 12",
    ),
    "narrow": (lambda: thd.pad_v(X, 3), ValueError, "d_qk is 3 and v has head dim 4"),
    "wide": (lambda: thd.trim_out(X, 5), ValueError, "d_v is 5 and out has head dim 4"),
}


@pytest.mark.parametrize("name", list(REFUSALS))
def test_refusals(name: str) -> None:
    call, error, words = REFUSALS[name]
    with pytest.raises(error, match=words):
        call()


def test_the_reference_looks_at_values() -> None:
    with pytest.raises(ValueError, match="on meta; it must be on a device where tensors have values"):
        thd.thd_read_half_tensor(X.to("meta"), CU, 0)


def test_nothing_changes_when_a_call_is_refused() -> None:
    grad = torch.ones(12, 2, 4)
    with pytest.raises(ValueError, match="grad_step"):
        thd.thd_grad_correction(grad, X[:6], CU, "copy", "copy")
    assert grad.eq(1).all()


def test_every_name_is_exported() -> None:
    assert all(callable(getattr(thd, name)) for name in thd.__all__)
    assert len(thd.__all__) == 14
