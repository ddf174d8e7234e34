"""Padding and cutting batches; head dims."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_ref import ContextParallel, SimGroup, dense_attention, unshard
from cp_ref.thd import get_batch_on_this_cp_rank, pad_thd_sequences_for_cp, pad_v, thd_get_partitioned_indices, trim_out


def cumulative(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


@given(
    st.lists(st.integers(0, 9), max_size=8),
    st.integers(1, 8),
    st.integers(0, 3),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_padding(lengths: list[int], factor: int, tail: int, dtype: torch.dtype) -> None:
    total = sum(lengths) + tail
    ids, labels = torch.arange(1, total + 1), torch.arange(1001, total + 1001, dtype=torch.int32)
    want_ids, want_labels, slots, rest = [], [], [], list(range(1, total + 1))
    for length in lengths:
        spare = -length % factor
        mine, rest = rest[:length], rest[length:]
        want_ids += mine + [7] * spare
        want_labels += [1000 + i for i in mine] + [-1] * spare
        slots.append(length + spare)
    got = pad_thd_sequences_for_cp(ids, labels, cumulative(lengths, dtype), factor, 7, -1)
    assert [x.dtype for x in got] == [torch.int64, torch.int32, dtype]
    assert got[0].tolist() == want_ids + rest
    assert got[1].tolist() == want_labels + [1000 + i for i in rest]
    assert got[2].tolist() == [0, *accumulate(slots)]


def test_padding_defaults() -> None:
    ids, labels, _ = pad_thd_sequences_for_cp(torch.ones(3).long(), torch.ones(3).long(), cumulative([3]), 4)
    assert (ids.tolist(), labels.tolist()) == ([1, 1, 1, 0], [1, 1, 1, -100])


def parts_of(
    batch: dict[str, Any], cp_size: int = 2, layout: Any = "dual_chunk", **options: Any
) -> list[dict[str, Any]]:
    return SimGroup(cp_size).run(
        lambda member: get_batch_on_this_cp_rank(batch, cp=ContextParallel(member, layout=layout), **options)
    )


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "thd"])
def test_every_tensor_is_cut_and_comes_back(qkv_format: str, layout: Any) -> None:
    shape = {"bshd": (2, 8), "sbhd": (8, 2), "thd": (16,)}[qkv_format]
    cu = cumulative([8, 4]) if qkv_format == "thd" else None
    tensors = {
        "tokens": torch.randint(0, 99, shape),
        "loss_mask": torch.rand(shape),
        "valid": torch.rand(shape) > 0.5,
        "hidden": torch.randn(*shape, 3).bfloat16(),
    }
    others = {
        "attention_mask": None,
        "epoch": 3,
        "name": "x",
        "scale": torch.tensor(2.0),
        "cu_seqlens_q": cumulative([7]),
    }

    def there_and_back(member: Any) -> dict[str, torch.Tensor]:
        cp, options = ContextParallel(member, layout=layout), {"qkv_format": qkv_format, "cu_seqlens_padded": cu}
        part = get_batch_on_this_cp_rank({**tensors, **others}, cp=cp, **options)
        assert list(part) == [*tensors, *others]
        assert all(part[name] is x for name, x in others.items())
        return {name: unshard(part[name], cp=cp, **options) for name in tensors}

    for back in SimGroup(2).run(there_and_back):
        for name, x in tensors.items():
            assert torch.equal(back[name], x)


def test_thd_is_cut_as_the_indices_say() -> None:
    cu, ids = cumulative([8, 0, 4]), torch.arange(100, 114)
    for rank, part in enumerate(parts_of({"ids": ids}, qkv_format="thd", cu_seqlens_padded=cu)):
        assert torch.equal(part["ids"], ids[thd_get_partitioned_indices(cu, 14, 2, rank)])


def test_one_value_a_sequence_stays() -> None:
    batch = {"tokens": torch.arange(16).reshape(2, 8), "weight": torch.tensor([0.5, 1.0])}
    assert all(part["weight"].tolist() == [0.5, 1.0] for part in parts_of(batch))


def test_positions_without_a_batch_axis_in_sbhd() -> None:
    batch = {"tokens": torch.arange(16).reshape(8, 2), "positions": torch.arange(8)}
    assert [part["positions"].tolist() for part in parts_of(batch, qkv_format="sbhd")] == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("batch", "options", "words"),
    [
        ({"tokens": torch.ones(2, 8), "positions": torch.arange(8)}, {}, r"positions.*\[8\].*batch axis"),
        ({"tokens": torch.ones(8, 8), "weight": torch.ones(8)}, {"qkv_format": "sbhd"}, "weight.*one value a sequence"),
        ({"tokens": torch.ones(2, 8), "mask": torch.ones(2, 1, 8, 8)}, {}, r"mask.*\[2, 1, 8, 8\].*axis 1"),
        (
            {"tokens": torch.ones(12), "lengths": torch.tensor([8, 4])},
            {"qkv_format": "thd", "cu_seqlens_padded": cumulative([8, 4])},
            r"lengths.*\[2\].*axis 0",
        ),
        (
            {"tokens": torch.ones(6)},
            {"qkv_format": "thd", "cu_seqlens_padded": cumulative([6])},
            "cu_seqlens_padded.*6.*layout 'dual_chunk' at cp_size 2.*4",
        ),
        ({"tokens": torch.ones(8)}, {"qkv_format": "thd"}, "cu_seqlens_padded is None"),
        ({"tokens": torch.ones(2, 8)}, {"cu_seqlens_padded": cumulative([8])}, "cu_seqlens_padded is given"),
        ({"tokens": torch.ones(2, 8)}, {"qkv_format": "bhsd"}, "qkv_format is 'bhsd'"),
    ],
)
def test_batches_that_are_refused(batch: dict[str, Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parts_of(batch, **options)


def test_a_batch_is_a_mapping() -> None:
    with pytest.raises(TypeError, match="batch is a list"):
        parts_of([torch.ones(2, 8)])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_head_dims(dtype: torch.dtype) -> None:
    v = torch.arange(24).reshape(2, 3, 4).to(dtype)
    padded = pad_v(v, 6)
    assert padded.shape == (2, 3, 6)
    assert padded.dtype == dtype
    assert padded.float()[..., 4:].eq(0).all()
    assert torch.equal(trim_out(padded, 4).float(), v.float())
    assert pad_v(v, 4) is v


def test_padding_v_changes_nothing() -> None:
    """Output, LSE and all gradients are bitwise those without."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, 5, 2, d, dtype=torch.float64, requires_grad=True) for d in (6, 6, 4)]
    dout = torch.randn(1, 5, 2, 4, dtype=torch.float64)
    results: list[list[torch.Tensor]] = []
    for pad in (False, True):
        q, k, v = leaves
        out, lse, _ = dense_attention(q, k, pad_v(v, 6) if pad else v)
        out = trim_out(out, 4) if pad else out
        results.append([out, lse, *torch.autograd.grad(out, leaves, dout)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
