"""What native operators refuse, and what they say: the tensor, its shape and the rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.cp_fast.native.buffers import cumulative, native, native_thd
from tests.marks import needs_cxx

pytestmark = needs_cxx

X = torch.zeros(12, 2, 4)
LENGTHS = cumulative([8, 4])
LSE = torch.zeros(2, 12)

REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "lengths of floats": (
        lambda: native_thd().reorder([X], LENGTHS.float(), 2, True),
        TypeError,
        r"lengths has shape \[3\] and another dtype than int32 and int64",
    ),
    "lengths in two axes": (
        lambda: native_thd().reorder([X], LENGTHS[None], 2, True),
        ValueError,
        r"lengths has shape \[1, 3\]; it must be \[b \+ 1\]",
    ),
    "no lengths": (
        lambda: native_thd().read_half([X], LENGTHS[:0], 0),
        ValueError,
        r"lengths has shape \[0\]; it must be \[b \+ 1\], cumulative lengths: at least one entry",
    ),
    "lengths with a stride": (
        lambda: native_thd().reorder([X], torch.tensor([0, 9, 8, 9, 12, 9])[::2], 2, True),
        ValueError,
        r"lengths has shape \[3\] and stride 2; it must be contiguous",
    ),
    "lengths that decrease": (
        lambda: native_thd().reorder([X], torch.tensor([0, 8, 4]), 2, True),
        ValueError,
        r"lengths\[2\] is 4 after 8; cumulative lengths must not decrease",
    ),
    "lengths that do not begin at 0": (
        lambda: native_thd().reorder([X], torch.tensor([4, 8]), 2, True),
        ValueError,
        r"lengths\[0\] is 4; it must be 0",
    ),
    "a length that does not divide": (
        lambda: native_thd().reorder([X], torch.tensor([0, 4, 10]), 2, True),
        ValueError,
        r"lengths gives sequence 1 the length 6; it must be a multiple of 4",
    ),
    "lengths past the buffer": (
        lambda: native_thd().reorder([X], torch.tensor([0, 16]), 2, True),
        ValueError,
        r"lengths ends at 16, past the buffer's 12 tokens",
    ),
    "a tail that does not divide": (
        lambda: native_thd().reorder([X[:9]], torch.tensor([0, 8]), 2, True),
        ValueError,
        r"lengths ends at 8 in a buffer of 9 tokens; the tail must be a multiple of 2",
    ),
    "a rank that is not there": (
        lambda: native_thd().partition([X], LENGTHS, 2, 2),
        ValueError,
        r"cp_rank is 2; it must be from 0 to 1",
    ),
    "no ranks": (
        lambda: native_thd().reorder([X], LENGTHS, 0, True),
        ValueError,
        "cp_size is 0; it must be from 1 to 2147483647",
    ),
    "another half": (lambda: native_thd().read_half([X], LENGTHS, 2), ValueError, "half is 2; it must be 0 or 1"),
    "tensors of other sizes": (
        lambda: native_thd().reorder([X, X[:8]], LENGTHS, 2, True),
        ValueError,
        r"xs\[0\] has shape \[12, 2, 4\], xs\[1\] has shape \[8, 2, 4\]; they must have as many tokens",
    ),
    "a number": (
        lambda: native_thd().reorder([torch.tensor(1.0)], LENGTHS, 2, True),
        ValueError,
        r"xs\[0\] has shape \[\]; it must be \[t, ...\]",
    ),
    "a row past the end": (
        lambda: native().take_rows([X], torch.tensor([0, 12])),
        ValueError,
        r"rows\[1\] is 12; it must be a row of a tensor of 12",
    ),
    "a negative row": (
        lambda: native().put_rows_([X], [X[:1]], torch.tensor([-1])),
        ValueError,
        r"rows\[0\] is -1; it must be a row of a tensor of 12",
    ),
    "rows of another tensor": (
        lambda: native().put_rows_([X], [X[:3]], slice(0, 2)),
        ValueError,
        r"xs\[0\] has shape \[3, 2, 4\]; it must be \[n, ...\] with n = 2 rows",
    ),
    "a slice with a step": (
        lambda: native().merge_(X, LSE, X, LSE, slice(0, 12, 2)),
        ValueError,
        r"rows are slice\(0, 12, 2\); a slice must have step 1",
    ),
    "another dtype to copy": (
        lambda: native().put_rows_([X], [X.double()], slice(0, 12)),
        TypeError,
        r"xs\[0\] has shape \[12, 2, 4\], outs\[0\] has shape \[12, 2, 4\]; they must have the same dtype",
    ),
    "integers to convert": (
        lambda: native_thd().copy_valid_(X.clone(), X.int(), LENGTHS, LENGTHS),
        TypeError,
        r"inp has shape \[12, 2, 4\] and a dtype of no arithmetic",
    ),
    "an output without memory of its own": (
        lambda: native().put_rows_([torch.zeros(1, 4).expand(12, 4)], [torch.zeros(12, 4)], slice(0, 12)),
        ValueError,
        r"outs\[0\] has shape \[12, 4\] and strides \[0, 1\]; it is written, so no stride may be 0",
    ),
    "more real tokens than slots": (
        lambda: native_thd().copy_valid_(X.clone(), X, LENGTHS, cumulative([8, 5])),
        ValueError,
        r"real_lengths gives sequence 1 5 tokens, but lengths has room for 4",
    ),
    "other numbers of sequences": (
        lambda: native_thd().rank_lengths(cumulative([8]), LENGTHS, 2, 0, True, True),
        ValueError,
        r"real_lengths has shape \[2\] and lengths has shape \[3\]; they must be as long",
    ),
    "heads that are not there": (
        lambda: native().heads_to_front(X, slice(0, 12), [0, 1], 2),
        ValueError,
        r"first_heads are \[0, 1\]; each plus 2 heads must be at most the 2 heads of x",
    ),
    "heads written twice": (
        lambda: native().heads_to_back_(X.clone(), torch.zeros(2, 12, 2, 4), slice(0, 12), [0, 0], False),
        ValueError,
        r"first_heads are \[0, 0\] with 2 heads each; without add they must not overlap",
    ),
    "heads with gaps inside": (
        lambda: native().heads_to_front(torch.zeros(12, 2, 8)[..., ::2], slice(0, 12), [0], 1),
        ValueError,
        r"x has shape \[12, 2, 4\] and strides \[16, 8, 2\]; the axes behind the heads must be contiguous",
    ),
    "an accumulator of 16 bits": (
        lambda: native().heads_to_back_(X.bfloat16(), X[None], slice(0, 12), [0], True),
        TypeError,
        r"out has shape \[12, 2, 4\] in 16 bits; it must be float32 or float64",
    ),
    "an LSE of another buffer": (
        lambda: native().merge_(X.clone(), LSE[:, :8], X, LSE, slice(0, 12)),
        ValueError,
        r"lse has shape \[2, 8\]; it must be \[2, 12\]",
    ),
    "an LSE without room": (
        lambda: native_thd().lse_correction_(torch.zeros(2, 1, 6), torch.zeros(2, 1, 4), LENGTHS, False),
        ValueError,
        r"lse has shape \[2, 1, 6\]; it must be \[b, h, s\] with room for the 8 rows of sequence 0",
    ),
    "a result without room": (
        lambda: native_thd().read_second_half_lse(LSE, LENGTHS, True, 5),
        ValueError,
        r"lengths ends at 12, past the buffer's 10 tokens",
    ),
    "an output whose last axis has gaps": (
        lambda: native().merge_(torch.zeros(12, 2, 8)[..., ::2], LSE, X, LSE, slice(0, 12)),
        ValueError,
        r"out has shape \[12, 2, 4\] and strides \[16, 8, 2\]; its last axis must have stride 1",
    ),
    "a gradient of the wrong half": (
        lambda: native_thd().grad_correction_(X.clone(), X, LENGTHS, "none", "add"),
        ValueError,
        r"grad_step has shape \[12, 2, 4\]; it must be of 6 tokens on axis 0",
    ),
    "an action that does not exist": (
        lambda: native_thd().grad_correction_(X.clone(), X, LENGTHS, "add", "subtract"),
        ValueError,
        "action is 'subtract'; it must be 'add', 'copy' or 'none'",
    ),
    "more tokens than int32 counts": (
        lambda: native_thd().partition_indices(LENGTHS, 2**31 + 2, 2, 0),
        ValueError,
        "total_tokens is 2147483650; int32 lengths cannot count so many",
    ),
    "another device": (
        lambda: native_thd().reorder([X.to("meta")], LENGTHS, 2, True),
        ValueError,
        r"xs\[0\] has shape \[12, 2, 4\] on another kind of device; it must be on a CPU",
    ),
    "rows in too many pieces": (
        lambda: native_thd().read_half([torch.zeros(12, 70, 6, 6)[:, :, ::2, ::2]], LENGTHS, 0),
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
    native().put_rows_([], [], slice(0, 3))
    native().add_rows_([], [], torch.tensor([], dtype=torch.int64))
