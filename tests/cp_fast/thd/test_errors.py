"""What the fast helpers refuse: the reference's refusals, in the same words, and what is theirs alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cp_fast import thd
from tests.cp_ref.thd import test_thd_errors as reference
from tests.cp_ref.thd.test_thd_errors import (  # noqa: F401  (played again, by the fast helpers)
    test_lengths_begin_at_zero,
    test_lengths_that_do_not_divide,
    test_odd_lengths_have_no_half,
    test_refusals,
)

CU = torch.tensor([0, 8, 12])
X = torch.zeros(12, 2, 4)
LSE = torch.zeros(2, 12)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's tables call whatever their module calls `thd`."""
    monkeypatch.setattr(reference, "thd", thd)


@pytest.mark.parametrize("name", list(reference.lengths_readers()))
@pytest.mark.parametrize(("cu", "error", "words"), reference.NO_LENGTHS[:-1])  # not by value: one rule of a copy
def test_lengths_that_are_none(name: str, cu: Any, error: Any, words: str) -> None:
    reference.test_lengths_that_are_none(name, cu, error, words)


@pytest.mark.parametrize("name", [name for name in reference.lengths_readers() if name != "copy"])
def test_lengths_by_value(name: str) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens_padded\[2\] is 8, less than cu_seqlens_padded\[1\] = 12"):
        reference.lengths_readers()[name](torch.tensor([0, 12, 8]))


@pytest.mark.parametrize("name", [name for name in reference.lengths_readers() if name != "real"])
def test_more_lengths_than_tokens(name: str) -> None:
    reference.test_more_lengths_than_tokens(name)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g: thd.thd_grad_correction(g, X, CU, "add", "add"), "grad requires grad"),
        (lambda g: thd.thd_grad_correction(X.clone(), g, CU, "add", "add"), "grad_step requires grad"),
        (lambda g: thd.thd_out_correction(X.clone(), g, LSE, LSE, CU, False, True), "out_step requires grad"),
        (
            lambda g: thd.thd_copy_valid_tokens_from_per_split_to_rank_local(X.clone(), g, CU, CU),
            "inp requires grad",
        ),
    ],
)
def test_in_place_helpers_have_no_gradient(call: Any, words: str) -> None:
    leaf = X.clone().requires_grad_()
    with pytest.raises(ValueError, match=words):
        call(leaf)
    with torch.no_grad():
        call(leaf)


def test_what_is_changed_has_a_dense_last_axis() -> None:
    with pytest.raises(ValueError, match=r"grad has shape \[12, 2, 4\] and strides .*stride 1"):
        thd.thd_grad_correction(torch.zeros(12, 4, 2).transpose(1, 2), X, CU, "add", "add")
    out = torch.zeros(12, 3, 2, 4).transpose(1, 2)
    with pytest.raises(ValueError, match="between tokens and the last must be dense"):
        thd.thd_copy_valid_tokens_from_per_split_to_rank_local(out, torch.zeros(12, 2, 3, 4), CU, CU)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        ((), ValueError, r"x has shapes \[\]"),
        ((X, X[:8]), ValueError, r"x has shapes \[\[12, 2, 4\], \[8, 2, 4\]\].*same tokens"),
        ((X, 1), TypeError, r"x\[1\] is a int"),
    ],
)
def test_tuples(x: Any, error: type[Exception], words: str) -> None:
    for package in (thd, __import__("cp_ref").thd):
        for move in (package.thd_sequence_order_to_cp_rank_order, package.thd_read_half_tensor):
            with pytest.raises(error, match=words):
                move(x, CU, 1)


def test_padded_tokens_too_few() -> None:
    ids = torch.arange(12)
    for package in (thd, __import__("cp_ref").thd):
        with pytest.raises(ValueError, match=r"padded_tokens is 15"):
            package.pad_thd_sequences_for_cp(ids, ids, CU, 8, padded_tokens=15)
        with pytest.raises(TypeError, match=r"input_ids has dtype torch.float32"):
            package.pad_thd_sequences_for_cp(ids.float(), ids, CU, 8)
