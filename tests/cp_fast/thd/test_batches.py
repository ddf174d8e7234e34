"""Batches, head dims and tuples of the fast helpers, against the reference."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cp_fast
import cp_ref
from cp_fast.thd.fast_batches import _contiguous_rows
from cp_ref import SimGroup
from tests.cp_ref.thd import test_thd_batches as reference


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@pytest.fixture
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's tests of batches, with the fast function."""
    for name in ("get_batch_on_this_cp_rank", "thd_get_partitioned_indices", "pad_v", "trim_out"):
        monkeypatch.setattr(reference, name, getattr(cp_fast.thd, name))
    monkeypatch.setattr(reference, "ContextParallel", cp_fast.ContextParallel)
    monkeypatch.setattr(reference, "unshard", cp_fast.unshard)


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "thd"])
def test_every_tensor_is_cut_and_comes_back(qkv_format: str, layout: str) -> None:
    reference.test_every_tensor_is_cut_and_comes_back(qkv_format, layout)


@pytest.mark.usefixtures("_fast")
def test_what_else_the_reference_shows() -> None:
    reference.test_thd_is_cut_as_the_indices_say()
    reference.test_one_value_a_sequence_stays()
    reference.test_positions_without_a_batch_axis_in_sbhd()
    reference.test_padding_v_changes_nothing()


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
        cp = cp_fast.ContextParallel(member, layout="contiguous")
        rows = _contiguous_rows(torch.tensor(own * cp_size), (own + tail) * cp_size, cp)
        end = own * cp_size
        assert rows.tolist() == [
            *range(rank * own, (rank + 1) * own),
            *range(end + rank * tail, end + (rank + 1) * tail),
        ]


def test_batches_that_are_refused() -> None:
    def cut(batch: dict[str, Any], cu: Any, layout: Any = "dual_chunk") -> Any:
        return SimGroup(2).run(
            lambda member: cp_fast.thd.get_batch_on_this_cp_rank(
                batch, cp=cp_fast.ContextParallel(member, layout=layout), qkv_format="thd", cu_seqlens_padded=cu
            )
        )

    ids = torch.arange(12)
    with pytest.raises(ValueError, match="cu_seqlens_padded is None"):
        cut({"ids": ids}, None)
    with pytest.raises(ValueError, match=r"sequence 1 the length 6, .*cp_size 2 needs a multiple of 4"):
        cut({"ids": ids}, cumulative([4, 6]))
    with pytest.raises(ValueError, match=r"x.shape\[0\] is 12 and cu_seqlens_padded ends at 16"):
        cut({"ids": ids}, cumulative([16]), "contiguous")
    with pytest.raises(ValueError, match="the packed buffer has length 9"):
        cut({"ids": ids[:11]}, cumulative([9]), "contiguous")
    with pytest.raises(TypeError, match="batch is a list"):
        cut([ids], cumulative([12]))  # type: ignore[arg-type]


@pytest.mark.parametrize("package", [cp_fast, cp_ref])
def test_tuples_are_their_elements(package: Any) -> None:
    cu, x, y = cumulative([8, 4]), torch.randn(14, 2, 3), torch.arange(14)
    for move, options in (
        (package.thd.thd_sequence_order_to_cp_rank_order, {"cp_size": 2}),
        (package.thd.thd_cp_rank_order_to_sequence_order, {"cp_size": 2}),
        (package.thd.thd_read_half_tensor, {"half": 1}),
    ):
        both = move((x, y), cu, **options)
        assert isinstance(both, tuple)
        assert torch.equal(both[0], move(x, cu, **options))
        assert torch.equal(both[1], move(y, cu, **options))


@pytest.mark.parametrize("package", [cp_fast, cp_ref])
def test_padded_tokens(package: Any) -> None:
    """What is left behind the sequences holds the tail, cut or filled up."""
    ids = torch.tensor([1, 1, 1, 2, 2, 8, 9])
    cut = {n: package.thd.pad_thd_sequences_for_cp(ids, ids, cumulative([3, 2]), 4, 0, -1, n) for n in (8, 9, 12)}
    assert cut[8][0].tolist() == [1, 1, 1, 0, 2, 2, 0, 0]
    assert cut[9][0].tolist() == [1, 1, 1, 0, 2, 2, 0, 0, 8]
    assert cut[12][1].tolist() == [1, 1, 1, -1, 2, 2, -1, -1, 8, 9, -1, -1]


