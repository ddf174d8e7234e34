"""Cutting batches: every tensor of a batch, in every format and layout, by both packages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cp_fast
import cp_ref
from cp_fast.thd import _contiguous_rows
from cp_ref import SimGroup
from tests.thd.test_helpers import PACKAGES, cumulative

SIZES: dict[str, Any] = {"heads_q": 1, "heads_kv": 1, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}
THD = {"qkv_format": "thd"}


def parts_of(package: Any, batch: Any, layout: str = "dual_chunk", **options: Any) -> list[dict[str, Any]]:
    cut = package.thd.get_batch_on_this_cp_rank
    return SimGroup(2).run(lambda member: cut(batch, cp=package.ContextParallel(member, layout=layout), **options))


@PACKAGES
@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "thd"])
def test_every_tensor_is_cut_and_comes_back(qkv_format: str, layout: str, package: Any) -> None:
    shape = {"bshd": (2, 8), "sbhd": (8, 2), "thd": (16,)}[qkv_format]
    cu = cumulative([8, 4]) if qkv_format == "thd" else None
    tensors = {"tokens": torch.randint(0, 99, shape), "loss_mask": torch.rand(shape), "valid": torch.rand(shape) > 0.5}
    tensors["hidden"] = torch.randn(*shape, 3).bfloat16()
    others = {"attention_mask": None, "epoch": 3, "name": "x", "scale": torch.tensor(2.0)}
    others["cu_seqlens_q"] = cumulative([7])

    def there_and_back(member: Any) -> dict[str, torch.Tensor]:
        cp = package.ContextParallel(member, layout=layout)
        options = {"cp": cp, "qkv_format": qkv_format, "cu_seqlens_padded": cu}
        part = package.thd.get_batch_on_this_cp_rank({**tensors, **others}, **options)
        assert list(part) == [*tensors, *others]
        assert all(part[name] is x for name, x in others.items())
        return {name: package.unshard(part[name], **options) for name in tensors}

    for back in SimGroup(2).run(there_and_back):
        for name, x in tensors.items():
            assert torch.equal(back[name], x)


@PACKAGES
def test_what_has_fewer_axes(package: Any) -> None:
    """One value a sequence stays; positions without a batch axis are cut in sbhd."""
    batch = {"tokens": torch.arange(16).reshape(2, 8), "weight": torch.tensor([0.5, 1.0])}
    assert all(part["weight"].tolist() == [0.5, 1.0] for part in parts_of(package, batch))
    batch = {"tokens": torch.arange(16).reshape(8, 2), "positions": torch.arange(8)}
    parts = parts_of(package, batch, qkv_format="sbhd")
    assert [part["positions"].tolist() for part in parts] == [[0, 1, 6, 7], [2, 3, 4, 5]]


ONES = torch.ones(2, 8)
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ({"tokens": ONES, "positions": torch.arange(8)}, {}, r"positions.*\[8\].*batch axis"),
    ({"tokens": torch.ones(8, 8), "weight": torch.ones(8)}, {"qkv_format": "sbhd"}, "weight.*one value a sequence"),
    ({"tokens": ONES, "mask": torch.ones(2, 1, 8, 8)}, {}, r"mask.*\[2, 1, 8, 8\].*axis 1"),
    (
        {"tokens": torch.ones(12), "n": cumulative([4])},
        THD | {"cu_seqlens_padded": cumulative([8, 4])},
        r"\[2\].*axis 0",
    ),
    (
        {"tokens": torch.ones(6)},
        THD | {"cu_seqlens_padded": cumulative([6])},
        "the length 6, .*cp_size 2 .*multiple of 4",
    ),
    ({"tokens": torch.ones(8)}, THD, "cu_seqlens_padded is None"),
    ({"tokens": ONES}, {"cu_seqlens_padded": cumulative([8])}, "cu_seqlens_padded is given"),
    ({"tokens": ONES}, {"qkv_format": "bhsd"}, "qkv_format is 'bhsd'"),
    ([ONES], {}, "batch is a list"),
]
OF_CP_FAST: list[tuple[Any, dict[str, Any], str]] = [
    ({"ids": torch.arange(12)}, THD | {"cu_seqlens_padded": cumulative([16]), "layout": "contiguous"}, "ends at 16"),
    (
        {"ids": torch.arange(11)},
        THD | {"cu_seqlens_padded": cumulative([9]), "layout": "contiguous"},
        "buffer has length 9",
    ),
]


@PACKAGES
def test_batches_that_are_refused(package: Any) -> None:
    for batch, options, words in REFUSED + (OF_CP_FAST if package is cp_fast else []):
        with pytest.raises((ValueError, TypeError), match=words):
            parts_of(package, batch, **options)


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
@given(st.lists(st.integers(0, 4), max_size=5), st.integers(0, 3), st.integers(1, 4))
def test_packed_batches(layout: str, chunks: list[int], tail: int, cp_size: int) -> None:
    """Tails, empty sequences; the parts and their gradients are the reference's."""
    cu = cumulative([2 * cp_size * n for n in chunks])
    tokens = int(cu[-1]) + cp_size * tail
    hidden, ids = torch.randn(tokens, 3, dtype=torch.float64), torch.arange(tokens)
    weight = torch.randn(tokens // cp_size, 3, dtype=torch.float64)

    def part(package: Any, member: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        leaf = hidden.clone().requires_grad_()
        cp = package.ContextParallel(member, layout=layout)
        batch = {"hidden": leaf, "ids": ids, "epoch": 1}
        got = package.thd.get_batch_on_this_cp_rank(batch, cp=cp, qkv_format="thd", cu_seqlens_padded=cu)
        assert list(got) == ["hidden", "ids", "epoch"]
        (got["hidden"] * weight).sum().backward()
        assert leaf.grad is not None
        return got["hidden"].detach(), got["ids"], leaf.grad

    for one, other in zip(
        SimGroup(cp_size).run(lambda member: part(cp_fast, member)),
        SimGroup(cp_size).run(lambda member: part(cp_ref, member)),
        strict=True,
    ):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@given(st.integers(0, 5), st.integers(0, 3), st.integers(1, 4))
def test_contiguous_rows_of_lengths_on_a_gpu(own: int, tail: int, cp_size: int) -> None:
    """The arithmetic that runs there, here."""
    for rank, member in enumerate(SimGroup(cp_size).run(lambda member: member)):
        cp, end = cp_fast.ContextParallel(member, layout="contiguous"), own * cp_size
        rows = _contiguous_rows(torch.tensor(end), (own + tail) * cp_size, cp)
        mine = range(rank * own, (rank + 1) * own), range(end + rank * tail, end + (rank + 1) * tail)
        assert rows.tolist() == [*mine[0], *mine[1]]


@PACKAGES
def test_rows_without_a_token_have_no_class(package: Any) -> None:
    """10 tokens on 3 ranks are slices of 4 rows, and a sequence of 10 tokens of bshd is cut as 12."""
    cut, labels = package.thd.get_batch_on_this_cp_rank, torch.arange(1, 11)

    def one(member: Any) -> tuple[list[int], ...]:
        cp = package.ContextParallel(member, layout="balanced")
        plan = package.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=torch.tensor([0, 5, 10]), **SIZES)
        part = cut({"labels": labels, "shift_labels": labels, "ids": labels}, cp=cp, qkv_format="thd", plan=plan)
        mine = package.shard(labels, cp=cp, plan=plan, fill_value=-7)
        cp = package.ContextParallel(member)
        dense = cut({"labels": labels[None], "weights": labels[None] / 2}, cp=cp)
        whole = package.shard(labels[None] / 2, cp=cp, fill_value=0.25)
        with pytest.raises(ValueError, match=r"batch\['labels'\] has dtype torch.uint8, which has no -100"):
            cut({"labels": labels[None].to(torch.uint8)}, cp=cp)
        assert cut({"labels": labels[None, :6].to(torch.uint8)}, cp=cp)["labels"].numel() == 2  # nothing is filled
        for wrong, words in ((0.5, "x has dtype torch.int64"), ("pad", "must be a number"), (2**63, "from -")):
            with pytest.raises((TypeError, ValueError), match=f"fill_value is .*{words}"):
                package.shard(labels[None], cp=cp, fill_value=wrong)
        found = (
            *(part[name] for name in ("labels", "shift_labels", "ids")),
            mine,
            *(x[0] for x in dense.values()),
            whole[0],
        )
        return tuple(x.tolist() for x in found)

    last = SimGroup(3).run(one)[2]
    assert last[:4] == ([9, 10, -100, -100], [9, 10, -100, -100], [9, 10, 0, 0], [9, 10, -7, -7])
    first = SimGroup(3).run(one)[0]
    assert first[4:] == ([1, 2, -100, -100], [0.5, 1.0, 0.0, 0.0], [0.5, 1.0, 0.25, 0.25])


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous", "balanced"])
@PACKAGES
def test_packed_batches_with_an_axis_in_front(package: Any, layout: str) -> None:
    """[1, t], as TransformerEngine, Megatron and verl pack: the slices are those of [t], and have the axis too."""
    cu, ids = cumulative([8, 4]), torch.arange(100, 112)
    hidden, positions = torch.randn(12, 3), torch.stack([torch.arange(12)] * 3)
    flat = {"input_ids": ids, "labels": ids + 1, "loss_mask": ids > 104, "hidden": hidden}
    flat |= {"position_ids": positions[0], "mrope_position_ids": positions}

    def parts(member: Any) -> None:
        cp = package.ContextParallel(member, layout=layout)
        plan = package.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=cu, **SIZES) if layout == "balanced" else None
        how = {"cp": cp, "qkv_format": "thd", "cu_seqlens_padded": None if plan else cu, "plan": plan}
        in_front = {name: x[None] for name, x in flat.items()} | {"mrope_position_ids": positions[:, None]}
        one = package.thd.get_batch_on_this_cp_rank(flat, **how)
        other = package.thd.get_batch_on_this_cp_rank(in_front, **how)
        for name, x in one.items():
            axis = 1 if name == "mrope_position_ids" else 0
            assert other[name].is_contiguous()
            assert torch.equal(other[name], x.unsqueeze(axis)), name
        mixed = package.thd.get_batch_on_this_cp_rank({"ids": ids[None], "hidden": hidden}, **how)
        assert torch.equal(mixed["ids"], one["input_ids"][None])
        assert torch.equal(mixed["hidden"], one["hidden"])
        with pytest.raises(
            ValueError, match=r"batch\['ids'\] has shape \[1, 12\] and batch\['position_ids'\] has \[1, 8\]"
        ):
            package.thd.get_batch_on_this_cp_rank({"ids": ids[None], "position_ids": positions[:1, :8]}, **how)
        with pytest.raises(ValueError, match=r"batch\['mask'\] has \[1, 1, 12, 12\]: with qkv_format 'thd'"):
            package.thd.get_batch_on_this_cp_rank({"ids": ids[None], "mask": torch.ones(1, 1, 12, 12)}, **how)

    SimGroup(2).run(parts)


