"""What native operators refuse, and what they say: the tensor, its shape and the rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cp_fast.movers.mover_protocol import RowRule
from tests.cp_fast.kernels.test_native import cumulative, native
from tests.marks import needs_cxx
from tests.refusals import says

pytestmark = needs_cxx

X = torch.zeros(12, 2, 4)
LENGTHS = cumulative([8, 4])
LSE = torch.zeros(2, 12)


def gather(kind: str, lengths: torch.Tensor, *xs: torch.Tensor, a: int = 2, b: int = 0) -> object:
    return native().gather(xs or [X], RowRule("rows", kind, lengths, a=a, b=b))


def put(x: torch.Tensor, kind: str, lengths: torch.Tensor, real: torch.Tensor | None = None, a: int = 0) -> None:
    native().scatter_([X.clone()], [x], RowRule("rows", kind, lengths, real, a=a))


def merge(rows: RowRule, lse: torch.Tensor, lse_step: torch.Tensor) -> None:
    native().merge_(torch.empty(8, 1, 0), lse, torch.empty(4, 1, 0), lse_step, rows)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (
        lambda: gather("rank_order", LENGTHS.float(), X),
        r"TypeError: lengths has shape \[3\] and another dtype than int32 and int64",
    ),
    (lambda: gather("rank_order", LENGTHS[None], X), r"ValueError: lengths has shape \[1, 3\]; it must be \[b \+ 1\]"),
    (
        lambda: gather("half", LENGTHS[:0], a=0),
        r"ValueError: lengths has shape \[0\]; it must be \[b \+ 1\], cumulative lengths: at least one entry",
    ),
    (
        lambda: gather("rank_order", torch.tensor([0, 9, 8, 9, 12, 9])[::2], X),
        r"ValueError: lengths has shape \[3\] and stride 2; it must be contiguous",
    ),
    (
        lambda: gather("rank_order", torch.tensor([0, 8, 4]), X),
        r"ValueError: lengths\[2\] is 4 after 8; cumulative lengths must not decrease",
    ),
    (lambda: gather("rank_order", torch.tensor([4, 8]), X), r"ValueError: lengths\[0\] is 4; it must be 0"),
    (
        lambda: gather("rank_order", torch.tensor([0, 4, 10]), X),
        r"ValueError: lengths gives sequence 1 the length 6; it must be a multiple of 4",
    ),
    (
        lambda: gather("rank_order", torch.tensor([0, 16]), X),
        r"ValueError: lengths ends at 16, past the buffer's 12 tokens",
    ),
    (
        lambda: gather("rank_order", torch.tensor([0, 8]), X[:9]),
        r"ValueError: lengths ends at 8 in a buffer of 9 tokens; the tail must be a multiple of 2",
    ),
    (lambda: gather("slice", LENGTHS, b=2), r"ValueError: cp_rank is 2; it must be from 0 to 1"),
    (lambda: gather("rank_order", LENGTHS, a=0), "ValueError: cp_size is 0; it must be from 1 to 2147483647"),
    (lambda: gather("half", LENGTHS, a=2), "ValueError: half is 2; it must be 0 or 1"),
    (
        lambda: gather("rank_order", LENGTHS, X, X[:8]),
        r"ValueError: xs\[0\] has shape \[12, 2, 4\], xs\[1\] has shape \[8, 2, 4\]; they must have as many tokens",
    ),
    (
        lambda: gather("rank_order", LENGTHS, torch.tensor(1.0)),
        r"ValueError: xs\[0\] has shape \[\]; it must be \[t, ...\]",
    ),
    (
        lambda: native().gather([X], torch.tensor([0, 12])),
        r"ValueError: rows\[1\] is 12; it must be a row of a tensor of 12",
    ),
    (
        lambda: native().scatter_([X], [X[:1]], torch.tensor([-1])),
        r"ValueError: rows\[0\] is -1; it must be a row of a tensor of 12",
    ),
    (
        lambda: native().scatter_([X], [X[:3]], slice(0, 2)),
        r"ValueError: xs\[0\] has shape \[3, 2, 4\]; it must be \[n, ...\] with n = 2 rows",
    ),
    (
        lambda: native().merge_(X, LSE, X, LSE, slice(0, 12, 2)),
        r"ValueError: rows are slice\(0, 12, 2\); a slice must have step 1",
    ),
    (
        lambda: put(X.int(), "valid", LENGTHS, LENGTHS),
        r"TypeError: xs\[0\] has shape \[12, 2, 4\] and a dtype of no arithmetic",
    ),
    (
        lambda: native().scatter_([torch.zeros(1, 4).expand(12, 4)], [torch.zeros(12, 4)], slice(0, 12)),
        r"ValueError: outs\[0\] has shape \[12, 4\] and strides \[0, 1\]; it is written, so no stride may be 0",
    ),
    (
        lambda: put(X, "valid", LENGTHS, cumulative([8, 5])),
        r"ValueError: real_lengths ends at 13, past the buffer's 12 tokens",
    ),
    (
        lambda: put(X, "valid", LENGTHS, cumulative([8])),
        r"ValueError: real_lengths has shape \[2\] and lengths has shape \[3\]; they must be as long",
    ),
    (
        lambda: native().gather_heads([X], slice(0, 12), [0, 1], [2]),
        r"ValueError: first_heads are \[0, 1\]; each plus 2 heads must be at most the 2 heads of xs\[0\]",
    ),
    (
        lambda: native().scatter_heads_([X.clone()], [torch.zeros(2, 12, 2, 4)], slice(0, 12), [0, 0]),
        r"ValueError: first_heads are \[0, 0\] with 2 heads each; they must not overlap",
    ),
    (
        lambda: native().gather_heads([torch.zeros(12, 2, 8)[..., ::2]], slice(0, 12), [0], [1]),
        r"ValueError: xs\[0\] has shape \[12, 2, 4\] and strides \[16, 8, 2\]; the axes behind the heads must be",
    ),
    (
        lambda: native().scatter_heads_([X.bfloat16()], [X[None]], slice(0, 12), [0]),
        r"TypeError: xs\[0\] has shape .*they must have the same dtype",
    ),
    (
        lambda: native().gather_heads([X, X], slice(0, 12), [0], [1, 1]),
        "ValueError: 1 first_heads of 2 tensors; there must be tensors, each with as many",
    ),
    (
        lambda: native().merge_(X.clone(), LSE[:, :8], X, LSE, slice(0, 12)),
        r"ValueError: lse has shape \[2, 8\]; it must be \[2, 12\]",
    ),
    (
        lambda: merge(RowRule("rows", "half", cumulative([8]), a=1), torch.zeros(1, 1, 6), torch.zeros(1, 1, 4)),
        r"ValueError: lse has shape \[1, 1, 6\]; it must be \[b, h, s\] with room for the 8 rows of sequence 0",
    ),
    (
        lambda: native().merge_(torch.zeros(12, 2, 8)[..., ::2], LSE, X, LSE, slice(0, 12)),
        r"ValueError: out has shape \[12, 2, 4\] and strides \[16, 8, 2\]; its last axis must have stride 1",
    ),
    (
        lambda: put(X, "half", LENGTHS, a=1),
        r"ValueError: xs\[0\] has shape \[12, 2, 4\]; it must be \[n, ...\] with n = 6 rows",
    ),
    (lambda: gather("in_half", LENGTHS, a=0), "ValueError: this kind of row map has rows without a source"),
    (lambda: put(X, "rank_order", LENGTHS, a=2), "ValueError: this kind of row map has no scatter"),
    (
        lambda: native()._gather([X], 1, None, None, 0, 0),
        "ValueError: the table is None; this kind of row map needs one",
    ),
    (lambda: native()._gather([X], 9, LENGTHS, None, 0, 0), "ValueError: map is 9; it must be that of a row map"),
    (
        lambda: native().row_indices(RowRule("rows", "slice", LENGTHS, a=2), 2**31 + 2),
        "ValueError: total_tokens is 2147483650; int32 lengths cannot count so many",
    ),
    (
        lambda: gather("rank_order", LENGTHS, X.to("meta")),
        r"ValueError: xs\[0\] has shape \[12, 2, 4\] on another kind of device; it must be on a CPU",
    ),
    (
        lambda: gather("half", LENGTHS, torch.zeros(12, 70, 6, 6)[:, :, ::2, ::2], a=0),
        r"ValueError: xs\[0\] has shape \[12, 70, 3, 3\] and strides \[2520, 36, 12, 2\].*rows must be contiguous but",
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert says(caught.value, words), caught.value


def test_nothing_to_do_is_no_error() -> None:
    native().scatter_([], [], slice(0, 3))
    native().scatter_([], [], torch.tensor([], dtype=torch.int64), add=True)