@pytest.mark.parametrize("kernels", ["first", "torch"])
@pytest.mark.parametrize("package", [cp_fast, cp_ref])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_tokens(dtype: torch.dtype, package: Any, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of tokens are uint16: they move as int64 does."""
    if kernels == "torch":
        monkeypatch.setenv("CP_FAST_KERNELS", "torch")
    helpers, cu, given = package.thd, cumulative([8, 4]), torch.arange(14)
    given[3] = torch.iinfo(dtype).max if dtype != torch.uint64 else 2**62

    def moved(ids: torch.Tensor) -> list[torch.Tensor]:
        out = ids.flip(0).clone() if ids.dtype == torch.int64 else given.flip(0).to(ids.dtype)
        helpers.thd_copy_valid_tokens_from_per_split_to_rank_local(out, ids, cu, cumulative([5, 4]))
        parts = SimGroup(2).run(
            lambda member: helpers.get_batch_on_this_cp_rank(
                {"ids": ids}, cp=package.ContextParallel(member), qkv_format="thd", cu_seqlens_padded=cu
            )["ids"]
        )
        return [
            helpers.thd_sequence_order_to_cp_rank_order(ids, cu, 2),
            helpers.thd_cp_rank_order_to_sequence_order(ids, cu, 2),
            helpers.thd_read_half_tensor(ids, cu, 1),
            *helpers.pad_thd_sequences_for_cp(ids, ids, cumulative([8, 3]), 4, 1, 200)[:2],
            *(out, *parts),
        ]

    for got, want in zip(moved(given.to(dtype)), moved(given), strict=True):
        assert got.dtype == dtype
        assert got.tolist() == want.tolist()


@pytest.mark.parametrize("package", [cp_fast, cp_ref])
def test_rows_without_a_token_have_no_class(package: Any) -> None:
    """10 tokens on 3 ranks are slices of 4 rows, and a sequence of 10 tokens of bshd is cut as 12."""
    cut, labels = package.thd.get_batch_on_this_cp_rank, torch.arange(1, 11)
    sizes = {"heads_q": 1, "heads_kv": 1, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}

    def one(member: Any) -> tuple[list[int], ...]:
        cp = package.ContextParallel(member, layout="balanced")
        plan = package.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=torch.tensor([0, 5, 10]), **sizes)
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


@pytest.mark.parametrize("kernels", ["first", "torch"])
@pytest.mark.parametrize("package", [cp_fast, cp_ref])
def test_one_rank_holds_sequences_of_any_length(package: Any, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A baseline on one rank runs the code of many: lengths of 7, 0, 1 and 6, and a tail of 3."""
    if kernels == "torch":
        monkeypatch.setenv("CP_FAST_KERNELS", "torch")
    helpers, cu, rows = package.thd, cumulative([7, 0, 1, 6]), torch.arange(17)
    assert torch.equal(helpers.thd_get_partitioned_indices(cu, 17, 1, 0), rows.int())
    for move in (helpers.thd_sequence_order_to_cp_rank_order, helpers.thd_cp_rank_order_to_sequence_order):
        x = torch.randn(17, 2, 3, requires_grad=True)
        there, ids = move(x, cu, 1), move((rows, rows.to(torch.uint16)), cu, 1)
        there.square().sum().backward()
        assert torch.equal(there, x)
        assert there.data_ptr() != x.data_ptr()
        assert x.grad is not None
        assert torch.equal(x.grad, 2 * x)
        assert [one.tolist() for one in ids] == [rows.tolist()] * 2
        with pytest.raises(ValueError, match=r"x.shape\[0\] is 13 and cu_seqlens_padded ends at 14"):
            move(rows[:13], cu, 1)
    real = cumulative([4, 0, 1, 5])
    assert torch.equal(helpers.get_cu_seqlens_on_cp_rank(real, cu, 1, 0, True, True), real)
    assert not helpers.get_cu_seqlens_on_cp_rank(real, cu, 1, 0, False, False).any()
    even = helpers.get_cu_seqlens_on_cp_rank(cumulative([5]), cumulative([8]), 1, 0, False, True)
    assert even.tolist() == [0, 1]
    for halves in ((True, False), (False, True)):
        with pytest.raises(ValueError, match="sequence 0 the length 7, padding included, but a half needs a multiple"):
            helpers.get_cu_seqlens_on_cp_rank(real, cu, 1, 0, *halves)
    with pytest.raises(ValueError, match="sequence 0 7 slots, but it has 8 tokens"):
        helpers.get_cu_seqlens_on_cp_rank(cumulative([8, 0, 0, 0]), cu, 1, 0, True, True)
    for layout in ("dual_chunk", "contiguous"):
        cp = package.ContextParallel(SimGroup(1).run(lambda member: member)[0], layout=layout)
        leaf = torch.randn(17, 3, requires_grad=True)
        batch = {"hidden": leaf, "ids": rows}
        got = helpers.get_batch_on_this_cp_rank(batch, cp=cp, qkv_format="thd", cu_seqlens_padded=cu)
        got["hidden"].sum().backward()
        assert torch.equal(got["hidden"], leaf)
        assert torch.equal(got["ids"], rows)
        assert leaf.grad is not None
        assert leaf.grad.eq(1).all()


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous", "balanced"])
@pytest.mark.parametrize("package", [cp_fast, cp_ref])
def test_packed_batches_with_an_axis_in_front(package: Any, layout: str) -> None:
    """[1, t], as TransformerEngine, Megatron and verl pack: the slices are those of [t], and have the axis too."""
    cu, ids = cumulative([8, 4]), torch.arange(100, 112)
    hidden, positions = torch.randn(12, 3), torch.stack([torch.arange(12)] * 3)
    flat = {"input_ids": ids, "labels": ids + 1, "loss_mask": ids > 104, "hidden": hidden}
    flat |= {"position_ids": positions[0], "mrope_position_ids": positions}
    sizes = {"heads_q": 1, "heads_kv": 1, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}

    def parts(member: Any) -> None:
        cp = package.ContextParallel(member, layout=layout)
        plan = package.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=cu, **sizes) if layout == "balanced" else None
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


