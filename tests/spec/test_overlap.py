"""Whether two tensors share a byte: against all of their bytes, listed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_ref.contract.call_checks import check_apart, overlap

STORAGE = torch.zeros(600, dtype=torch.int16)


def bytes_of(x: torch.Tensor) -> set[int]:
    at = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        at = (at[:, None] + stride * torch.arange(size)).flatten()
    item = x.element_size()
    return {x.data_ptr() + item * n + k for n in at.tolist() for k in range(item)}


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Any axes, also some of size 0 and stride 0 and such as lie inside each other; of 1, 2 or 4 bytes."""
    x = STORAGE.view(draw(st.sampled_from([torch.int8, torch.int16, torch.float32])))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = [draw(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 24, 30])) for _ in shape]
    return x.as_strided(shape, strides, draw(st.integers(0, 20)))


@given(views(), views())
def test_any_two_views(a: torch.Tensor, b: torch.Tensor) -> None:
    assert overlap(a, b) == overlap(b, a) == bool(bytes_of(a) & bytes_of(b))


def test_large_tensors_take_no_time() -> None:
    kv = torch.empty(2**12, 2, 2**10, 2**8, dtype=torch.bfloat16, device="cpu")[:, :, ::2]
    assert not overlap(kv[:, 0], kv[:, 1])
    assert overlap(kv[: 2**11 + 1, 0], kv[2**11 :, 0])


def test_it_is_named() -> None:
    x = torch.zeros(8, 4)
    check_apart("out", x[:4], inp=x[4:], lse=x.to("meta"))
    with pytest.raises(ValueError, match="out and lse overlap in memory; out is changed in place"):
        check_apart("out", x[:4], inp=x[4:], lse=x[3:])