@PACKAGES
def test_a_packed_token_is_no_axis_in_front(package: Any) -> None:
    """Where the sequences have one token together, [1, 2] is a token of two numbers."""
    batch = {"ids": torch.tensor([4]), "x": torch.tensor([[5.0, 6.0]])}

    def one(member: Any) -> list[list[float]]:
        cp = package.ContextParallel(member)
        plan = package.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=torch.tensor([0, 1]), **SIZES)
        return package.thd.get_batch_on_this_cp_rank(batch, cp=cp, plan=plan)["x"].tolist()

    assert SimGroup(2).run(one) == [[[5.0, 6.0]], [[0.0, 0.0]]]
    cp = package.ContextParallel(SimGroup(1).run(lambda member: member)[0])
    alone = package.thd.get_batch_on_this_cp_rank(batch, cp=cp, qkv_format="thd", cu_seqlens_padded=cumulative([1]))
    assert alone["x"].tolist() == [[5.0, 6.0]]


@PACKAGES
def test_padding_with_an_axis_in_front(package: Any) -> None:
    pad, ids, cu = package.thd.pad_thd_sequences_for_cp, torch.tensor([1, 1, 1, 2, 2, 8]), cumulative([3, 2])
    flat, in_front = pad(ids, ids + 10, cu, 4), pad(ids[None], ids[None] + 10, cu, 4)
    assert torch.equal(in_front[0], flat[0][None])
    assert torch.equal(in_front[1], flat[1][None])
    assert torch.equal(in_front[2], flat[2])