@pytest.mark.parametrize("package", [cp_fast, cp_ref])
def test_a_packed_token_is_no_axis_in_front(package: Any) -> None:
    """Where the sequences have one token together, [1, 2] is a token of two numbers."""
    sizes = {"heads_q": 1, "heads_kv": 1, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}
    batch = {"ids": torch.tensor([4]), "x": torch.tensor([[5.0, 6.0]])}

    def one(member: Any) -> list[list[float]]:
        cp = package.ContextParallel(member)
        plan = package.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=torch.tensor([0, 1]), **sizes)
        return package.thd.get_batch_on_this_cp_rank(batch, cp=cp, plan=plan)["x"].tolist()

    assert SimGroup(2).run(one) == [[[5.0, 6.0]], [[0.0, 0.0]]]
    cp = package.ContextParallel(SimGroup(1).run(lambda member: member)[0])
    alone = package.thd.get_batch_on_this_cp_rank(batch, cp=cp, qkv_format="thd", cu_seqlens_padded=cumulative([1]))
    assert alone["x"].tolist() == [[5.0, 6.0]]


@pytest.mark.parametrize("package", [cp_fast, cp_ref])
def test_padding_with_an_axis_in_front(package: Any) -> None:
    pad, ids, cu = package.thd.pad_thd_sequences_for_cp, torch.tensor([1, 1, 1, 2, 2, 8]), cumulative([3, 2])
    flat, in_front = pad(ids, ids + 10, cu, 4), pad(ids[None], ids[None] + 10, cu, 4)
    assert torch.equal(in_front[0], flat[0][None])
    assert torch.equal(in_front[1], flat[1][None])
    assert torch.equal(in_front[2], flat[2])
    for labels in (ids, ids[None, :3], ids[None, None]):
        with pytest.raises(
            ValueError, match=r"labels has shape .*; input_ids and labels must both be \[t\] or \[1, t\]"
        ):
            pad(ids[None], labels, cu, 4)
    with pytest.raises(ValueError, match=r"input_ids has shape \[2, 3\]"):
        pad(ids.view(2, 3), ids.view(2, 3), cu, 4)
    with pytest.raises(ValueError, match="input_ids has 2 tokens, fewer than"):
        pad(ids[None, :2], ids[None, :2], cu, 4)
