"""What native operators refuse, and what they say: the tensor, its shape and the rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cp_fast.movers import LengthsMap
from tests.cp_fast.native.buffers import cumulative, native
from tests.marks import needs_cxx

pytestmark = needs_cxx

X = torch.zeros(12, 2, 4)
LENGTHS = cumulative([8, 4])
LSE = torch.zeros(2, 12)


def gather(kind: str, lengths: torch.Tensor, *xs: torch.Tensor, a: int = 2, b: int = 0) -> object:
    return native().gather(xs or [X], LengthsMap("rows", kind, lengths, a=a, b=b))


def put(x: torch.Tensor, kind: str, lengths: torch.Tensor, real: torch.Tensor | None = None, a: int = 0) -> None:
    native().scatter_([X.clone()], [x], LengthsMap("rows", kind, lengths, real, a=a))


def merge(rows: LengthsMap, lse: torch.Tensor, lse_step: torch.Tensor) -> None:
    native().merge_(torch.empty(8, 1, 0), lse, torch.empty(4, 1, 0), lse_step, rows)


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "lengths of floats": (
        lambda: gather("rank_order", LENGTHS.float(), X),
        TypeError,
        r"lengths has shape \[3\] and another dtype than int32 and int64",
    ),
    "lengths in two axes": (
        lambda: gather("rank_order", LENGTHS[None], X),
        ValueError,
        r"lengths has shape \[1, 3\]; it must be \[b \+ 1\]",
    ),
    "no lengths": (
        lambda: gather("half", LENGTHS[:0], a=0),
        ValueError,
        r"lengths has shape \[0\]; it must be \[b \+ 1\], cumulative lengths: at least one entry",
    ),
    "lengths with a stride": (
        lambda: gather("rank_order", torch.tensor([0, 9, 8, 9, 12, 9])[::2], X),
        ValueError,
        r"lengths has shape \[3\] and stride 2; it must be contiguous",
    ),
    "lengths that decrease": (
        lambda: gather("rank_order", torch.tensor([0, 8, 4]), X),
        ValueError,
        r"lengths\[2\] is 4 after 8; cumulative lengths must not decrease",
    ),
    "lengths that do not begin at 0": (
        lambda: gather("rank_order", torch.tensor([4, 8]), X),
        ValueError,
        r"lengths\[0\] is 4; it must be 0",
    ),
    "a length that does not divide": (
        lambda: gather("rank_order", torch.tensor([0, 4, 10]), X),
        ValueError,
        r"lengths gives sequence 1 the length 6; it must be a multiple of 4",
    ),
    "lengths past the buffer": (
        lambda: gather("rank_order", torch.tensor([0, 16]), X),
        ValueError,
        r"lengths ends at 16, past the buffer's 12 tokens",
    ),
    "a tail that does not divide": (
        lambda: gather("rank_order", torch.tensor([0, 8]), X[:9]),
        ValueError,
        r"lengths ends at 8 in a buffer of 9 tokens; the tail must be a multiple of 2",
    ),
    "a rank that is not there": (
        lambda: gather("slice", LENGTHS, b=2),
        ValueError,
        r"cp_rank is 2; it must be from 0 to 1",
    ),
    "no ranks": (
        lambda: gather("rank_order", LENGTHS, a=0),
        ValueError,
        "cp_size is 0; it must be from 1 to 2147483647",
    ),
    "another half": (lambda: gather("half", LENGTHS, a=2), ValueError, "half is 2; it must be 0 or 1"),
    "tensors of other sizes": (
        lambda: gather("rank_order", LENGTHS, X, X[:8]),
        ValueError,
        r"xs\[0\] has shape \[12, 2, 4\], xs\[1\] has shape \[8, 2, 4\]; they must have as many tokens",
    ),
    "a number": (
        lambda: gather("rank_order", LENGTHS, torch.tensor(1.0)),
        ValueError,
        r"xs\[0\] has shape \[\]; it must be \[t, ...\]",
    ),
    "a row past the end": (
        lambda: native().gather([X], torch.tensor([0, 12])),
        ValueError,
        r"rows\[1\] is 12; it must be a row of a tensor of 12",
    ),
    "a negative row": (
        lambda: native().scatter_([X], [X[:1]], torch.tensor([-1])),
        ValueError,
        r"rows\[0\] is -1; it must be a row of a tensor of 12",
    ),
    "rows of another tensor": (
        lambda: native().scatter_([X], [X[:3]], slice(0, 2)),
        ValueError,
        r"xs\[0\] has shape \[3, 2, 4\]; it must be \[n, ...\] with n = 2 rows",
    ),
    "a slice with a step": (
        lambda: native().merge_(X, LSE, X, LSE, slice(0, 12, 2)),
        ValueError,
        r"rows are slice\(0, 12, 2\); a slice must have step 1",
    ),
    "integers to convert": (
        lambda: put(X.int(), "valid", LENGTHS, LENGTHS),
        TypeError,
        r"xs\[0\] has shape \[12, 2, 4\] and a dtype of no arithmetic",
    ),
    "an output without memory of its own": (
        lambda: native().scatter_([torch.zeros(1, 4).expand(12, 4)], [torch.zeros(12, 4)], slice(0, 12)),
        ValueError,
        r"outs\[0\] has shape \[12, 4\] and strides \[0, 1\]; it is written, so no stride may be 0",
    ),
    "more real tokens than slots": (
        lambda: put(X, "valid", LENGTHS, cumulative([8, 5])),
        ValueError,
        r"real_lengths ends at 13, past the buffer's 12 tokens",
    ),
    "other numbers of sequences": (
        lambda: put(X, "valid", LENGTHS, cumulative([8])),
        ValueError,
        r"real_lengths has shape \[2\] and lengths has shape \[3\]; they must be as long",
    ),
    "heads that are not there": (
        lambda: native().gather_heads([X], slice(0, 12), [0, 1], [2]),
        ValueError,
        r"first_heads are \[0, 1\]; each plus 2 heads must be at most the 2 heads of xs\[0\]",
    ),
    "heads written twice": (
        lambda: native().scatter_heads_([X.clone()], [torch.zeros(2, 12, 2, 4)], slice(0, 12), [0, 0]),
        ValueError,
        r"first_heads are \[0, 0\] with 2 heads each; they must not overlap",
    ),
    "heads with gaps inside": (
        lambda: native().gather_heads([torch.zeros(12, 2, 8)[..., ::2]], slice(0, 12), [0], [1]),
        ValueError,
        r"xs\[0\] has shape \[12, 2, 4\] and strides \[16, 8, 2\]; the axes behind the heads must be contiguous",
    ),
    "heads of another dtype": (
        lambda: native().scatter_heads_([X.bfloat16()], [X[None]], slice(0, 12), [0]),
        TypeError,
        r"xs\[0\] has shape .*they must have the same dtype",
    ),
    "heads for some of the tensors": (
        lambda: native().gather_heads([X, X], slice(0, 12), [0], [1, 1]),
        ValueError,
        "1 first_heads of 2 tensors; there must be tensors, each with as many",
    ),
    "an LSE of another buffer": (
        lambda: native().merge_(X.clone(), LSE[:, :8], X, LSE, slice(0, 12)),
        ValueError,
        r"lse has shape \[2, 8\]; it must be \[2, 12\]",
    ),
    "an LSE without room": (
        lambda: merge(LengthsMap("rows", "half", cumulative([8]), a=1), torch.zeros(1, 1, 6), torch.zeros(1, 1, 4)),
        ValueError,
        r"lse has shape \[1, 1, 6\]; it must be \[b, h, s\] with room for the 8 rows of sequence 0",
    ),
    "an output whose last axis has gaps": (
        lambda: native().merge_(torch.zeros(12, 2, 8)[..., ::2], LSE, X, LSE, slice(0, 12)),
        ValueError,
        r"out has shape \[12, 2, 4\] and strides \[16, 8, 2\]; its last axis must have stride 1",
    ),
    "a step of the wrong half": (
        lambda: put(X, "half", LENGTHS, a=1),
        ValueError,
        r"xs\[0\] has shape \[12, 2, 4\]; it must be \[n, ...\] with n = 6 rows",
    ),
    "rows without a source": (
        lambda: gather("in_half", LENGTHS, a=0),
        ValueError,
        "this kind of row map has rows without a source",
    ),
    "a scatter by an order": (
        lambda: put(X, "rank_order", LENGTHS, a=2),
        ValueError,
        "this kind of row map has no scatter",
    ),
    "a map without a table": (
        lambda: native()._gather([X], 1, None, None, 0, 0),
        ValueError,
        "the table is None; this kind of row map needs one",
    ),
    "a map of no kind": (
        lambda: native()._gather([X], 9, LENGTHS, None, 0, 0),
        ValueError,
        "map is 9; it must be that of a row map",
    ),
    "more tokens than int32 counts": (
        lambda: native().row_indices(LengthsMap("rows", "slice", LENGTHS, a=2), 2**31 + 2),
        ValueError,
        "total_tokens is 2147483650; int32 lengths cannot count so many",
    ),
    "another device": (
        lambda: gather("rank_order", LENGTHS, X.to("meta")),
        ValueError,
        r"xs\[0\] has shape \[12, 2, 4\] on another kind of device; it must be on a CPU",
    ),
    "rows in too many pieces": (
        lambda: gather("half", LENGTHS, torch.zeros(12, 70, 6, 6)[:, :, ::2, ::2], a=0),
        ValueError,
        r"xs\[0\] has shape \[12, 70, 3, 3\] and strides \[2520, 36, 12, 2\].*rows must be contiguous but for one axis",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words):
        call()


def test_nothing_to_do_is_no_error() -> None:
    native().scatter_([], [], slice(0, 3))
    native().scatter_([], [], torch.tensor([], dtype=torch.int64), add=True)
